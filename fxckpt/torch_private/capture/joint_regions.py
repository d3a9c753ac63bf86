"""Regions of ``nested_compile_region`` in joint graphs.

AOTAutograd has the joint graph of each region partitioned first, then that of the whole, which
calls the halves. A plan spans all regions: the halves of a region save everything
(:func:`split_region`), and then their ops take the place of the calls
(:func:`inline_joint_regions`).
"""

from __future__ import annotations

import contextlib
import inspect
import operator
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils import _pytree as pytree

from fxckpt.torch_private.capture.aot import is_traced_in_backward
from fxckpt.torch_private.capture.dynamo import copied_body
from fxckpt.torch_private.ops.storages import storage_id

HELD_TAGS = "fxckpt_tags"
"""Key in ``meta`` of the tags of an op while the halves of its region are apart."""
TAGS = ("recompute", "ac_graph_id")
"""Keys in ``meta`` of a checkpoint region's decision about an op, and of the region."""
OF_CALLS = ("call_id", "nested_region_config")
"""Annotations of a call that mean nothing for an op of its body."""


def is_region(joint_inputs: Sequence[object]) -> bool:
    """Return whether a partitioner is called for a region: it is given no inputs then."""
    return isinstance(joint_inputs, list) and not joint_inputs


def split_region(
    joint: fx.GraphModule, *, num_fwd_outputs: int, **given: Any
) -> tuple[fx.GraphModule, fx.GraphModule]:
    """Return the halves of a region, of which the forward saves all that the backward reads.

    Regions within it are inlined. The tags of ops are put aside, so that torch obeys none here.
    """
    from torch._functorch.partitioners import default_partition

    joint = inline_joint_regions(_with_split_regions(joint))
    for node in joint.graph.nodes:
        node.meta[HELD_TAGS] = {key: node.meta.pop(key) for key in TAGS if key in node.meta}
    forward, backward = default_partition(joint, (), num_fwd_outputs=num_fwd_outputs, **given)
    _drop_second_runs(forward.graph, backward.graph)
    return forward, backward


def _drop_second_runs(forward: fx.Graph, backward: fx.Graph) -> None:
    """Remove dead ops of the backward that the forward runs: random ones would draw again."""
    first = {node.name for node in forward.nodes if node.op == "call_function"}
    for node in reversed(backward.nodes):
        if node.op == "call_function" and node.name in first and not node.users:
            backward.erase_node(node)


def _with_split_regions(joint: fx.GraphModule) -> fx.GraphModule:
    """Return the joint graph of a region with those in it split: torch goes one level deep."""
    from torch._functorch._aot_autograd.graph_compile import run_joint_graph_passes_on_hops as run

    def partition(inner: fx.GraphModule, inputs: object, **given: Any) -> Any:
        return split_region(inner, **given)

    _number_calls(joint.graph)
    # torch 2.11 takes the partitioner of the whole graph's compile.
    own = "default_partition_fn" in inspect.signature(run).parameters
    config: Any = SimpleNamespace(partition_fn=partition)
    return run(joint, [], config, **({"default_partition_fn": partition} if own else {}))


def _number_calls(graph: fx.Graph) -> None:
    """Number the calls in a region, a call of the forward and that of its backward alike.

    torch pairs them by number, but within a region all have the number of that region's own call.
    The call of the backward is given what its forward was, and that of the last runs first.
    """
    target = torch.ops.higher_order.invoke_subgraph
    calls = graph.find_nodes(op="call_function", target=target)
    forward = [call for call in calls if str(call.args[1]).startswith("fw")]
    for number, call in enumerate(forward):
        _number(call, number)
    unpaired = dict(enumerate(forward))
    for call in calls:
        if not str(call.args[1]).startswith("bw"):
            continue
        given = [_undetached(arg) for arg in call.args[2:]]
        number = max(
            n
            for n, first in unpaired.items()
            if given[: len(first.args) - 2] == [_undetached(arg) for arg in first.args[2:]]
        )
        _number(call, number)
        del unpaired[number]


def _number(call: fx.Node, number: int) -> None:
    """Give a call its number, in annotations of its own."""
    call.meta["custom"] = {**call.meta.get("custom", {}), "call_id": number}


def _undetached(value: Any) -> Any:
    """Return the node that a detached one was, as saved values of the forward are."""
    while isinstance(value, fx.Node) and value.target is torch.ops.aten.detach.default:
        value = value.args[0]
    return value


def inline_joint_regions(joint: fx.GraphModule) -> fx.GraphModule:
    """Return a joint graph with the ops of its regions, at any depth, in place of their calls."""
    graph = joint.graph
    target = torch.ops.higher_order.invoke_subgraph
    inlined = False
    while calls := graph.find_nodes(op="call_function", target=target):
        inlined = True
        for call in calls:
            body = call.args[0]
            with graph.inserting_before(call):
                results = _copied_call(joint, call)
            for item in list(call.users):
                assert item.target is operator.getitem
                _replace(item, results[item.args[1]])
                graph.erase_node(item)
            graph.erase_node(call)
            if not body.users:
                graph.erase_node(body)
    if inlined:
        graph.lint()
        joint.recompile()
    return joint


def _copied_call(joint: fx.GraphModule, call: fx.Node) -> Sequence[Any]:
    """Copy the ops of a call's body in front of it, and return its results."""
    body, _, *operands = call.args
    assert isinstance(body, fx.Node)
    name, storages = str(body.target), _OwnStorages()
    inputs = operator.attrgetter(name)(joint).graph.find_nodes(op="placeholder")
    for traced, operand in zip(inputs, operands, strict=True):
        storages.take(traced.meta.get("val"), operand)

    def adapt(copied: fx.Node) -> None:
        _annotate(copied, call)
        if "val" in copied.meta:
            copied.meta["val"] = pytree.tree_map_only(torch.Tensor, storages, copied.meta["val"])

    return copied_body(joint, name, operands, adapt)


class _OwnStorages:
    """Example values of one call: those of the body, in storages of this call.

    A body is traced once. With its values as they are, the results of two calls would be one.
    """

    def __init__(self) -> None:
        self._base: dict[int, tuple[torch.Tensor, Any]] = {}
        """A value in the call's storage for each storage of the body, and how far it is moved."""

    def take(self, traced: object, operand: object) -> None:
        """Let an input of the body have the storage of what the call is given."""
        value = operand.meta.get("val") if isinstance(operand, fx.Node) else operand
        if isinstance(traced, torch.Tensor) and isinstance(value, torch.Tensor):
            moved = value.storage_offset() - traced.storage_offset()
            self._base.setdefault(storage_id(traced), (value, moved))

    def __call__(self, traced: torch.Tensor) -> torch.Tensor:
        """Return the value of this call for one of the body."""
        mode = traced.fake_mode if isinstance(traced, FakeTensor) else contextlib.nullcontext()
        size, stride = traced.size(), traced.stride()
        with mode, torch.no_grad():
            key = storage_id(traced)
            if key not in self._base:
                found = torch.empty_strided(size, stride, dtype=traced.dtype, device=traced.device)
                self._base[key] = found, -traced.storage_offset()
                return found
            base, moved = self._base[key]
            if base.dtype != traced.dtype:
                base = base.flatten().view(traced.dtype)
            return base.as_strided(size, stride, traced.storage_offset() + moved)


def _annotate(copied: fx.Node, call: fx.Node) -> None:
    """Give the copy of an op the tags that it had, or else those of the call, and both's notes."""
    held = copied.meta.pop(HELD_TAGS, None)
    if held is not None:
        for key in TAGS:
            copied.meta.pop(key, None)
    is_backward = is_traced_in_backward(copied)
    keys = ("partitioner_tag", *(() if is_backward else TAGS))
    around = {key: call.meta[key] for key in keys if key in call.meta}
    copied.meta = {**around, **copied.meta, **(held or {})}
    notes = {k: v for k, v in call.meta.get("custom", {}).items() if k not in OF_CALLS}
    if notes:
        copied.meta["custom"] = {**notes, **copied.meta.get("custom", {})}


def _replace(item: fx.Node, result: Any) -> None:
    """Let the readers of an item of a call read a result, which may be None or a number."""
    for user in list(item.users):
        user.args = fx.map_arg(user.args, lambda n: result if n is item else n)
        user.kwargs = fx.map_arg(user.kwargs, lambda n: result if n is item else n)
