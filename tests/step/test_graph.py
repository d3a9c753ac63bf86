"""Bytes of the levels of a compiled graph."""

from __future__ import annotations

from torch import nn

import fxckpt
from tests.step.stack import Block, X, clear


def test_halves_have_compiled_peaks_of_their_own() -> None:
    """Where Inductor fuses the larger half, the other one has all that it was planned to have."""
    blocks = nn.ModuleList(Block() for _ in range(3))
    backend = fxckpt.compile_blocks(blocks, "1.4MiB", inner="inductor")

    def step() -> None:
        x = X
        for block in blocks:
            x = block(x)
        x.square().mean().backward()

    for _ in range(3):
        clear(blocks)
        step()
    run = [
        (found, graph._planned(())[i])
        for graph in backend._graphs
        for i, each in enumerate(graph.plans)
        for found in each.measured.values()
    ]
    assert len(run) > 2
    for (forward, backward), level in run:
        assert forward in (0, level.forward_bytes)
        assert backward in (0, level.backward_bytes)
