"""The memory profile as text."""

from __future__ import annotations

from dataclasses import replace

import fxckpt
from fxckpt.budgets import format_bytes
from fxckpt.reports.memory_bar import memory_bar


def test_bar_has_axis_budget_and_peak(plan: fxckpt.Plan) -> None:
    """The bar has one line a level, a budget line and the end of the forward on its axis."""
    plan = replace(plan, budget_bytes=plan.peak_bytes)
    *levels, axis, caption = memory_bar(plan, width=40, height=4).splitlines()
    assert len(levels) == 4 and levels[0].strip().startswith(format_bytes(plan.peak_bytes))
    assert [line.endswith("- budget") for line in levels] == [True, False, False, False]
    split = plan.forward_ops * 40 // len(plan.profile)
    assert axis.index("^") == axis.index("+") + 1 + split
    assert f"backward ({len(plan.profile)} ops)" in caption


def test_bar_shows_the_peak_of_each_column(plan: fxckpt.Plan) -> None:
    """The columns are the maxima of their ops, in eighths of a cell."""
    short = replace(plan, profile=(0, 8, 4, 2), forward_ops=2, peak_bytes=8, budget_bytes=None)
    lines = memory_bar(short, width=2, height=2).splitlines()
    assert [line.partition("|")[2] for line in lines[:2]] == ["█ ", "██"]


def test_bar_without_profile(plan: fxckpt.Plan) -> None:
    """A plan without a profile has no bar."""
    assert memory_bar(replace(plan, profile=())) == "(no memory profile)"
