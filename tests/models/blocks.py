"""Residual blocks with dropout, and their gradients."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn


class Net(nn.Module):
    """Blocks with dropout."""

    def __init__(self, blocks: int = 4, width: int = 32) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(
                nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width), nn.Dropout(0.2)
            )
            for _ in range(blocks)
        )

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(x)
        return x


def gradients(model: nn.Module, forward: Callable[..., Tensor], x: Tensor) -> list[Tensor]:
    model.zero_grad(set_to_none=True)
    torch.manual_seed(3)
    forward(x).square().mean().backward()
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]
