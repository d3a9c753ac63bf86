"""Modules compiled in place: what they share, and whose limit their compilations count towards."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import fx

from fxckpt.torch_private import ModuleCompiler
from fxckpt.torch_private.capture.dynamo import isolated
from tests.rehearsal.test_rehearse import Block


class Counting:
    """A backend that runs graphs as they are, and counts them."""

    def __init__(self) -> None:
        self.graphs = 0

    def __call__(self, gm: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        self.graphs += 1
        return gm.forward


X = torch.randn(4, 8, requires_grad=True)


@pytest.mark.skipif(not isolated(), reason="this torch counts all compilations together")
def test_each_backend_has_its_own_limit() -> None:
    """Blocks of one class share one graph of each backend, however many backends there are."""
    for _ in range(torch._dynamo.config.recompile_limit + 2):
        backend, blocks = Counting(), [Block(), Block(), Block()]
        modules = ModuleCompiler(backend)
        for block in blocks:
            modules.compile(block)
            assert torch.equal(block(X), block.forward(X))
        assert backend.graphs == 1


def test_without_gradients_modules_may_stay_in_python() -> None:
    backend, block = Counting(), Block()
    ModuleCompiler(backend).compile(block, only_with_gradients=True)
    with torch.no_grad():
        block(X)
    assert backend.graphs == 0
    block(X)
    assert backend.graphs == 1
