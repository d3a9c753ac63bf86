"""Contest: halves compiled and run on made-up values, so that of plans that all fit the fastest is known and not supposed."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from fxckpt.passes.facts import graph_outputs
from fxckpt.torch_private import outside_trace
from fxckpt.trial import made_up

CompileHalf = Callable[[fx.GraphModule, bool], Callable[[list[Any]], Sequence[Any]]]
"""Compiles a half (True: a backward) to a function of a list, which it empties."""
ROUNDS = 5
"""Timed steps of each, in turn, after one that is not timed."""


def step_seconds(
    halves: Sequence[tuple[fx.GraphModule, fx.GraphModule]], compile_half: CompileHalf, device: torch.device, clock: Callable[[], float]
) -> list[float]:
    """Compile pairs of a forward and a backward and return the median seconds that each takes for a step.

    Raises what the step raises on made-up values that it does not take (:data:`fxckpt.trial.REFUSED`).
    """
    steps = [_Step(forward, backward, compile_half) for forward, backward in halves]
    devices = [device] if device.type == "cuda" else []
    synchronize = torch.get_device_module(device).synchronize if devices else lambda: None
    times: list[list[float]] = [[] for _ in steps]
    with outside_trace(), torch.no_grad(), torch.random.fork_rng(devices=devices):
        for _ in range(1 + ROUNDS):
            for step, seconds in zip(steps, times, strict=True):
                step.get_ready()
                synchronize()
                begin = clock()
                step()
                synchronize()
                seconds.append(clock() - begin)
    return [statistics.median(seconds[1:]) for seconds in times]


class _Step:
    """A compiled forward and backward, called as autograd calls them."""

    def __init__(self, forward: fx.GraphModule, backward: fx.GraphModule, compile_half: CompileHalf) -> None:
        self.values = [n.meta["val"] for n in forward.graph.find_nodes(op="placeholder")]
        self.names = [str(output) for output in graph_outputs(forward.graph)]
        self.reads = {n.name: n.meta["val"] for n in backward.graph.find_nodes(op="placeholder")}
        self.forward, self.backward = compile_half(forward, False), compile_half(backward, True)
        self.inputs: list[Any] = []
        self.tangents: dict[str, Any] = {}

    def get_ready(self) -> None:
        """Make up the step's inputs, and the gradients that come in."""
        self.inputs = [made_up(value) for value in self.values]
        self.tangents = {name: made_up(value) for name, value in self.reads.items() if name not in self.names}

    def __call__(self) -> None:
        made = dict(zip(self.names, self.forward(self.inputs), strict=True))
        given = [made[name] if name in made else self.tangents[name] for name in self.reads]
        made.clear()
        self.tangents.clear()
        self.backward(given)
