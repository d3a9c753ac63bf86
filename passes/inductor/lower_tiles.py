"""Lower tiles: ops that tiles are unrolled into, as ops that Inductor has loops for.

A product that is added to a float32 sum becomes a product and a sum: Inductor overwrites the sum so
far, and computes what follows it in the same kernel. Our op would be a kernel of its own to it,
which returns another sum. A copy in another type becomes a conversion, as in what Inductor traces.
Joined tiles of a number of rows that varies have a size that it cannot prove to be that of all
rows: they are given it.

Expects emitted halves. Leaves ones that compute the same, but for the rounding of products.
"""

from __future__ import annotations

import torch
from torch import fx

from fxckpt.ops.kernels import accumulate_mm
from fxckpt.passes.meta import ACCUMULATES, IS_RECOMPUTE
from fxckpt.torch_private import SizeNodes, size_key

aten = torch.ops.aten


def lower_tiles(half: fx.Graph) -> None:
    """Replace the ops of tiles that Inductor has no loops for."""
    for node in half.find_nodes(op="call_function", target=accumulate_mm):
        _split_product(node)
    for node in half.find_nodes(op="call_function", target=aten.cat.default):
        _give_size(node)
    for node in half.find_nodes(op="call_function", target=aten._to_copy.default):
        if list(node.kwargs) == ["dtype"]:
            node.target, node.args, node.kwargs = (
                torch.ops.prims.convert_element_type.default,
                (*node.args, node.kwargs["dtype"]),
                {},
            )


def _give_size(node: fx.Node) -> None:
    """Give joined tiles the size of all rows, where theirs is a sum of other sizes."""
    value, (pieces, *rest) = node.meta["val"], node.args
    dim = rest[0] if rest else 0
    assert isinstance(pieces, (list, tuple)) and isinstance(dim, int)
    if isinstance(value.shape[dim], int):
        return
    shapes = [piece.meta["val"].shape for piece in pieces]  # type: ignore[union-attr]
    # An empty vector may be joined with values of any dimensions.
    total = sum(shape[dim] for shape in shapes if len(shape) == value.dim())
    if size_key(total) == size_key(value.shape[dim]):
        return
    sizes = SizeNodes(node.graph)
    with node.graph.inserting_after(node):
        whole = node.graph.call_function(aten.as_strided.default)
    node.replace_all_uses_with(whole)
    whole.args = (node, *sizes.in_place_of((list(value.shape), list(value.stride()), 0)))
    whole.meta = {k: v for k, v in node.meta.items() if k != IS_RECOMPUTE}


def _split_product(node: fx.Node) -> None:
    """Turn a product that is added to a sum into a product and a sum."""
    total, left, right = (operand for operand in node.args if isinstance(operand, fx.Node))
    with node.graph.inserting_before(node):
        product = node.graph.call_function(aten.mm.default, (left, right))
    product.meta = {k: v for k, v in node.meta.items() if k not in (ACCUMULATES, IS_RECOMPUTE)}
    value = node.meta["val"]
    product.meta["val"] = value.new_empty(value.shape, dtype=left.meta["val"].dtype)
    node.target, node.args = aten.add.Tensor, (total, product)
