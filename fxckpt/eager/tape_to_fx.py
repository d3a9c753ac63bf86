"""A tape as an FX graph, which can be printed, explained and planned."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn

from fxckpt.eager.tape import Call, MetaArg, TensorVersion
from fxckpt.ops.traits import Opacity, traits_of
from fxckpt.passes.meta import CALL, UNTRACKED
from fxckpt.torch_private import FakeTensorMode, OpOverload, name_op

FILLABLE = (Opacity.ZEROED, Opacity.UNINITIALIZED)
"""Opacity of storages that a kernel unseen by the dispatcher may have filled."""


@dataclass(frozen=True)
class TapeGraph:
    """The calls of a tape as a module.

    Its inputs are the tensors from outside, and the results that depend on values, which a trace
    does not have.
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
    graph = fx.Graph()
    nodes: dict[TensorVersion, fx.Node] = {}
    inputs: list[TensorVersion] = []

    def from_outside(version: TensorVersion) -> fx.Node:
        with graph.inserting_before(first):
            node = nodes[version] = graph.placeholder(f"input_{len(inputs)}")
        inputs.append(version)
        return node

    def node_of(version: TensorVersion) -> fx.Node:
        chain = [version]
        while chain[-1] not in nodes and chain[-1].carried is not None:
            chain.append(chain[-1].carried)
        oldest = chain[-1]
        found = nodes.get(oldest)
        # Memory that was filled behind the dispatcher is an input too: no call computes it.
        if found is None or (
            oldest.kept is not None and not oldest.is_chosen and _is_filled(oldest)
        ):
            found = from_outside(oldest)
        for newer in chain[:-1]:
            nodes[newer] = found
        return found

    # Placeholders go in front of this.
    first = graph.call_function(torch.tensor, (0,))
    for call in calls:
        if depends_on_values(call):
            continue
        if call.outputs or call.writes or call.op is name_op:
            _add(graph, call, nodes, node_of)
    graph.output(tuple(node_of(version) for version in outputs))
    graph.erase_node(first)
    module = fx.GraphModule(nn.Module(), graph, "Tape")
    return TapeGraph(module, tuple(inputs))


def _add(
    graph: fx.Graph,
    call: Call,
    nodes: dict[TensorVersion, fx.Node],
    node_of: Callable[[TensorVersion], fx.Node],
) -> None:
    """Add the node of a call, and those that take its results apart."""
    kwargs = {
        k: None if isinstance(v, torch.Generator) else _filled(v, node_of)
        for k, v in (call.kwargs or {}).items()
    }
    args = tuple(None if isinstance(a, torch.Generator) else _filled(a, node_of) for a in call.args)
    made = graph.call_function(call.op, args, kwargs)
    _describe(made, call)
    paths = (
        call.detail.paths
        if call.detail is not None
        else [() if len(call.outputs) == 1 else (i,) for i in range(len(call.outputs))]
    )
    for ref, path in zip(call.outputs, paths, strict=True):
        version = ref()
        if version is None or version in nodes or version.carried is not None:
            continue
        node = made
        for i in path:
            node = graph.call_function(operator.getitem, (node, i))
            _describe(node, call)
        nodes[version] = node


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


def _filled(given: Any, node_of: Callable[[TensorVersion], fx.Node]) -> Any:
    if type(given) is TensorVersion:
        return node_of(given)
    if type(given) is MetaArg and (version := given.version()) is not None:
        return node_of(version)
    return [_filled(g, node_of) for g in given] if type(given) is list else given


def _is_filled(version: TensorVersion) -> bool:
    return version.call is not None and traits_of(version.call.op).opacity in FILLABLE


def depends_on_values(call: Call) -> bool:
    """Return whether the shape of an op's result depends on values (``nonzero``, ``x[mask]``)."""
    if not isinstance(call.op, OpOverload) or torch.Tag.dynamic_output_shape not in call.op.tags:
        return False
    if call.op._opname != "index":
        return True
    return any(
        version.geometry is not None and version.geometry[3] in (torch.bool, torch.uint8)
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
