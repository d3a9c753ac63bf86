"""Values on the ``ctx`` of a user's ``autograd.Function``, without ``save_for_backward``."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fxckpt
from tests.steps import peak_of


class KeepsTanh(torch.autograd.Function):
    """A function that keeps an intermediate value and its output as attributes of ``ctx``."""

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
        self.weights = nn.ParameterList(torch.randn(128, 128) * 0.1 for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for weight in self.weights:
            x = x + KeepsTanh.apply(x, weight)
        return x.square().mean()


CASES = [
    pytest.param(
        budget, inner, marks=pytest.mark.sweep if (budget, inner) == (0.8, "inductor") else ()
    )
    for budget in (None, 0.8, 0.6)
    for inner in ("aot_eager", "inductor")
]


@pytest.mark.parametrize(("budget", "inner"), CASES)
def test_value_on_ctx_is_freed_after_last_read(budget: float | None, inner: str) -> None:
    """The value is freed after its last read; autograd alone holds it until the graph dies."""
    backend = fxckpt.Backend(budget=budget, inner=inner, cost="flops")
    measured = peak_of(backend, lambda: (Layers(), torch.randn(1024, 128)))
    # A second step may try a faster level, which goes unused if it exceeds the budget as compiled.
    plan = backend.plans[0]
    assert measured == (plan.compiled_peak_bytes or plan.peak_bytes)


def test_returned_value_on_ctx_may_be_written() -> None:
    """As in eager mode, which checks no version of a value on a ``ctx``."""
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
