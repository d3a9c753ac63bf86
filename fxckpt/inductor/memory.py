"""Lowering: what a fusing compiler makes of an emitted forward and backward, and what that takes.

A plan is searched with a model of what the compiler fuses (:mod:`~fxckpt.passes.inductor.fusion_model`); here the compiler itself is asked. It lowers and
schedules both halves as it would to compile them, without making code, and says which buffers each kernel allocates and when they die. Added
up over both halves, with what the forward hands to the backward, that is the peak of the compiled step.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import fx

from fxckpt.ops.properties import tensors
from fxckpt.passes.analysis.byte_counts import replay_bytes, storage_bytes
from fxckpt.passes.analysis.joint import Facts, Workspace
from fxckpt.passes.analysis.placement import graph_outputs, is_held_by_caller, tangents_of
from fxckpt.passes.meta import RECOMPUTE_OF
from fxckpt.solver.program import IntArray, Program
from fxckpt.torch_private import size_hint, storage_id
from fxckpt.torch_private.inductor.layouts import is_convolution, laid_out, may_donate
from fxckpt.torch_private.inductor.lowered import LoweredHalf, live_bytes

Lower = Callable[[fx.GraphModule, Sequence[int] | None, Mapping[str, tuple[int, ...]]], LoweredHalf]
"""Lowers a half: a forward (None), or a backward that may write over some of its inputs (their positions); with strides of inputs that are not those
they were traced with."""


def forward_bytes(
    lowered: LoweredHalf, forward: fx.GraphModule, facts: Facts, workspace: Workspace
) -> IntArray:
    """Return the live bytes during each kernel of a lowered forward, and at its end, beyond what was allocated when the step began.

    ``workspace`` tells the workspace of a library call; ``facts`` that of what is none.
    """
    return live_bytes(lowered) + _workspace(lowered, forward, facts, workspace)


def lower_backward(
    forward: fx.GraphModule,
    backward: fx.GraphModule,
    lower: Lower,
    *,
    num_fwd_outputs: int,
    lowered_forward: LoweredHalf | None = None,
) -> LoweredHalf:
    """Lower the backward of a forward, which without one that is lowered leaves its values in the layouts they were traced in."""
    return lower(
        backward,
        donated(forward, backward, num_fwd_outputs=num_fwd_outputs),
        _relaid(forward, lowered_forward),
    )


def backward_bytes(
    lowered: LoweredHalf,
    forward: fx.GraphModule,
    backward: fx.GraphModule,
    facts: Facts,
    workspace: Workspace,
    *,
    num_fwd_outputs: int,
    lowered_forward: LoweredHalf | None = None,
) -> IntArray:
    """Return the live bytes during each kernel of a lowered backward, and at its end, with all that the forward left."""
    inputs = backward.graph.find_nodes(op="placeholder")
    left = _lies_in(forward, lowered_forward)
    held = _Held(len(lowered.kernels))
    given: set[int | str] = set()
    tangents = tangents_of(backward.graph)
    returned = {lies[0] for lies in lowered.outputs if lies is not None}
    for node in forward.graph.find_nodes(op="placeholder"):
        given |= {node.name, *(storage_id(t) for t in tensors(node.meta.get("val")))}
    # The user holds what the forward returns.
    for output in graph_outputs(forward.graph)[:num_fwd_outputs]:
        for tensor in tensors(output.meta.get("val")) if isinstance(output, fx.Node) else ():
            held.until(left.get(output.name, storage_id(tensor)), tensor, math.inf)
    for node, name in zip(inputs, lowered.last_read, strict=True):
        # What no kernel reads, though an op of the graph did (a pooling's backward, for the sizes alone), is never let go of.
        stays = lowered.last_read[name] < 0 or (
            node in tangents and (name in returned or is_held_by_caller(node))
        )
        last = math.inf if stays else lowered.last_read[name]
        for tensor in tensors(node.meta.get("val")):
            if node.name in left:
                held.until(left[node.name], tensor, last)
            elif not str(node.target).startswith("primals"):
                held.until(storage_id(tensor), tensor, last)
    own = live_bytes(lowered) + _workspace(lowered, backward, facts, workspace)
    own[-1] += facts.program.backward[-1].workspace_bytes if facts.program.backward else 0
    return own + held.bytes(given)


def learned(
    facts: Facts, lowered: LoweredHalf, backward: fx.GraphModule, workspace: Workspace
) -> Program:
    """Return the program, with what was seen of its backward ops in a lowered backward.

    They write over what they are the last to read where kernels did, and set aside what library calls do with operands laid out like that. Which
    kernel a value's last reader becomes part of, and how a call's operands lie, hardly depends on the plan, so that what was seen of one holds
    for others.
    """
    program = facts.program
    last = {s: k for k, op in enumerate(program.backward) for s in op.reads}
    owned = _may_be_written_over(program)
    by_node: dict[str, list[int]] = {}
    for k, op in enumerate(program.backward):
        for name in _loop(facts, op.name):
            by_node.setdefault(name, []).append(k)
    spared: dict[int, int] = {}
    taken: set[int] = set()
    for kernel, nbytes in lowered.written_over:
        # Inductor's own passes rename nodes: the op is the one of which most is found in the kernel.
        likely = Counter(k for name in lowered.kernels[kernel] for k in by_node.get(name, ()))
        for k, _ in likely.most_common():
            op = program.backward[k]
            read, written = (
                [s for s in each if program.storages[s].bytes == nbytes and s not in taken]
                for each in (op.reads, op.writes)
            )
            dying = [s for s in read if last[s] == k and s in owned]
            if dying and written:
                taken |= {dying[0], written[0]}
                spared[k] = spared.get(k, 0) + nbytes
                break
    called = {
        lowered.operands[i][0]: nbytes
        for i, nbytes in _called(lowered, backward, workspace).items()
    }
    own = (
        called.get(op.name, op.workspace_bytes) - spared.get(k, 0)
        for k, op in enumerate(program.backward)
    )
    seen = tuple(
        replace(op, workspace_bytes=nbytes)
        for op, nbytes in zip(program.backward, own, strict=True)
    )
    return replace(program, backward=seen) if seen != program.backward else program


def at_best(
    facts: Facts, is_extern_kernel: Callable[[fx.Node], bool], workspace: Workspace
) -> Program:
    """Return the program of a step whose backward's loops write over whatever they are the last to read.

    Its convolutions are given their images as they were traced, where that takes less ``workspace``, as Inductor does where none runs again.
    """
    program = facts.program
    last = {s: k for k, op in enumerate(program.backward) for s in op.reads}
    owned = _may_be_written_over(program)
    seen = []
    for k, op in enumerate(program.backward):
        node = facts.op_node.get(op.name)
        is_loop = node is not None and not is_extern_kernel(node)
        read = Counter(
            program.storages[s].bytes for s in op.reads if is_loop and last[s] == k and s in owned
        )
        spared = read & Counter(program.storages[s].bytes for s in op.writes)
        own = (
            min(op.workspace_bytes, workspace(node))
            if node is not None and is_convolution(node)
            else op.workspace_bytes
        )
        seen.append(replace(op, workspace_bytes=own - sum(spared.elements())))
    return replace(program, backward=tuple(seen))


def _may_be_written_over(program: Program) -> frozenset[int]:
    """Return the storages that nobody outside the backward may look at: neither what the user holds nor the incoming gradients."""
    return frozenset(
        s
        for s, storage in enumerate(program.storages)
        if not storage.is_output and s not in program.tangents
    )


def _loop(facts: Facts, name: str) -> dict[str, None]:
    """Return an op, by name, and what it reads that is never stored."""
    nodes = dict.fromkeys(node for node in (facts.op_node.get(name),) if node is not None)
    todo = list(nodes)
    for node in todo:
        new = [arg for arg in node.all_input_nodes if arg in facts.views and arg not in nodes]
        nodes.update(dict.fromkeys(new))
        todo.extend(new)
    return dict.fromkeys(node.name for node in nodes)


def _lies_in(forward: fx.GraphModule, lowered: LoweredHalf | None) -> dict[str, str]:
    """Return, for what a lowered forward returns, the buffer or input that it lies in: copies in the graph may be none to the compiler."""
    pairs = (
        zip(graph_outputs(forward.graph), lowered.outputs, strict=True)
        if lowered is not None
        else ()
    )
    return {
        output.name: lies[0]
        for output, lies in pairs
        if isinstance(output, fx.Node) and lies is not None
    }


def _relaid(forward: fx.GraphModule, lowered: LoweredHalf | None) -> dict[str, tuple[int, ...]]:
    """Return the strides of what a lowered forward leaves in another layout than it was traced in, by name."""
    found = {}
    pairs = (
        zip(graph_outputs(forward.graph), lowered.outputs, strict=True)
        if lowered is not None
        else ()
    )
    for output, lies in pairs:
        if isinstance(output, fx.Node) and lies is not None:
            traced = [size_hint(stride) for stride in output.meta["val"].stride()]
            if traced != list(lies[1]):
                found[output.name] = lies[1]
    return found


def donated(
    forward: fx.GraphModule, backward: fx.GraphModule, *, num_fwd_outputs: int
) -> list[int]:
    """Return the inputs of the backward that nobody else holds, by position: it may write over them (AOTAutograd's donated buffers)."""
    if not may_donate():
        return []
    returned = graph_outputs(forward.graph)[:num_fwd_outputs]
    held = [*forward.graph.find_nodes(op="placeholder"), *returned, *graph_outputs(backward.graph)]
    others = {
        storage_id(t) for n in held if isinstance(n, fx.Node) for t in tensors(n.meta.get("val"))
    }
    saved = {
        n.name for n in graph_outputs(forward.graph)[num_fwd_outputs:] if isinstance(n, fx.Node)
    }
    inputs = enumerate(backward.graph.find_nodes(op="placeholder"))
    lies_in = {
        i: [storage_id(t) for t in tensors(n.meta.get("val"))] for i, n in inputs if n.name in saved
    }
    return [i for i, storages in lies_in.items() if storages and others.isdisjoint(storages)]


def _workspace(
    half: LoweredHalf, graph: fx.GraphModule, facts: Facts, workspace: Workspace
) -> IntArray:
    """Return what the kernels of library calls, and the graphs inside ops, allocate and free before they return."""
    planned = {op.name: op.workspace_bytes for op in (*facts.program.ops, *facts.program.backward)}
    of = {
        n.name: planned.get(str(n.meta.get(RECOMPUTE_OF, n.name)), 0) + replay_bytes(n)
        for n in graph.graph.nodes
    }
    during = np.zeros(len(half.kernels) + 1, dtype=np.int64)
    for i in half.operands:
        during[i] = max((of.get(name, 0) for name in half.kernels[i]), default=0)
    for i, nbytes in (_called(half, graph, workspace) | half.inside).items():
        during[i] = nbytes
    return during


def _called(half: LoweredHalf, graph: fx.GraphModule, workspace: Workspace) -> dict[int, int]:
    """Return the workspace of library calls, by kernel, where it is known how they are called.

    Which of its kernels a library takes, and what that reorders, depends on how the operands lie, which the plan has a say in.
    """
    nodes = {node.name: node for node in graph.graph.nodes}
    calls = {
        i: laid_out(nodes[name], layouts)
        for i, (name, layouts) in half.operands.items()
        if name in nodes
    }
    return {i: workspace(call) for i, call in calls.items() if call is not None}


class _Held:
    """What is there when the backward begins, by storage, and until when."""

    def __init__(self, kernels: int) -> None:
        self.kernels = kernels
        self.size: dict[int | str, int] = {}
        self.last: dict[int | str, float] = {}

    def until(self, storage: int | str, tensor: torch.Tensor, kernel: float) -> None:
        """Take a tensor in; views of one storage hold it together."""
        self.size[storage] = max(self.size.get(storage, 0), storage_bytes(tensor))
        self.last[storage] = max(self.last.get(storage, -1), kernel)

    def bytes(self, free: Collection[int | str]) -> IntArray:
        """Return the bytes held during each kernel, and at the end, those in ``free`` aside."""
        change = np.zeros(self.kernels + 2, dtype=np.int64)
        for storage, nbytes in self.size.items():
            if storage not in free:
                change[0] += nbytes
                change[int(min(self.last[storage], self.kernels)) + 1] -= nbytes
        return np.cumsum(change)[:-1]
