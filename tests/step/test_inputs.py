"""Inputs of a call that it alone keeps for its backward."""

from __future__ import annotations

import weakref

import pytest
import torch
from torch import Tensor, nn

import fxckpt
from fxckpt.step.inputs import kept_bytes, made_inputs
from tests.step.stack import clear

TOKENS = torch.arange(512)


class Head(nn.Module):
    """Logits, and their loss in a graph of its own."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table, self.up, self.head = (
            nn.Embedding(512, 16),
            nn.Linear(16, 64),
            nn.Linear(64, 512),
        )

    def forward(self, tokens: Tensor) -> Tensor:
        logits = self.head(self.up(self.table(tokens)).sin())
        torch._dynamo.graph_break()
        return nn.functional.cross_entropy(logits, tokens)


def test_saved_input_is_kept_until_another_holds_it() -> None:
    """What a node saves is its own, unless a name, or another node, holds it too."""
    x = torch.ones(8, requires_grad=True) * 2
    inputs = made_inputs([torch.ones(1), x, torch.ones(1, requires_grad=True)])
    assert list(inputs) == [1]
    y = x.square()
    assert kept_bytes(inputs) == {}
    del x
    assert kept_bytes(inputs) == {1: 32}
    held = inputs[1]()
    assert held is not None
    z = held.sin()
    del held
    assert kept_bytes(inputs) == {}
    del z
    assert kept_bytes(inputs) == {1: 32}
    del y
    assert kept_bytes(inputs) == {} and isinstance(inputs[1], weakref.ref)


@pytest.mark.parametrize("budget", ["95%", "100%"])
def test_loss_apart_is_predicted_at_once(budget: str) -> None:
    """Logits that only the loss keeps are gone where it keeps their log-probabilities."""
    model = Head()
    backend = fxckpt.Backend(budget, inner="aot_eager", cost="flops")
    compiled = torch.compile(model, backend=backend)
    limits = []
    for number in range(4):
        clear(model)
        compiled(TOKENS).backward()
        step = backend.report().step
        assert step is not None
        assert step.predicted_peak_bytes == step.measured_peak_bytes
        assert step.measured_peak_bytes <= step.budget_bytes, number
        limits.append(step.budget_bytes)
    assert len(set(limits)) == 1, "the fraction is of one peak"
    if budget == "100%":
        assert step.extra_seconds == 0
        assert step.measured_peak_bytes >= 0.9 * step.budget_bytes
