"""Compiled peak: the memory of an emitted forward and backward, as Inductor lowers them.

Plans are searched on a model of Inductor's fusion (:mod:`~fxckpt.passes.inductor.fusion_model`);
here Inductor itself is asked. It lowers and schedules both halves as for a compile, without
generating code, and tells the buffers that each kernel allocates and their live intervals. Summed
over both halves, with the values that the forward saves for the backward, they give the peak of
the compiled step.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import fx

from fxckpt.ops.properties import tensors
from fxckpt.passes.analysis.byte_counts import replay_bytes, storage_bytes
from fxckpt.passes.analysis.joint import Facts, Workspace
from fxckpt.passes.analysis.placement import graph_outputs, is_held_by_caller, tangents_of
from fxckpt.passes.meta import AWAY, RECOMPUTE_OF
from fxckpt.solver.program import IntArray, Program
from fxckpt.torch_private import size_hint, storage_id
from fxckpt.torch_private.inductor.layouts import is_convolution, may_donate, with_layouts
from fxckpt.torch_private.inductor.lowered import LoweredHalf
from fxckpt.utils.intervals import last_uses, live_bytes

Lower = Callable[[fx.GraphModule, Sequence[int] | None, Mapping[str, tuple[int, ...]]], LoweredHalf]
"""Lowers a half.

Called with the half, the positions of inputs that a backward may overwrite (None for a forward),
and the strides, by name, of inputs that differ from the traced ones.
"""


def lower_forward(forward: fx.GraphModule, lower: Lower) -> LoweredHalf:
    """Return the lowered forward, with the buffers that are on the device."""
    away = {node.name for node in forward.graph.nodes if AWAY in node.meta}
    return lower(forward, None, {}).without(away)


def forward_bytes(
    lowered: LoweredHalf, forward: fx.GraphModule, facts: Facts, workspace: Workspace
) -> IntArray:
    """Return the live bytes during each kernel of a lowered forward, and at its end.

    Memory allocated before the step does not count. ``workspace`` measures extern kernels;
    ``facts`` knows the workspace of all other ops.
    """
    return lowered.live_bytes() + _workspace(lowered, forward, facts, workspace)


def held_bytes(lowered: LoweredHalf, *, num_fwd_outputs: int) -> int:
    """Return the bytes that a lowered forward holds for its backward alone.

    They may be more than the saved storages of the graph: a value can have a buffer in each of two
    layouts.
    """
    places = [None if place is None else place[0] for place in lowered.outputs]
    held = set(places[num_fwd_outputs:]).difference(places[:num_fwd_outputs])
    return sum(nbytes for name, nbytes, _, _ in lowered.allocated if name in held)


def lower_backward(
    forward: fx.GraphModule,
    backward: fx.GraphModule,
    lower: Lower,
    *,
    num_fwd_outputs: int,
    lowered_forward: LoweredHalf | None = None,
) -> LoweredHalf:
    """Return the lowered backward of a forward.

    Without ``lowered_forward``, saved values have the layouts they were traced in.
    """
    return lower(
        backward,
        donated(forward, backward, num_fwd_outputs=num_fwd_outputs),
        _changed_strides(forward, lowered_forward),
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
    """Return the live bytes during each kernel of a lowered backward, and at its end.

    Values left by the forward are included until they are freed.
    """
    inputs = backward.graph.find_nodes(op="placeholder")
    buffers = _buffer_of(forward, lowered_forward)
    held = _HeldStorages(len(lowered.kernels))
    inputs_of_step: set[int | str] = set()
    tangents = tangents_of(backward.graph)
    returned = {lies[0] for lies in lowered.outputs if lies is not None}
    for node in forward.graph.find_nodes(op="placeholder"):
        inputs_of_step |= {node.name, *(storage_id(t) for t in tensors(node.meta.get("val")))}
    # The caller holds the outputs of the forward.
    for output in graph_outputs(forward.graph)[:num_fwd_outputs]:
        for tensor in tensors(output.meta.get("val")) if isinstance(output, fx.Node) else ():
            held.until(buffers.get(output.name, storage_id(tensor)), tensor, math.inf)
    for node, name in zip(inputs, lowered.last_read, strict=True):
        if AWAY in node.meta:
            continue
        # An input that no kernel reads, though an op did (a pooling's backward, for its sizes), is
        # never freed.
        stays = lowered.last_read[name] < 0 or (
            node in tangents and (name in returned or is_held_by_caller(node))
        )
        last = math.inf if stays else lowered.last_read[name]
        for tensor in tensors(node.meta.get("val")):
            if node.name in buffers:
                held.until(buffers[node.name], tensor, last)
            elif not str(node.target).startswith("primals"):
                held.until(storage_id(tensor), tensor, last)
    own = lowered.live_bytes() + _workspace(lowered, backward, facts, workspace)
    own[-1] += facts.program.backward[-1].workspace_bytes if facts.program.backward else 0
    return own + held.bytes(inputs_of_step)


def with_lowered_workspace(
    facts: Facts, lowered: LoweredHalf, backward: fx.GraphModule, workspace: Workspace
) -> Program:
    """Return the program with the workspace of its backward ops taken from a lowered backward.

    An op whose kernel overwrites an input that dies there needs that much less, and an extern
    kernel needs the workspace for the layouts of its operands. The kernel of a value's last reader
    and the layouts of a call's operands hardly depend on the plan, so that a calibration by one
    plan holds for others.
    """
    program = facts.program
    spared = _overwritten_bytes(facts, lowered)
    extern = {
        lowered.operands[i][0]: nbytes
        for i, nbytes in _extern_workspace(lowered, backward, workspace).items()
    }
    own = (
        extern.get(op.name, op.workspace_bytes) - spared.get(k, 0)
        for k, op in enumerate(program.backward)
    )
    calibrated = tuple(
        replace(op, workspace_bytes=nbytes)
        for op, nbytes in zip(program.backward, own, strict=True)
    )
    return replace(program, backward=calibrated) if calibrated != program.backward else program


def _overwritten_bytes(facts: Facts, lowered: LoweredHalf) -> dict[int, int]:
    """Return the bytes of inputs that each backward op overwrites, by the op's index."""
    program = facts.program
    last = last_uses(op.reads for op in program.backward)
    owned = _overwritable(program)
    by_node: dict[str, list[int]] = {}
    for k, op in enumerate(program.backward):
        for name in _with_inlined(facts, op.name):
            by_node.setdefault(name, []).append(k)
    spared: dict[int, int] = {}
    taken: set[int] = set()
    for kernel, nbytes in lowered.overwritten:
        # Inductor's passes rename nodes: the op is the one with most of its nodes in the kernel.
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
    return spared


def optimistic_program(
    facts: Facts, is_extern_kernel: Callable[[fx.Node], bool], workspace: Workspace
) -> Program:
    """Return the program of a step whose fused kernels overwrite every input that dies in them.

    Convolutions of the backward have the smaller ``workspace`` of two layouts: the traced one, as
    when Inductor recomputes no convolution, and the expected one.
    """
    program = facts.program
    last = last_uses(op.reads for op in program.backward)
    owned = _overwritable(program)
    backward = []
    for k, op in enumerate(program.backward):
        node = facts.op_node.get(op.name)
        is_fused = node is not None and not is_extern_kernel(node)
        read = Counter(
            program.storages[s].bytes for s in op.reads if is_fused and last[s] == k and s in owned
        )
        spared = read & Counter(program.storages[s].bytes for s in op.writes)
        own = (
            min(op.workspace_bytes, workspace(node))
            if node is not None and is_convolution(node)
            else op.workspace_bytes
        )
        backward.append(replace(op, workspace_bytes=own - sum(spared.elements())))
    return replace(program, backward=tuple(backward))


def _overwritable(program: Program) -> frozenset[int]:
    """Return the storages that the backward alone reads: neither outputs nor incoming gradients."""
    return frozenset(
        s
        for s, storage in enumerate(program.storages)
        if not storage.is_output and s not in program.tangents
    )


def _with_inlined(facts: Facts, name: str) -> dict[str, None]:
    """Return the names of an op and of the values inlined into it."""
    nodes = dict.fromkeys(node for node in (facts.op_node.get(name),) if node is not None)
    todo = list(nodes)
    for node in todo:
        new = [arg for arg in node.all_input_nodes if arg in facts.views and arg not in nodes]
        nodes.update(dict.fromkeys(new))
        todo.extend(new)
    return dict.fromkeys(node.name for node in nodes)


def _lowered_outputs(
    forward: fx.GraphModule, lowered: LoweredHalf | None
) -> Iterator[tuple[fx.Node, str, tuple[int, ...]]]:
    """Yield the tensors that a lowered forward returns, with their buffers and strides."""
    if lowered is None:
        return
    for output, place in zip(graph_outputs(forward.graph), lowered.outputs, strict=True):
        if isinstance(output, fx.Node) and place is not None:
            yield output, *place


def _buffer_of(forward: fx.GraphModule, lowered: LoweredHalf | None) -> dict[str, str]:
    """Return the buffer or input that holds each output of a lowered forward, by name.

    Copies in the graph may be none to Inductor.
    """
    return {output.name: buffer for output, buffer, _ in _lowered_outputs(forward, lowered)}


def _changed_strides(
    forward: fx.GraphModule, lowered: LoweredHalf | None
) -> dict[str, tuple[int, ...]]:
    """Return the strides of outputs that a lowered forward lays out unlike the trace, by name."""
    return {
        output.name: strides
        for output, _, strides in _lowered_outputs(forward, lowered)
        if [size_hint(stride) for stride in output.meta["val"].stride()] != list(strides)
    }


def donated(
    forward: fx.GraphModule, backward: fx.GraphModule, *, num_fwd_outputs: int
) -> list[int]:
    """Return the positions of inputs that the backward alone holds and so may overwrite.

    AOTAutograd calls them donated buffers.
    """
    if not may_donate():
        return []
    outputs = graph_outputs(forward.graph)
    held = [
        *forward.graph.find_nodes(op="placeholder"),
        *outputs[:num_fwd_outputs],
        *graph_outputs(backward.graph),
    ]
    others = {
        storage_id(t) for n in held if isinstance(n, fx.Node) for t in tensors(n.meta.get("val"))
    }
    saved = {n.name for n in outputs[num_fwd_outputs:] if isinstance(n, fx.Node)}
    found = []
    for i, node in enumerate(backward.graph.find_nodes(op="placeholder")):
        storages = [storage_id(t) for t in tensors(node.meta.get("val"))]
        if node.name in saved and storages and others.isdisjoint(storages):
            found.append(i)
    return found


def _workspace(
    half: LoweredHalf, graph: fx.GraphModule, facts: Facts, workspace: Workspace
) -> IntArray:
    """Return the bytes that extern kernels, and graphs inside ops, allocate and free, by kernel."""
    known = {op.name: op.workspace_bytes for op in (*facts.program.ops, *facts.program.backward)}
    of = {
        n.name: known.get(str(n.meta.get(RECOMPUTE_OF, n.name)), 0) + replay_bytes(n)
        for n in graph.graph.nodes
    }
    during = np.zeros(len(half.kernels) + 1, dtype=np.int64)
    for i in half.operands:
        during[i] = max((of.get(name, 0) for name in half.kernels[i]), default=0)
    for i, nbytes in (_extern_workspace(half, graph, workspace) | half.inside).items():
        during[i] = nbytes
    return during


def _extern_workspace(
    half: LoweredHalf, graph: fx.GraphModule, workspace: Workspace
) -> dict[int, int]:
    """Return the workspace of extern kernels whose call is known, by kernel.

    A library selects its kernel, and reorders operands, by their layouts, which depend on the plan.
    """
    nodes = {node.name: node for node in graph.graph.nodes}
    calls = {
        i: with_layouts(nodes[name], layouts)
        for i, (name, layouts) in half.operands.items()
        if name in nodes
    }
    return {i: workspace(call) for i, call in calls.items() if call is not None}


class _HeldStorages:
    """Storages that live when the backward begins, and their ends."""

    def __init__(self, kernels: int) -> None:
        self.kernels = kernels
        self.size: dict[int | str, int] = {}
        self.last: dict[int | str, float] = {}

    def until(self, storage: int | str, tensor: torch.Tensor, kernel: float) -> None:
        """Hold a tensor's storage until a kernel has run; the last of its views counts."""
        self.size[storage] = max(self.size.get(storage, 0), storage_bytes(tensor))
        self.last[storage] = max(self.last.get(storage, -1), kernel)

    def bytes(self, excluded: Collection[int | str]) -> IntArray:
        """Return the bytes held during each kernel, and at the end, without excluded storages."""
        intervals = (
            (0, int(min(self.last[storage], self.kernels)), nbytes)
            for storage, nbytes in self.size.items()
            if storage not in excluded
        )
        return live_bytes(intervals, self.kernels + 1)
