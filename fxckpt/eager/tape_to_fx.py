"""A tape as an FX graph, which can be printed, explained and planned."""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn

from fxckpt.eager.tape import Call, MetaArg, TensorVersion
from fxckpt.ops.traits import Opacity, traits_of
from fxckpt.ops.unseen import unseen
from fxckpt.passes.meta import CALL, UNTRACKED
from fxckpt.torch_private import FakeTensorMode, OpOverload, name_op

FILLABLE = (Opacity.ZEROED, Opacity.UNINITIALIZED)
"""Opacity of storages that a kernel unseen by the dispatcher may have filled."""

aten = torch.ops.aten

MASKS = (torch.bool, torch.uint8)
"""Types of tensors that select where they are true."""
MOST_DIMS = 64
"""Most dimensions of a tensor."""
INDEX_PUTS = frozenset(
    (
        aten.index_put.default,
        aten.index_put_.default,
        aten._index_put_impl_.default,
        aten._unsafe_index_put.default,
    )
)
"""Ops that write where masks or indices say."""
INDICES = "indices of a mask"
"""Name of the values that a mask is read as: a trace knows the number of elements it selects."""


@dataclass(frozen=True)
class TapeGraph:
    """The calls of a tape as a module.

    Its inputs are the tensors from outside. A trace has no results that depend on values:
    :mod:`~fxckpt.ops.unseen` ones stand for those without a gradient, and inputs for the others.
    """

    module: fx.GraphModule
    inputs: tuple[TensorVersion, ...]

    def fake_inputs(self) -> list[Tensor]:
        """Return fake tensors like the inputs."""
        mode = FakeTensorMode(allow_non_fake_inputs=True)
        with mode:
            return [_like(version) for version in self.inputs]


def graph_of(calls: Sequence[Call], outputs: Sequence[TensorVersion] = ()) -> TapeGraph:
    """Return the graph of a region's calls; ``outputs`` are what the region returned."""
    writer = _GraphWriter()
    for call in calls:
        writer.add(call)
    return writer.finish(outputs)


class _GraphWriter:
    """Writer of the graph of a tape, call by call."""

    def __init__(self) -> None:
        self.graph = fx.Graph()
        self.nodes: dict[TensorVersion, fx.Node] = {}
        self.inputs: list[TensorVersion] = []
        self.indices: dict[tuple[TensorVersion, bool], tuple[fx.Node, ...]] = {}
        """Nodes that each mask is read as, by whether it is of a tensor of one dimension then."""
        self.first = self.graph.call_function(torch.tensor, (0,))
        """Placeholders go in front of this."""

    def add(self, call: Call) -> None:
        """Add the nodes of a call."""
        if depends_on_values(call):
            self._add_selection(call)
        elif _is_filled(call):
            self._add_unseen(call, [])
        elif call.outputs or call.writes or call.op is name_op:
            self._add_call(call)

    def finish(self, outputs: Sequence[TensorVersion]) -> TapeGraph:
        """Return the graph with its outputs."""
        self.graph.output(tuple(map(self.node_of, outputs)))
        self.graph.erase_node(self.first)
        for node in self.graph.find_nodes(op="call_function", target=unseen):
            if not node.args[2] and self.inputs:
                # Memory is filled anew: it reads any input, which takes no bytes.
                node.update_arg(2, [self.nodes[self.inputs[0]]])
        module = fx.GraphModule(nn.Module(), self.graph, "Tape")
        return TapeGraph(module, tuple(self.inputs))

    def node_of(self, version: TensorVersion) -> fx.Node:
        """Return the node of a version: that of the oldest one which the calls wrote in place."""
        chain = [version]
        while chain[-1] not in self.nodes and chain[-1].carried is not None:
            chain.append(chain[-1].carried)
        found = self.nodes.get(chain[-1])
        if found is None:
            with self.graph.inserting_before(self.first):
                found = self.graph.placeholder(f"input_{len(self.inputs)}")
            self.inputs.append(chain[-1])
        for each in chain:
            self.nodes[each] = found
        return found

    def _add_call(self, call: Call) -> None:
        """Add the node of a call, and those that take its results apart."""
        kwargs = {
            k: None if isinstance(v, torch.Generator) else self._filled(v)
            for k, v in (call.kwargs or {}).items()
        }
        args = [None if isinstance(a, torch.Generator) else self._filled(a) for a in call.args]
        if call.op in INDEX_PUTS and (read := self._read_masks(call, *call.args[:3:2])) is not None:
            args[1] = read
        made = self.graph.call_function(call.op, tuple(args), kwargs)
        _describe(made, call)
        paths = (
            call.detail.paths
            if call.detail is not None
            else [() if len(call.outputs) == 1 else (i,) for i in range(len(call.outputs))]
        )
        for ref, path in zip(call.outputs, paths, strict=True):
            version = ref()
            if version is None or version.carried is not None:
                continue
            # A second view like the first has a gradient of its own; a detached tensor has none.
            if version in self.nodes and (call.writes or version in call.reads()):
                continue
            node = made
            for i in path:
                node = self.graph.call_function(operator.getitem, (node, i))
                _describe(node, call)
            self.nodes[version] = node

    def _add_selection(self, call: Call) -> None:
        """Add the nodes of a call whose result has as many elements as values say."""
        out = call.outputs[0]() if call.outputs else None
        is_flat = call.op is aten.masked_select.default
        indices = None
        if out is not None and (is_flat or call.op is aten.index.Tensor):
            indices = self._read_masks(call, call.args[0], out)
        if out is None or indices is None:
            self._add_unseen(call, [self.node_of(version) for version in call.reads()])
            return
        read = self.node_of(call.args[0])
        if is_flat:
            read = self.graph.call_function(aten.reshape.default, (read, [-1]))
            _describe(read, call)
        made = self.nodes[out] = self.graph.call_function(aten.index.Tensor, (read, indices))
        _describe(made, call)

    def _add_unseen(self, call: Call, reads: list[fx.Node]) -> None:
        """Add nodes that stand for the results of a call, but for selected ones with a gradient."""
        for i, ref in enumerate(call.outputs):
            version = ref()
            if version is None or version.geometry is None:
                continue
            _, shape, stride, dtype, _, _ = version.geometry
            if not (reads and dtype.is_floating_point):
                number = call.number * len(call.outputs) + i
                like = (list(shape), list(stride), dtype, _device(version))
                made = self.graph.call_function(unseen, (str(call.op), number, reads, *like))
                self.nodes[version] = made
                _describe(made, call)

    def _read_masks(
        self, call: Call, source: TensorVersion, selected: TensorVersion
    ) -> list[fx.Node | None] | None:
        """Return the indices that a call reads its masks as, or None if it reads none so.

        ``selected`` has the shape of what they select. A trace knows their number so.
        """
        is_flat = call.op is aten.masked_select.default
        given = [call.args[1]] if is_flat else call.args[1]
        count = _count_selected(source, given, selected)
        indices: list[fx.Node | None] = []
        for mask in given:
            if mask is None or mask.geometry is None or mask.geometry[3] not in MASKS:
                indices.append(None if mask is None else self.node_of(mask))
                continue
            if (mask, is_flat) not in self.indices:
                # One value may be written to any number of elements.
                if count is None or (call.op in INDEX_PUTS and count == 1):
                    return None
                like = ([count], [1], torch.int64, _device(selected))
                numbers = range(1 if is_flat else len(mask.geometry[1]))
                reads = [self.node_of(mask)]
                first = call.number * MOST_DIMS + len(indices)
                self.indices[mask, is_flat] = tuple(
                    self.graph.call_function(unseen, (INDICES, first + i, reads, *like))
                    for i in numbers
                )
            indices += self.indices[mask, is_flat]
        return indices

    def _filled(self, given: Any) -> Any:
        """Return an argument of a call with nodes in place of versions."""
        if type(given) is TensorVersion:
            return self.node_of(given)
        if type(given) is MetaArg and (version := given.version()) is not None:
            return self.node_of(version)
        return [self._filled(g) for g in given] if type(given) is list else given


def _describe(node: fx.Node, call: Call) -> None:
    node.meta["custom"] = {CALL: call.number}
    if call.writes and call.detail is not None and not call.detail.is_tracked:
        node.meta["custom"][UNTRACKED] = True
    if call.detail is not None:
        module = call.detail.module
        node.meta["nn_module_stack"] = {module: (module, nn.Module)}
        if call.detail.source:
            file, _, line = call.detail.source.rpartition(":")
            node.meta["stack_trace"] = f'File "{file}", line {line}, in region\n    '


def _count_selected(
    source: TensorVersion, masks: Sequence[TensorVersion | None], selected: TensorVersion
) -> int | None:
    """Return the number of elements that masks selected, or None where it is not clear."""
    given = [source, selected, *(mask for mask in masks if mask is not None)]
    if any(version.geometry is None for version in given):
        return None
    sizes, at, others = source.geometry[1], 0, 1
    for mask in masks:
        if mask is None:
            others *= sizes[at]
        is_mask = mask is not None and mask.geometry[3] in MASKS
        dims = len(mask.geometry[1]) if mask is not None and is_mask else 1
        if dims == 0 or (mask is not None and not is_mask and len(mask.geometry[1]) > 1):
            return None
        if mask is not None and is_mask and mask.geometry[1] != sizes[at : at + dims]:
            return None  # The mask of masked_select may be expanded.
        at += dims
    others *= math.prod(sizes[at:])
    count, rest = divmod(math.prod(selected.geometry[1]), others) if others else (0, 1)
    return None if rest else count


def _is_filled(call: Call) -> bool:
    """Return whether a call returned memory that an unseen kernel may have filled, and is kept."""
    return traits_of(call.op).opacity in FILLABLE and any(
        version.kept is not None and not version.is_chosen
        for ref in call.outputs
        if (version := ref()) is not None
    )


def depends_on_values(call: Call) -> bool:
    """Return whether the shape of an op's result depends on values (``nonzero``, ``x[mask]``)."""
    if not isinstance(call.op, OpOverload) or torch.Tag.dynamic_output_shape not in call.op.tags:
        return False
    if call.op._opname != "index":
        return True
    return any(
        version.geometry is not None and version.geometry[3] in MASKS
        for version in list(call.reads())[1:]
    )


def _like(version: TensorVersion) -> Tensor:
    if version.geometry is None:
        raise TypeError(
            "it reads a tensor without a storage of its own: a tensor subclass, or a sparse one"
        )
    _, shape, stride, dtype, _, _ = version.geometry
    tensor = torch.empty_strided(shape, stride, dtype=dtype, device=_device(version))
    made_of_values = version.call is not None and depends_on_values(version.call)
    return tensor.requires_grad_(version.needs_grad or (made_of_values and dtype.is_floating_point))


def _device(version: TensorVersion) -> torch.device:
    if (
        version.call is not None
        and version.call.detail is not None
        and version.call.detail.device is not None
    ):
        return version.call.detail.device
    held = version.kept if version.snapshot is None else version.snapshot.bytes
    return held.device  # type: ignore[no-any-return]
