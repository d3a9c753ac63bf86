"""Blocks compiled one by one, with a head and a loss in eager code, and what a step measures."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

import fxckpt


class Block(nn.Module):
    """A residual MLP behind a norm, with dropout."""

    def __init__(self, width: int = 32, dropout: float = 0.1) -> None:
        super().__init__()
        self.norm, self.dropout = nn.LayerNorm(width), nn.Dropout(dropout)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.dropout(self.down(nn.functional.gelu(self.up(self.norm(x)))))


class Stack(nn.Module):
    """Blocks and a head with a loss, which stay eager."""

    def __init__(self, depth: int = 4) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(depth))
        self.head = nn.Linear(32, 200)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return nn.functional.cross_entropy(self.head(x), torch.zeros(len(x), dtype=torch.long))


X = torch.randn(512, 32)


def clear(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.grad = None


def step_of(model: nn.Module, x: Tensor = X) -> Callable[[], None]:
    def step() -> None:
        torch.manual_seed(3)
        model(x).backward()

    return step


def gradients(model: nn.Module) -> list[Tensor]:
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


def measured(model: nn.Module, x: Tensor = X) -> int:
    """Return the peak of a step that frees no gradient."""
    clear(model)
    return fxckpt.measure_peak(step_of(model, x))


def plain(model: nn.Module, x: Tensor = X) -> tuple[int, list[Tensor]]:
    """Return the peak of an eager step, and its gradients."""
    measured(model, x)
    return measured(model, x), gradients(model)


def compiled(budget: fxckpt.budgets.Budget, **options: object) -> tuple[Stack, fxckpt.Backend]:
    model = Stack()
    backend = fxckpt.compile_blocks(model.blocks, budget, inner="aot_eager", **options)
    return model, backend


def assert_step_is_right(model: nn.Module, limit: int, wanted: list[Tensor], x: Tensor = X) -> None:
    assert measured(model, x) <= limit
    assert all(map(torch.equal, gradients(model), wanted))
