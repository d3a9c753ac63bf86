"""Frontiers: plans of one step at many budgets."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
import torch

import fxckpt
from tests.models.zoo import ENTRIES

GPT2 = next(e for e in ENTRIES if e.name == "gpt2")


@pytest.fixture(scope="module")
def curve() -> fxckpt.Frontier:
    """Return the frontier of a small GPT-2 at six points."""
    model, inputs = GPT2.make()
    return fxckpt.frontier(model.train(), *inputs, points=6)


def test_spans_floor_to_uncheckpointed_peak(curve: fxckpt.Frontier) -> None:
    """The points begin at the floor and end at the uncheckpointed peak."""
    first, last = curve.rows[0], curve.rows[-1]
    assert len(curve.plans) == 6
    assert first.peak_bytes == curve.plans[0].floor_bytes
    assert last.recompute_seconds == 0
    assert last.budget_bytes == curve.plans[0].baseline_peak_bytes


def test_more_memory_never_takes_more_time(curve: fxckpt.Frontier) -> None:
    """Peaks rise with the budget, and times fall, down to their lower bounds."""
    for tighter, looser in itertools.pairwise(curve.rows):
        assert tighter.budget_bytes < looser.budget_bytes
        assert tighter.peak_bytes <= looser.peak_bytes
        assert tighter.recompute_seconds >= looser.recompute_seconds
    assert all(
        p.lower_bound_seconds <= p.recompute_seconds and p.peak_bytes <= p.budget_bytes
        for p in curve.rows
    )


def test_prints_and_plots(curve: fxckpt.Frontier) -> None:
    """A frontier prints one line per point, and plots with units."""
    matplotlib = pytest.importorskip("matplotlib")
    matplotlib.use("Agg")
    assert len(str(curve).splitlines()) == 2 + len(curve.plans)
    axes = curve.plot()
    assert "MiB" in axes.get_xlabel() and "%" in axes.get_ylabel()


def test_each_point_is_a_plan(curve: fxckpt.Frontier) -> None:
    """A point in the middle explains itself, with a price of memory."""
    middle = curve.plans[3]
    text = str(middle.explain())
    assert "least possible extra time" in text and "price of memory" in text
    assert 0 < middle.price < 1
    assert 0 < middle.next_seconds <= middle.recompute_seconds
    assert "the next 100 MiB save at most" in text


def test_takes_a_list_of_budgets() -> None:
    """The points may be budgets of any form; infeasible and invalid ones are refused."""
    model, inputs = GPT2.make()
    curve = fxckpt.frontier(model.train(), *inputs, points=[0.8, "6MiB", None])
    most = curve.plans[0].baseline_peak_bytes
    fraction = int(0.8 * most)
    assert [row.budget_bytes for row in curve.rows] == sorted([fraction, 6 * 2**20, most])
    with pytest.raises(fxckpt.BudgetInfeasible, match="budget='1KiB'"):
        fxckpt.frontier(model, *inputs, points=["1KiB", 0.9])
    with pytest.raises(fxckpt.InvalidBudget):
        fxckpt.frontier(model, *inputs, points=["much"])


def test_points_are_plans_with_offload() -> None:
    """Each point is the plan of its budget with values sent away, and the table tells the bytes."""
    model, x = (
        torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(4))),
        torch.randn(1024, 64),
    )
    model = torch.nn.Sequential(*(torch.nn.Sequential(layer, torch.nn.GELU()) for layer in model))
    host = fxckpt.tiers.Host("1MiB", 1e11)
    alone, found = (
        fxckpt.frontier(model, x, points=[0.9, 0.65], cost="flops", offload=tier)
        for tier in (None, host)
    )
    for row, share in zip(found.rows, (0.65, 0.9), strict=True):
        plan = fxckpt.plan(model, x, budget=share, cost="flops", offload=host)
        assert (row.budget_bytes, row.away_bytes) == (plan.budget_bytes, plan.away_bytes)
        assert row.recompute_seconds == plan.extra_seconds
    assert 0 < found.rows[0].away_bytes <= host.limit_bytes
    assert found.rows[0].recompute_seconds < alone.rows[0].recompute_seconds
    assert [r["away_bytes"] for r in found.table()] == [p.away_bytes for p in found.plans]
    assert " sent" in str(found) and " sent" not in str(alone)
    with pytest.raises(fxckpt.InvalidOption, match="is not a place to send values to"):
        fxckpt.frontier(model, x, offload="much")


@pytest.mark.parametrize("points", [1, 0, "many", []])
def test_refuses_too_few_points(points: object) -> None:
    """A frontier has at least two points."""
    model, inputs = GPT2.make()
    with pytest.raises(fxckpt.InvalidOption, match="at least 2 points"):
        fxckpt.frontier(model, *inputs, points=points)


def test_chosen_plan_joins_the_page(tmp_path: Path) -> None:
    """The page of a frontier shows a chosen plan of the same graph, and refuses another graph."""
    blocks = (torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.GELU()) for _ in range(4))
    model, x = torch.nn.Sequential(*blocks), torch.randn(64, 8)
    found = fxckpt.frontier(model, x, points=3)
    assert found.to_html(tmp_path / "page.html", chosen=fxckpt.plan(model, x, budget=0.83)).exists()
    with pytest.raises(fxckpt.InvalidOption, match="another graph"):
        found.to_html(tmp_path / "page.html", chosen=fxckpt.plan(model, torch.randn(32, 8)))
