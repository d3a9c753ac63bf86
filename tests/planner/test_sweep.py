"""The curve of time against peak."""

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
    model, inputs = GPT2.make()
    return fxckpt.frontier(model.train(), *inputs, points=6)


def test_from_the_floor_to_the_uncheckpointed_peak(curve: fxckpt.Frontier) -> None:
    first, last = curve.rows[0], curve.rows[-1]
    assert len(curve.plans) == 6
    assert first.peak_bytes == curve.plans[0].floor_bytes
    assert last.recompute_seconds == 0
    assert last.budget_bytes == curve.plans[0].baseline_peak_bytes


def test_more_memory_never_takes_more_time(curve: fxckpt.Frontier) -> None:
    for tighter, looser in itertools.pairwise(curve.rows):
        assert tighter.budget_bytes < looser.budget_bytes
        assert tighter.peak_bytes <= looser.peak_bytes
        assert tighter.recompute_seconds >= looser.recompute_seconds
    assert all(
        p.lower_bound_seconds <= p.recompute_seconds and p.peak_bytes <= p.budget_bytes
        for p in curve.rows
    )


def test_prints_one_line_a_point_and_plots(curve: fxckpt.Frontier) -> None:
    matplotlib = pytest.importorskip("matplotlib")
    matplotlib.use("Agg")
    assert len(str(curve).splitlines()) == 2 + len(curve.plans)
    axes = curve.plot()
    assert "MiB" in axes.get_xlabel() and "%" in axes.get_ylabel()


def test_each_point_is_a_plan_the_backend_could_follow(curve: fxckpt.Frontier) -> None:
    middle = curve.plans[3]
    text = str(middle.explain())
    assert "least possible extra time" in text and "price of memory" in text
    assert 0 < middle.price < 1
    assert 0 < middle.next_seconds <= middle.recompute_seconds
    assert "the next 100 MiB save at most" in text


def test_at_budgets_of_ones_own() -> None:
    model, inputs = GPT2.make()
    curve = fxckpt.frontier(model.train(), *inputs, points=[0.8, "6MiB", None])
    fraction, most = (
        int(0.8 * curve.plans[0].baseline_peak_bytes),
        curve.plans[0].baseline_peak_bytes,
    )
    assert [row.budget_bytes for row in curve.rows] == sorted([fraction, 6 * 2**20, most])
    with pytest.raises(fxckpt.BudgetInfeasible, match="budget='1KiB'"):
        fxckpt.frontier(model, *inputs, points=["1KiB", 0.9])
    with pytest.raises(fxckpt.InvalidBudget):
        fxckpt.frontier(model, *inputs, points=["much"])


@pytest.mark.parametrize("points", [1, 0, "many", []])
def test_too_few_points(points: object) -> None:
    model, inputs = GPT2.make()
    with pytest.raises(fxckpt.InvalidOption, match="at least 2 points"):
        fxckpt.frontier(model, *inputs, points=points)


def test_a_chosen_plan_joins_the_page_of_a_frontier(tmp_path: Path) -> None:
    model, x = (
        torch.nn.Sequential(
            *(torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.GELU()) for _ in range(4))
        ),
        torch.randn(64, 8),
    )
    found = fxckpt.frontier(model, x, points=3)
    assert found.to_html(tmp_path / "page.html", chosen=fxckpt.plan(model, x, budget=0.83)).exists()
    with pytest.raises(fxckpt.InvalidOption, match="another graph"):
        found.to_html(tmp_path / "page.html", chosen=fxckpt.plan(model, torch.randn(32, 8)))
