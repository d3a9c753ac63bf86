"""Contest: halves compiled and run on made-up values, so that of plans that all fit the fastest is known and not supposed."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from fxckpt.costs.isolated_op import synthetic_input
from fxckpt.ops.properties import has_hidden_effect, is_collective, is_mutating, is_torchs_own
from fxckpt.passes.analysis.placement import graph_outputs
from fxckpt.torch_private import HigherOrderOperator, OpOverload, outside_trace

CompileHalf = Callable[
    [fx.GraphModule, bool, Mapping[str, tuple[int, ...]]], Callable[[list[Any]], Sequence[Any]]
]
"""Compiles a half (True: a backward) to a function of a list, which it empties; with the strides of inputs, by name."""
ROUNDS = 5
"""Timed steps of each, in turn, after one that is not timed."""


def unsafe_op(halves: Sequence[fx.GraphModule]) -> str | None:
    """Return an op of the halves that must not run on made-up values: one that is not torch's own, has effects or talks to other ranks."""
    graphs = [
        gm.graph for half in halves for gm in half.modules() if isinstance(gm, fx.GraphModule)
    ]
    calls = (node for graph in graphs for node in graph.nodes if node.op == "call_function")
    return next((str(node.target) for node in calls if not _may_be_tried(node)), None)


def _may_be_tried(node: fx.Node) -> bool:
    if isinstance(node.target, HigherOrderOperator):
        # Its bodies are looked at, being among the modules; one that is given an op, or a kernel, does with it who knows what.
        return any(arg.op == "get_attr" for arg in node.all_input_nodes) and not any(
            isinstance(leaf, OpOverload)
            for leaf in pytree.tree_leaves((node.args, dict(node.kwargs)))
        )
    # What writes its arguments writes made-up ones.
    return (
        is_torchs_own(node)
        and not is_collective(node)
        and (is_mutating(node) or not has_hidden_effect(node))
    )


def step_seconds(
    halves: Sequence[tuple[fx.GraphModule, fx.GraphModule]],
    compile_half: CompileHalf,
    device: torch.device,
    clock: Callable[[], float],
) -> list[float]:
    """Compile pairs of a forward and a backward and return the median seconds that each takes for a step.

    Raises what the step raises on made-up values that it does not take.
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

    def __init__(
        self, forward: fx.GraphModule, backward: fx.GraphModule, compile_half: CompileHalf
    ) -> None:
        self.values = [n.meta["val"] for n in forward.graph.find_nodes(op="placeholder")]
        self.names = [str(output) for output in graph_outputs(forward.graph)]
        self.reads = {n.name: n.meta["val"] for n in backward.graph.find_nodes(op="placeholder")}
        self.forward = compile_half(forward, False, {})
        self.compile_backward = partial(compile_half, backward, True)
        self.backward: Callable[[list[Any]], Sequence[Any]] | None = None
        self.inputs: list[Any] = []
        self.tangents: dict[str, Any] = {}

    def get_ready(self) -> None:
        """Make up the step's inputs, and the gradients that come in."""
        self.inputs = [synthetic_input(value) for value in self.values]
        self.tangents = {
            name: synthetic_input(value)
            for name, value in self.reads.items()
            if name not in self.names
        }

    def __call__(self) -> None:
        made = dict(zip(self.names, self.forward(self.inputs), strict=True))
        if self.backward is None:
            # The forward may have laid out anew what it leaves, as autograd's own backward is told too.
            self.backward = self.compile_backward(
                {
                    name: value.stride()
                    for name, value in made.items()
                    if isinstance(value, torch.Tensor)
                }
            )
        given = [made[name] if name in made else self.tangents[name] for name in self.reads]
        made.clear()
        self.tangents.clear()
        self.backward(given)
