"""One frontier of a small GPT-2 for all tests of reports."""

from __future__ import annotations

import pytest

import fxckpt
from fxckpt.costs.roofline import Roofline
from tests.models.zoo import ENTRIES

COST = Roofline(2e11, 1e10, 0.0)
"""The costs of a fixed machine, so that plans are the same everywhere."""


@pytest.fixture(scope="session")
def curve() -> fxckpt.Frontier:
    """Six plans of a small GPT-2."""
    model, inputs = next(e for e in ENTRIES if e.name == "gpt2").make()
    return fxckpt.frontier(model.train(), *inputs, points=6, cost=COST)


@pytest.fixture(scope="session")
def plan(curve: fxckpt.Frontier) -> fxckpt.Plan:
    """A plan that saves some values and recomputes others."""
    return curve.plans[2]
