"""Lowering: what a fusing compiler makes of an emitted forward and backward, and what that takes.

A plan is searched with a model of what the compiler fuses (:mod:`~fxckpt.passes.kernels`); here the compiler itself is asked. It lowers and
schedules both halves as it would to compile them, without making code, and says which buffers each kernel allocates and when they die. Added
up over both halves, with what the forward hands to the backward, that is the peak of the compiled step.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from torch import fx

from fxckpt.passes.facts import Facts, graph_outputs, storage_bytes
from fxckpt.passes.kinds import tensors
from fxckpt.passes.program import IntArray
from fxckpt.passes.rematerialize import RECOMPUTE_OF
from fxckpt.torch_private import storage_id
from fxckpt.torch_private.inductor import LoweredHalf, may_donate

Lower = Callable[[fx.GraphModule, Sequence[int] | None], LoweredHalf]
"""Lowers a half: a forward (None), or a backward that may write over some of its inputs (their positions)."""


@dataclass(frozen=True, eq=False)
class CompiledStep:
    """Live bytes during each kernel of the forward and of the backward, beyond what was allocated when the step began."""

    forward: IntArray
    backward: IntArray

    @property
    def peak_bytes(self) -> int:
        """Most bytes live at once."""
        return int(max(self.forward.max(initial=0), self.backward.max(initial=0)))


def compiled_step(forward: fx.GraphModule, backward: fx.GraphModule, facts: Facts, lower: Lower, *, num_fwd_outputs: int) -> CompiledStep:
    """Lower both halves and return what the step allocates."""
    workspace = {op.name: op.scratch_bytes for op in (*facts.program.ops, *facts.program.backward) if op.scratch_bytes}
    first = lower(forward, None)
    sizes = {name: nbytes for name, nbytes, _, _ in first.allocated}
    live = _allocated(first) + _workspace(first, forward, workspace)
    second = lower(backward, donated(forward, backward, num_fwd_outputs=num_fwd_outputs))
    (output,) = forward.graph.find_nodes(op="output")
    names = [o.name if isinstance(o, fx.Node) else None for o in output.args[0]]
    buffer_of = dict(zip(names[num_fwd_outputs:], first.outputs[num_fwd_outputs:], strict=True))
    held = _Held(len(second.kernels))
    # The user holds what the forward returns, the autograd engine the incoming gradients.
    for returned in {b for b in first.outputs[:num_fwd_outputs] if b in sizes}:
        held.until(returned, sizes[str(returned)], math.inf)
    for node, name in zip(backward.graph.find_nodes(op="placeholder"), second.last_read, strict=True):
        last = second.last_read[name]
        if node.name in buffer_of:
            buffer = buffer_of[node.name]
            held.until(buffer, sizes.get(buffer or "", 0), last)
        elif str(node.target).startswith("tangents"):
            held.until(node.name, sum(map(storage_bytes, tensors(node.meta.get("val")))), math.inf)
    accumulated = facts.program.backward[-1].scratch_bytes if facts.program.backward else 0
    own = _allocated(second) + _workspace(second, backward, workspace)
    own[-1] += accumulated
    return CompiledStep(live, own + held.bytes())


def donated(forward: fx.GraphModule, backward: fx.GraphModule, *, num_fwd_outputs: int) -> list[int]:
    """Return the inputs of the backward that nobody else holds, by position: it may write over them (AOTAutograd's donated buffers)."""
    if not may_donate():
        return []
    returned = graph_outputs(forward.graph)[:num_fwd_outputs]
    held = [*forward.graph.find_nodes(op="placeholder"), *returned, *graph_outputs(backward.graph)]
    others = {storage_id(t) for n in held if isinstance(n, fx.Node) for t in tensors(n.meta.get("val"))}
    saved = {n.name for n in graph_outputs(forward.graph)[num_fwd_outputs:] if isinstance(n, fx.Node)}
    inputs = enumerate(backward.graph.find_nodes(op="placeholder"))
    return [i for i, n in inputs if n.name in saved and not any(storage_id(t) in others for t in tensors(n.meta.get("val")))]


def _allocated(half: LoweredHalf) -> IntArray:
    """Return the bytes of a half's own buffers during each kernel, and at its end."""
    change = np.zeros(len(half.kernels) + 2, dtype=np.int64)
    for _, nbytes, first, last in half.allocated:
        change[first] += nbytes
        change[last + 1] -= nbytes
    return np.cumsum(change)[:-1]


def _workspace(half: LoweredHalf, graph: fx.GraphModule, workspace: Mapping[str, int]) -> IntArray:
    """Return what the kernels of library calls allocate and free before they return."""
    of = {n.name: workspace.get(str(n.meta.get(RECOMPUTE_OF, n.name)), 0) for n in graph.graph.nodes}
    during = [max((of.get(name, 0) for name in kernel), default=0) for kernel in half.kernels]
    return np.asarray([*during, 0], dtype=np.int64)


class _Held:
    """What is there when the backward begins, by buffer, and until when."""

    def __init__(self, kernels: int) -> None:
        self.kernels = kernels
        self.size: dict[str | None, int] = {}
        self.last: dict[str | None, float] = {}

    def until(self, buffer: str | None, nbytes: int, kernel: float) -> None:
        """Take a buffer in; views of one buffer hold it together."""
        self.size[buffer] = nbytes
        self.last[buffer] = max(self.last.get(buffer, -1), kernel)

    def bytes(self) -> IntArray:
        """Return the bytes held during each kernel, and at the end."""
        change = np.zeros(self.kernels + 2, dtype=np.int64)
        for buffer, nbytes in self.size.items():
            change[0] += nbytes
            change[int(min(self.last[buffer], self.kernels)) + 1] -= nbytes
        return np.cumsum(change)[:-1]
