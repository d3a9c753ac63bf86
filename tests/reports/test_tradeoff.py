"""Frontiers as points and tables."""

from __future__ import annotations

import json

import pytest

import fxckpt


def test_points_are_the_figures_of_plans(curve: fxckpt.Frontier) -> None:
    """There is a point for each plan, and recompute time never rises with the budget."""
    assert [p.peak_bytes for p in curve.rows] == [plan.peak_bytes for plan in curve.plans]
    seconds = [p.recompute_seconds for p in curve.rows]
    assert seconds == sorted(seconds, reverse=True) and seconds[-1] == 0
    assert all(p.lower_bound_seconds <= p.recompute_seconds for p in curve.rows)
    assert [p.share for p in curve.rows] == pytest.approx(
        [plan.recompute_seconds / plan.step_seconds for plan in curve.plans]
    )


def test_table_has_prices(curve: fxckpt.Frontier) -> None:
    """The table adds the price of memory, and printing shows it."""
    records = curve.table().records()
    assert [r["price"] for r in records] == [plan.price for plan in curve.plans]
    assert json.loads(curve.table().to_json()) == records
    assert str(curve) == str(curve.table()) and "price a MiB" in str(curve)
