"""Fused losses: FLOPs and bytes of torch's ops of a head and its loss, which hold no logits whole.

``torch.nn.functional.linear_cross_entropy`` with options is one op, which computes the gradients
with the loss, in chunks. torch's counter has no formula of it.
"""

from __future__ import annotations

import math

import torch
from torch import fx

from fxckpt.torch_private import size_hint

WITH_GRADIENTS = "torch_nn._linear_cross_entropy_batch_chunked"
LOSS_ALONE = "torch_nn._linear_cross_entropy_batch_chunked_no_reduction"
SOFTMAX_PASSES = 2
"""Times that a softmax of logits reads or writes them."""


def fused_loss_flops(node: fx.Node) -> int | None:
    """Return the FLOPs of the matrix products of a fused loss; None for another op."""
    found = _products(node)
    return None if found is None else 2 * found[0] * _inner(node) * found[1]


def fused_loss_bytes(node: fx.Node) -> int:
    """Return the bytes of logits that a fused loss writes and reads between, 0 for another op.

    The product writes them, the softmax reads and writes them, each product of a gradient reads
    them.
    """
    found = _products(node)
    if found is None:
        return 0
    logits, products = found
    kind = next(arg for arg in node.args if isinstance(arg, torch.dtype))
    return logits * (products + SOFTMAX_PASSES) * kind.itemsize


def _products(node: fx.Node) -> tuple[int, int] | None:
    """Return the elements of the logits of a fused loss, and its number of products with them."""
    name = str(getattr(node.target, "overloadpacket", None))
    if name not in (WITH_GRADIENTS, LOSS_ALONE):
        return None
    rows, weight = _shape(node, 0)[0], _shape(node, 1)
    gradients = 0
    if name == WITH_GRADIENTS:
        names = [argument.name for argument in node.target._schema.arguments]  # type: ignore[union-attr]
        asked = ("compute_input_grad", "compute_linear_weight_grad")
        given = dict(zip(names, node.args, strict=False))
        gradients = sum(bool(given.get(each, node.kwargs.get(each))) for each in asked)
    return rows * math.prod(weight[:-1]), 1 + gradients


def _inner(node: fx.Node) -> int:
    return _shape(node, 1)[-1]


def _shape(node: fx.Node, position: int) -> list[int]:
    operand = node.args[position]
    assert isinstance(operand, fx.Node)
    return [size_hint(n) for n in operand.meta["val"].shape]
