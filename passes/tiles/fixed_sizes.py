"""Fixed sizes: a copy of a joint graph whose sizes vary, at the sizes that it is planned for.

Plans of a graph are made at one value of each size. Unrolling at numbers takes a quarter of the
time that it takes at expressions of them, which is for the one graph that is run.

Expects a normalized joint graph. Leaves it alone.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

from fxckpt.ops.properties import tensors
from fxckpt.passes.graphs import Joint
from fxckpt.passes.tiles.row_regions import is_size
from fxckpt.torch_private import FakeTensor, FakeTensorMode, OpOverload, is_computed, size_hint
from fxckpt.torch_private.inductor.default_partitioner import copied


def at_planned_sizes(joint: Joint) -> Joint | None:
    """Return a copy of a joint graph with numbers in place of sizes that vary.

    Its nodes have the same names, but those of sizes, which are gone. None where no size varies, or
    where one is not known before the graph runs, or an op has a graph of its own.
    """
    nodes = list(joint.module.graph.nodes)
    mode = next((m for node in nodes if _varies(node) and (m := _mode_of(node))), None)
    if mode is None or not all(map(_is_plain, nodes)):
        return None
    module = copied(joint.module)
    numbers: dict[fx.Node, int] = {}
    for node in list(module.graph.nodes):
        if is_size(node):
            numbers[node] = size_hint(node.meta["val"])
            continue
        node.args = fx.map_arg(node.args, lambda arg: numbers.get(arg, arg))
        node.kwargs = fx.map_arg(node.kwargs, lambda arg: numbers.get(arg, arg))
        if node.op in ("placeholder", "get_attr"):
            node.meta["val"] = _fixed(node.meta.get("val"))
        elif node.op == "call_function":
            args: Any = fx.map_arg((node.args, node.kwargs), lambda arg: arg.meta["val"])
            with torch.no_grad(), mode:
                node.meta["val"] = node.target(*args[0], **args[1])  # type: ignore[operator]
    for node in reversed(numbers):
        if node.op == "call_function":
            module.graph.erase_node(node)
    return Joint(module, joint.num_fwd_outputs)


def _varies(node: fx.Node) -> bool:
    """Return whether a size of a node's value varies."""
    sizes = (size for t in tensors(node.meta.get("val")) for size in t.shape)
    return any(isinstance(size, torch.SymInt) for size in sizes)


def _mode_of(node: fx.Node) -> FakeTensorMode | None:
    """Return the mode of a node's fake value."""
    value = node.meta["val"]
    return value.fake_mode if isinstance(value, FakeTensor) else None


def _is_plain(node: fx.Node) -> bool:
    """Return whether a node's value follows from the sizes of the inputs, by an op alone."""
    value = node.meta.get("val")
    if node.op == "output":
        return not any(map(is_size, node.all_input_nodes))
    if node.op != "call_function":
        is_dense = isinstance(value, torch.Tensor) and value.layout is torch.strided
        return value is None or is_dense or is_size(node)
    is_op = isinstance(node.target, OpOverload) or node.target is operator.getitem
    is_known = all(is_computed(size) for t in tensors(value) for size in t.shape)
    return is_size(node) or (is_op and is_known)


def _fixed(value: torch.Tensor | torch.SymInt | None) -> torch.Tensor | torch.SymInt | None:
    """Return an input's value with numbers for its sizes."""
    if not isinstance(value, FakeTensor):
        return value
    shape, strides = (tuple(map(size_hint, sizes)) for sizes in (value.shape, value.stride()))
    with value.fake_mode:
        return torch.empty_strided(shape, strides, dtype=value.dtype, device=value.device)
