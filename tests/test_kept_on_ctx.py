"""What a user's ``autograd.Function`` keeps on its ``ctx``, without ``save_for_backward``."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fxckpt
from tests.steps import peak_of


class KeepsTanh(torch.autograd.Function):
    """Keeps what it computed, and what it returns, as attributes."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.x, ctx.weight = x, weight
        ctx.tanh = torch.tanh(x @ weight)
        ctx.output = ctx.tanh.exp()
        return ctx.output

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        inner = gradient * ctx.output * (1 - ctx.tanh * ctx.tanh)
        return inner @ ctx.weight.mT, ctx.x.mT @ inner


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterList(torch.randn(128, 128) * 0.1 for _ in range(6))

    def forward(self, x: Tensor) -> Tensor:
        for weight in self.weights:
            x = x + KeepsTanh.apply(x, weight)
        return x.square().mean()


@pytest.mark.parametrize("inner", ["aot_eager", "inductor"])
@pytest.mark.parametrize("budget", [None, 0.8, 0.6])
def test_it_is_let_go_of_after_its_last_read(budget: float | None, inner: str) -> None:
    """Autograd itself would hold what is kept on a ``ctx`` until the graph dies."""
    backend = fxckpt.Backend(budget=budget, inner=inner)
    measured = peak_of(backend, lambda: (Layers(), torch.randn(1024, 128)))
    (plan,) = backend.plans
    assert measured == (plan.compiled_peak_bytes or plan.peak_bytes)


def test_what_is_kept_and_returned_may_be_written_to() -> None:
    """As in eager mode, where nobody checks the version of what is kept on a ``ctx``."""
    torch._dynamo.reset()
    weight = torch.randn(16, 16, requires_grad=True)

    def gradient(function: Any) -> Tensor:
        x = torch.linspace(-1, 1, 64).reshape(4, 16)
        output = function(x, weight)
        output.detach().mul_(2)
        (found,) = torch.autograd.grad(output.sum(), weight)
        return found

    def layer(x: Tensor, weight: Tensor) -> Tensor:
        return KeepsTanh.apply(x, weight)  # type: ignore[no-any-return,no-untyped-call]

    compiled = torch.compile(layer, backend=fxckpt.Backend(inner="aot_eager"))
    assert torch.equal(gradient(compiled), gradient(layer))
