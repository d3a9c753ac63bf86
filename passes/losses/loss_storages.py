"""Loss storages: give reduced losses the storages of the elements that they are reduced from.

Some losses compute their elements in the output's own memory, which shrinks in shape and not in
bytes: a mean of squared errors holds as much as its input until the loss is freed. Traces show one
number.

Expects a graph with ``meta["val"]``. Leaves its ops alone, and replaces fake values.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, fx

from fxckpt.passes.transforms.storage_copies import replace_values
from fxckpt.torch_private import fake_like, size_hint

RESIZES_LOSS = frozenset(
    (
        torch.ops.aten.binary_cross_entropy.default,
        torch.ops.aten.mse_loss.default,
        torch.ops.aten.smooth_l1_loss.default,
        torch.ops.aten.soft_margin_loss.default,
    )
)
"""Losses of an input and a target that are resized to one number; others allocate it apart."""


def hold_loss_elements(graph: fx.Graph) -> None:
    """Give each reduced loss of :data:`RESIZES_LOSS` a storage of all of its elements."""
    replace_values(graph, RESIZES_LOSS, _with_elements)


def _with_elements(node: fx.Node) -> Tensor | None:
    """Return a fake value for a reduced loss in a storage of its elements; None if not reduced."""
    value: Tensor = node.meta["val"]
    operands = (arg.meta["val"] for arg in node.args[:2] if isinstance(arg, fx.Node))
    count = math.prod(torch.broadcast_shapes(*(operand.shape for operand in operands)))
    if value.shape or size_hint(count) <= 1:
        return None
    return fake_like(value, (count,), value.dtype).as_strided((), ())
