"""Lowering: what a fusing compiler makes of an emitted forward and backward, and what that takes.

A plan is searched with a model of what the compiler fuses (:mod:`~fxckpt.passes.kernels`); here the compiler itself is asked. It lowers and
schedules both halves as it would to compile them, without making code, and says which buffers each kernel allocates and when they die. Added
up over both halves, with what the forward hands to the backward, that is the peak of the compiled step.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence

import numpy as np
import torch
from torch import fx

from fxckpt.passes.facts import Facts, graph_outputs, storage_bytes
from fxckpt.passes.kinds import tensors
from fxckpt.passes.program import IntArray
from fxckpt.passes.rematerialize import RECOMPUTE_OF
from fxckpt.torch_private import size_hint, storage_id
from fxckpt.torch_private.inductor import may_donate
from fxckpt.torch_private.lowerings import LoweredHalf, live_bytes

Lower = Callable[[fx.GraphModule, Sequence[int] | None, Mapping[str, tuple[int, ...]]], LoweredHalf]
"""Lowers a half: a forward (None), or a backward that may write over some of its inputs (their positions); with strides of inputs that are not those
they were traced with."""


def forward_bytes(lowered: LoweredHalf, forward: fx.GraphModule, facts: Facts) -> IntArray:
    """Return the live bytes during each kernel of a lowered forward, and at its end, beyond what was allocated when the step began."""
    return live_bytes(lowered) + _workspace(lowered, forward, _workspace_bytes(facts))


def backward_bytes(
    forward: fx.GraphModule,
    backward: fx.GraphModule,
    facts: Facts,
    lower: Lower,
    *,
    num_fwd_outputs: int,
    lowered_forward: LoweredHalf | None = None,
) -> IntArray:
    """Lower the backward and return the live bytes during each of its kernels, and at its end, with all that the forward left.

    Without a lowered forward, the forward leaves its values in the layouts they were traced in.
    """
    inputs = backward.graph.find_nodes(op="placeholder")
    left = _left_otherwise(forward, lowered_forward)
    strides = {name: stride for name, (_, stride) in left.items()}
    lowered = lower(backward, donated(forward, backward, num_fwd_outputs=num_fwd_outputs), strides)
    held = _Held(len(lowered.kernels))
    given = {storage_id(t) for n in forward.graph.find_nodes(op="placeholder") for t in tensors(n.meta.get("val"))}
    # The user holds what the forward returns, the autograd engine the incoming gradients.
    for output in graph_outputs(forward.graph)[:num_fwd_outputs]:
        for tensor in tensors(output.meta.get("val")) if isinstance(output, fx.Node) else ():
            held.until(left[output.name][0] if output.name in left else storage_id(tensor), tensor, math.inf)
    for node, name in zip(inputs, lowered.last_read, strict=True):
        last = math.inf if str(node.target).startswith("tangents") else lowered.last_read[name]
        for tensor in tensors(node.meta.get("val")):
            if node.name in left:
                held.until(left[node.name][0], tensor, last)
            elif not str(node.target).startswith("primals"):
                held.until(storage_id(tensor), tensor, last)
    own = live_bytes(lowered) + _workspace(lowered, backward, _workspace_bytes(facts))
    own[-1] += facts.program.backward[-1].scratch_bytes if facts.program.backward else 0
    return own + held.bytes(given)


def _left_otherwise(forward: fx.GraphModule, lowered: LoweredHalf | None) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Return what a lowered forward leaves in another layout than it was traced in: by name, the buffer it lies in and its strides."""
    found = {}
    pairs = zip(graph_outputs(forward.graph), lowered.outputs, strict=True) if lowered is not None else ()
    for output, lies in pairs:
        if isinstance(output, fx.Node) and lies is not None:
            traced = [size_hint(stride) for stride in output.meta["val"].stride()]
            if traced != list(lies[1]):
                found[output.name] = lies
    return found


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


def _workspace_bytes(facts: Facts) -> dict[str, int]:
    return {op.name: op.scratch_bytes for op in (*facts.program.ops, *facts.program.backward) if op.scratch_bytes}


def _workspace(half: LoweredHalf, graph: fx.GraphModule, workspace: Mapping[str, int]) -> IntArray:
    """Return what the kernels of library calls, and the graphs inside ops, allocate and free before they return."""
    of = {n.name: workspace.get(str(n.meta.get(RECOMPUTE_OF, n.name)), 0) for n in graph.graph.nodes}
    during = [half.inside.get(i, max((of.get(name, 0) for name in kernel), default=0)) for i, kernel in enumerate(half.kernels)]
    return np.asarray([*during, 0], dtype=np.int64)


class _Held:
    """What is there when the backward begins, by storage, and until when."""

    def __init__(self, kernels: int) -> None:
        self.kernels = kernels
        self.size: dict[int | str, int] = {}
        self.last: dict[int | str, float] = {}

    def until(self, storage: int | str, tensor: torch.Tensor, kernel: float) -> None:
        """Take a tensor in; views of one storage hold it together."""
        self.size[storage] = storage_bytes(tensor)
        self.last[storage] = max(self.last.get(storage, -1), kernel)

    def bytes(self, free: Collection[int]) -> IntArray:
        """Return the bytes held during each kernel, and at the end, those in ``free`` aside."""
        change = np.zeros(self.kernels + 2, dtype=np.int64)
        for storage, nbytes in self.size.items():
            if storage not in free:
                change[0] += nbytes
                change[int(min(self.last[storage], self.kernels)) + 1] -= nbytes
        return np.cumsum(change)[:-1]
