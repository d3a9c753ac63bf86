"""Memory layouts that Inductor selects for convolutions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx
from torch._inductor import inductor_prims
from torch._ops import OpOverload
from torch.utils import _pytree as pytree

from fxckpt.torch_private.capture.sizes import size_hint
from fxckpt.torch_private.inductor.options import Layout


def changes_layout(half: fx.GraphModule) -> bool:
    """Return whether Inductor changes traced layouts (to channels last around convolutions)."""
    from torch._inductor.graph import GraphLowering

    return bool(GraphLowering.decide_layout_opt(half, is_inference=False))


FORCE_STRIDE_ORDER = inductor_prims.force_stride_order
"""Inductor's op that forces a layout: ``(tensor, strides) -> tensor``."""


def wants_channels_last(half: fx.GraphModule) -> bool | None:
    """Return True if a half forces channels last on an image; None lets Inductor decide."""
    forced = (
        node.meta["val"]
        for node in half.graph.find_nodes(op="call_function", target=FORCE_STRIDE_ORDER)
    )
    images = (value for value in forced if value.dim() == 4 and not value.is_contiguous())
    return (
        True
        if any(value.is_contiguous(memory_format=torch.channels_last) for value in images)
        else None
    )


def is_convolution(node: fx.Node) -> bool:
    """Return whether an op is a convolution or its backward."""
    return node.target in (
        torch.ops.aten.convolution.default,
        torch.ops.aten.convolution_backward.default,
    )


def channels_last(node: fx.Node) -> fx.Node:
    """Return a copy of a call, in its own graph, with channels-last images.

    Signals and volumes keep their layout, as in Inductor.
    """

    def given(operand: fx.Node) -> Any:
        value = operand.meta["val"]
        is_image = isinstance(value, torch.Tensor) and value.dim() == 4
        return torch.empty_like(value, memory_format=torch.channels_last) if is_image else value

    return _called_with(node, given)


def with_layouts(node: fx.Node, layouts: Sequence[Layout]) -> fx.Node | None:
    """Return a copy of a call whose tensor operands have the given layouts, in order.

    Returns the node itself if it was traced so, and None if the operands do not match.
    """
    args = [
        arg for arg in pytree.arg_tree_leaves(*node.args, **node.kwargs) if isinstance(arg, fx.Node)
    ]
    operands = [arg for arg in args if isinstance(arg.meta.get("val"), torch.Tensor)]
    sizes = [tuple(map(size_hint, operand.meta["val"].shape)) for operand in operands]
    if not isinstance(node.target, OpOverload) or sizes != [size for size, _ in layouts]:
        return None
    pairs = (
        (operand, stride, tuple(map(size_hint, operand.meta["val"].stride())))
        for operand, (_, stride) in zip(operands, layouts, strict=True)
    )
    relaid = {operand: stride for operand, stride, traced in pairs if stride != traced}

    def given(operand: fx.Node) -> Any:
        value = operand.meta["val"]
        return value.as_strided(value.shape, relaid[operand]) if operand in relaid else value

    return _called_with(node, given) if relaid else node


def _called_with(node: fx.Node, given: Callable[[fx.Node], Any]) -> fx.Node:
    graph = fx.Graph()

    def placeholder(operand: fx.Node) -> fx.Node:
        made = graph.placeholder(operand.name)
        made.meta["val"] = given(operand)
        return made

    return graph.node_copy(node, placeholder)


def may_donate() -> bool:
    """Return whether a compiled backward may overwrite values saved for it alone."""
    from torch._functorch import config

    return bool(config.donated_buffer)


def lay_out_as_output(op: OpOverload, last_reader: OpOverload) -> None:
    """Let Inductor lay out what an op reads as it would if the half returned it.

    It returns a value in the layout it was traced in, an image of a convolution channels last, and
    copies one that it stored in another layout. ``last_reader``, which is given the op's result and
    the same value, reads the same buffer, so that it is the one that lives until then.
    """
    from torch._inductor.lowering import lowerings, make_fallback

    for each, constraint in ((op, _as_output), (last_reader, _as_copied)):
        if each not in lowerings:
            make_fallback(each, layout_constraint=constraint, warn=False)


def _as_output(call: fx.Node, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
    """Return the arguments of a call, with tensors laid out as outputs."""
    from torch._inductor import ir
    from torch._inductor.virtualized import V

    def laid_out(given: Any, node: Any) -> Any:
        value = node.meta.get("val") if isinstance(node, fx.Node) else None
        if not isinstance(value, torch.Tensor) or not isinstance(given, ir.IRNode):
            return given
        given.realize()  # Else a copy would be laid out, and the value be stored twice.
        strides: Sequence[Any] = value.stride()
        if value.dim() == 4 and node in V.graph.nodes_prefer_channels_last:
            strides = ir.FlexibleLayout.stride_ordered_for_memory_format(
                given.get_size(), torch.channels_last
            )
        order = ir.get_stride_order(strides, V.graph.sizevars.shape_env)
        return ir.ExternKernel.require_stride_order(given, order)

    return tuple(map(laid_out, args, call.args)), kwargs


def _as_copied(call: fx.Node, held: Any, value: Any, *args: Any) -> tuple[Any, Any]:
    """Return the arguments of a call, with the buffer that was read for ``held`` as the value."""
    from torch._inductor import ir

    result: Any = ir.ExternKernel.unwrap_storage_for_input(held)
    (copy,) = result.inputs
    (buffer,) = copy.inputs
    if not isinstance(buffer, ir.ReinterpretView):
        buffer = ir.StorageBox(buffer)
    return (held, ir.TensorBox(buffer), *args), {}
