"""A stack of layers whose steps send values away."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import fxckpt
from fxckpt.tiers import Tier


class Layer(nn.Module):
    """A residual layer with dropout, and views of its values in the backward."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.out = nn.LayerNorm(width), nn.Linear(2 * width, width)
        self.gates = nn.Linear(width, 4 * width)

    def forward(self, x: Tensor) -> Tensor:
        a, b = self.gates(self.norm(x)).chunk(2, dim=-1)
        return x + F.dropout(self.out(F.silu(a) * b.t().contiguous().t()), 0.1)


class WithLoss(nn.Module):
    """A model and its loss in one graph."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor) -> Tensor:
        return self.model(x).square().mean()


def stack() -> tuple[nn.Module, tuple[Tensor]]:
    torch.manual_seed(0)
    return nn.Sequential(*(Layer(16) for _ in range(5))), (torch.randn(256, 16),)


def compiled(
    model: nn.Module, tier: Tier, budget: object = 0.4, **options: Any
) -> tuple[Callable[..., Any], fxckpt.Backend]:
    options = {"inner": "aot_eager", "scope": "graph", **options}
    backend = fxckpt.Backend(budget, offload=tier, **options)  # type: ignore[arg-type]
    return torch.compile(model, backend=backend), backend


OFTEN = {True: ("gpt2", "t5", "convnext", "resnet", "unet"), False: ("gpt2", "resnet")}
"""Models tried by default, with a late link or an early one; the sweep tries all."""
