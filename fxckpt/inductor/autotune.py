"""Autotuning: finalists are compiled and timed on synthetic inputs, so that the fastest is known.

All finalists fit the budget; without this, the cost model's word is taken for the fastest.
"""

from __future__ import annotations

import logging
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
from fxckpt.plans.types import Plan
from fxckpt.tiers.ops import MOVES
from fxckpt.torch_private import HigherOrderOperator, OpOverload, outside_trace

log = logging.getLogger("fxckpt")

PlannedHalves = tuple[fx.GraphModule, fx.GraphModule, Plan]
"""Forward, backward, and the plan they follow."""
CompileHalf = Callable[
    [fx.GraphModule, bool, Mapping[str, tuple[int, ...]]], Callable[[list[Any]], Sequence[Any]]
]
"""Compiles a half to a function of a list of inputs, which it empties.

Called with the half, whether it is a backward, and the strides of inputs, by name.
"""
ROUNDS = 5
"""Timed steps of each finalist, taken in turn, after one untimed step."""
TIE = 0.01
"""Largest relative difference between step times that count as equal."""


def fastest(
    finalists: Sequence[PlannedHalves],
    compile_half: CompileHalf,
    device: torch.device,
    clock: Callable[[], float],
) -> PlannedHalves:
    """Return the fastest finalist on synthetic inputs; among equals, that of the least peak.

    If the step cannot be timed, return the first finalist.
    """
    seconds = _timed(finalists, compile_half, device, clock)
    if seconds is None:
        return finalists[0]
    for (_, _, plan), took in zip(finalists, seconds, strict=True):
        log.info(
            "plan %s takes %.2f ms a step, its peak is %s bytes",
            plan.digest,
            1e3 * took,
            plan.compiled_peak_bytes,
        )
    longest = (1 + TIE) * min(seconds)
    fast = [halves for halves, took in zip(finalists, seconds, strict=True) if took <= longest]
    return min(fast, key=lambda halves: halves[2].compiled_peak_bytes or 0)


def _timed(
    finalists: Sequence[PlannedHalves],
    compile_half: CompileHalf,
    device: torch.device,
    clock: Callable[[], float],
) -> list[float] | None:
    """Return the seconds a step of each finalist takes; None if the step cannot be timed."""
    if (op := unsafe_op(finalists[0][:2])) is not None:
        log.warning(
            "plans are not timed, as %s is not torch's own, or talks to other ranks: "
            "the one expected to be fastest is taken.",
            op,
        )
        return None
    try:
        return step_seconds([each[:2] for each in finalists], compile_half, device, clock)
    except Exception as error:  # On synthetic inputs a step may raise anything.
        log.warning(
            "plans cannot be timed, as the step does not run on synthetic inputs (%s: %s): "
            "the one expected to be fastest is taken.",
            type(error).__name__,
            error,
        )
        return None


def unsafe_op(halves: Sequence[fx.GraphModule]) -> str | None:
    """Return an op of the halves that must not run on synthetic inputs; None if there is none.

    Ops that are not torch's own, that have effects, or that talk to other ranks must not. Values
    may be sent away and fetched.
    """
    graphs = [
        gm.graph for half in halves for gm in half.modules() if isinstance(gm, fx.GraphModule)
    ]
    calls = (node for graph in graphs for node in graph.nodes if node.op == "call_function")
    return next((str(node.target) for node in calls if not _is_safe(node)), None)


def _is_safe(node: fx.Node) -> bool:
    if node.target in MOVES:
        return True
    if isinstance(node.target, HigherOrderOperator):
        # Its bodies are modules, and checked with the others. What it does with an op or a kernel
        # that it is given is unknown.
        return any(arg.op == "get_attr" for arg in node.all_input_nodes) and not any(
            isinstance(leaf, OpOverload)
            for leaf in pytree.tree_leaves((node.args, dict(node.kwargs)))
        )
    # A write to arguments is a write to synthetic ones.
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
    """Compile pairs of a forward and a backward, and return the median seconds of a step of each.

    Raises whatever a step raises on synthetic inputs that do not suit it.
    """
    steps = [_Step(forward, backward, compile_half) for forward, backward in halves]
    devices = [device] if device.type == "cuda" else []
    synchronize = torch.get_device_module(device).synchronize if devices else lambda: None
    # torch.utils.benchmark times one step in a block; in turns, load on the machine falls on all.
    times: list[list[float]] = [[] for _ in steps]
    with outside_trace(), torch.no_grad(), torch.random.fork_rng(devices=devices):
        for _ in range(1 + ROUNDS):
            for step, seconds in zip(steps, times, strict=True):
                step.prepare()
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

    def prepare(self) -> None:
        """Create synthetic inputs and incoming gradients for the next call."""
        self.inputs = [synthetic_input(value) for value in self.values]
        self.tangents = {
            name: synthetic_input(value)
            for name, value in self.reads.items()
            if name not in self.names
        }

    def __call__(self) -> None:
        outputs = dict(zip(self.names, self.forward(self.inputs), strict=True))
        if self.backward is None:
            # The forward may have changed layouts, of which autograd's own backward is told too.
            self.backward = self.compile_backward(
                {
                    name: value.stride()
                    for name, value in outputs.items()
                    if isinstance(value, torch.Tensor)
                }
            )
        given = [outputs[name] if name in outputs else self.tangents[name] for name in self.reads]
        outputs.clear()
        self.tangents.clear()
        self.backward(given)
