"""Two budgets of one step are refused, and nothing leaks."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import fxckpt
from fxckpt.step.flight import RunningBackwards


class Layer(nn.Module):
    """A linear layer and an activation."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x).tanh()


def test_second_owner_of_a_backward_is_told() -> None:
    """An owner learns of the first one in its backward, until that one leaves."""
    running: RunningBackwards[str] = RunningBackwards()
    assert [running.enter(1, "a"), running.enter(1, "a"), running.enter(1, "b")] == [
        None,
        None,
        "a",
    ]
    running.leave("a")
    assert running.enter(1, "b") is None


def test_two_budgets_in_one_backward() -> None:
    """The error names both; each works by itself before it and after it."""
    x, names = torch.randn(64, 16), []
    layers = [Layer(), Layer()]
    for layer, budget in zip(layers, ("1MiB", "2MiB"), strict=True):
        backend = fxckpt.Backend(budget, inner="aot_eager")
        layer.compile(backend=backend)
        names.append(f"Backend\\(budget='{budget}', inner='aot_eager'\\)")
        layer(x).sum().backward()
    loss = layers[1](layers[0](x)).sum()
    with pytest.raises(fxckpt.InvalidOption, match=f"{names[1]} and {names[0]} .*one Backend"):
        loss.backward()
    del loss
    for layer in layers:
        layer.zero_grad()
        layer(x).sum().backward()
        assert layer.linear.weight.grad is not None


def test_two_budgets_in_turn_are_two_steps() -> None:
    """Models that train one after the other, as a generator and its critic, have a budget each."""
    x, layers = torch.randn(64, 16), [Layer(), Layer()]
    for layer in layers:
        layer.compile(backend=fxckpt.Backend("1MiB", inner="aot_eager"))
    for _ in range(2):
        losses = [layer(x).sum() for layer in layers]
        for loss in losses:
            loss.backward()
    assert all(layer.linear.weight.grad is not None for layer in layers)
