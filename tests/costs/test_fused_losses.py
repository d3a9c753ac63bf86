"""Costs of torch's own fused losses."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn import functional as F

from fxckpt.costs.fused_losses import fused_loss_bytes, fused_loss_flops
from fxckpt.costs.op_counts import node_bytes, node_flops
from tests.costs.nodes import node_of

fused: Any = getattr(F, "linear_cross_entropy", None)


def test_other_ops_are_none() -> None:
    """A matmul is no fused loss."""
    product = node_of(torch.mm, torch.ones(2, 3), torch.ones(3, 4))
    assert fused_loss_flops(product) is None and fused_loss_bytes(product) == 0


@pytest.mark.skipif(fused is None, reason="this torch has none")
@pytest.mark.parametrize(("reduction", "frozen", "products"), [("sum", 1, 2), ("none", 2, 1)])
def test_products_asked_for_count(reduction: str, frozen: int, products: int) -> None:
    """Each product takes two FLOPs an element; logits are written and read between."""
    options: Any = torch.nn.LinearCrossEntropyOptions()  # type: ignore[attr-defined]
    target = torch.zeros(64, dtype=torch.long)

    def loss(x: torch.Tensor, weight: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        x = x.detach().requires_grad_(frozen < 2)
        return fused(x, weight.detach(), target, options=options, reduction=reduction)  # type: ignore[no-any-return]

    graph = node_of(loss, torch.ones(64, 8), torch.ones(256, 8), target).graph
    (node,) = [n for n in graph.nodes if "linear_cross_entropy" in str(n.target)]
    assert node_flops(node) == products * 2 * 64 * 8 * 256
    assert node_bytes(node) >= (products + 2) * 64 * 256 * 4
