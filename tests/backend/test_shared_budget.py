"""A budget of each graph that several calls in flight exceed together.

Warnings are errors here, as in all tests.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fxckpt
from fxckpt.backend.shared_budget import FEW


class Block(nn.Module):
    """A block of a transformer without its attention."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(256, 1024), nn.Linear(1024, 256)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(nn.functional.gelu(self.up(x)))


def blocks_with(count: int, **options: Any) -> nn.Sequential:
    """Return blocks that are compiled one by one with equal options, by default a budget each."""
    found = nn.Sequential(*(Block() for _ in range(count)))
    for each in found:
        each.compile(backend="fxckpt", options={"inner": "aot_eager", "scope": "graph", **options})
    return found


def test_calls_in_flight_over_the_budget_warn() -> None:
    """Eight blocks within 9 MiB each hold more than that together: one warning, right values."""
    torch.manual_seed(0)
    model, x = blocks_with(8, budget="9MiB"), torch.randn(512, 256)
    with pytest.warns(UserWarning, match="calls of compiled graphs hold .* scope='step'") as told:
        model(x).sum().backward()
        model(x).sum().backward()
    assert len([w for w in told if "hold" in str(w.message)]) == 1
    found = [p.grad for p in model.parameters()]
    plain = nn.Sequential(*(Block() for _ in range(8)))
    plain.load_state_dict(model.state_dict())
    for _ in range(2):
        plain(x).sum().backward()
    assert all(torch.equal(g, p.grad) for g, p in zip(found, plain.parameters(), strict=True))


def test_one_call_at_a_time_is_within() -> None:
    """Calls that had their backward, or were dropped, or fit together, are not told of."""
    model, x = blocks_with(1, budget="9.5MiB"), torch.randn(512, 256)
    kept = []
    for _ in range(8):
        kept.append(model(x).sum())
        kept[-1].backward()
    for _ in range(8):
        model(x).sum()
    blocks_with(2, budget="64MiB")(x).sum().backward()


def test_fractions_and_steps_are_not_told_of() -> None:
    """A fraction is of each graph, and a budget of the step holds: neither warns."""
    x = torch.randn(512, 256)
    blocks_with(8, budget=1.0)(x).sum().backward()
    stepped = blocks_with(4, budget="64MiB", scope="step")
    for _ in range(2):
        stepped(x).sum().backward()


def test_few_calls_are_remembered() -> None:
    """Calls that hold next to nothing are forgotten once their backward ran."""
    model = Block()
    backend = fxckpt.Backend(budget="1GiB", inner="aot_eager", scope="graph")
    model.compile(backend=backend)
    for _ in range(3 * FEW):
        model(torch.randn(2, 256)).sum().backward()
    assert backend._shared is not None and 0 < len(backend._shared._flights) < FEW
