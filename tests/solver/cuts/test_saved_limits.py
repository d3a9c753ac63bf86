"""Limits on saved values: kept by every plan, near the exhaustive search, bounded from below."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from fxckpt.errors import BudgetInfeasible
from fxckpt.solver.cuts.saved_limits import binding, exceeded, least_bytes, least_bytes_together
from fxckpt.solver.program import IN_BACKWARD, Program, SavedLimit
from fxckpt.solver.search.price_search import PriceSearch
from tests.solver.oracle import exhaustive
from tests.solver.programs import QUICK_SEARCH, interpret, programs, two_values


def countable(program: Program) -> list[int]:
    """Return the storages that may count for a limit."""
    return [
        s
        for s, storage in enumerate(program.storages)
        if storage.producer != IN_BACKWARD and not storage.is_output
    ]


def limited(program: Program, *limits: tuple[list[int], int]) -> Program:
    """Return a program with limits."""
    made = [SavedLimit(f"r{i}", tuple(s), b) for i, (s, b) in enumerate(limits)]
    return replace(program, limits=tuple(made))


@st.composite
def limited_programs(draw: st.DrawFn, max_ops: int = 5) -> Program:
    """Draw a program with one to three limits, some nested, from the least to everything."""
    program = draw(programs(max_ops))
    values = countable(program)
    assume(values)
    groups = [sorted(draw(st.sets(st.sampled_from(values), min_size=1))) for _ in range(2)]
    groups = groups[: draw(st.integers(1, 2))]
    if draw(st.booleans()):
        groups.append(groups[0][: max(1, len(groups[0]) // 2)])
    least = least_bytes_together(program, groups)
    return limited(
        program,
        *((g, n + draw(st.integers(0, 20))) for g, n in zip(groups, least, strict=True)),
    )


@given(limited_programs())
def test_limits_hold_at_the_optimum(program: Program) -> None:
    """Without a peak budget the small program's plan is the optimum, and its bound is below it."""
    found = PriceSearch()(program, lambda peak: None)
    assert found.best is not None
    assert not exceeded(program, found.best.schedule.saved)
    whole = sum(s.bytes for s in program.storages) * 10 + 10**6
    optimum = exhaustive(program, whole)
    assert optimum == pytest.approx(found.best.simulation.extra_seconds)
    assert found.bound.seconds <= optimum + 1e-6
    assert interpret(program, found.best.schedule).seconds == pytest.approx(optimum)


@given(limited_programs(), st.sampled_from([0.5, 0.8, 1.0]))
def test_limits_and_peak_hold_together(program: Program, share: float) -> None:
    """A plan keeps both; the bound never exceeds the optimum, nor the optimum the plan."""
    found = QUICK_SEARCH(program, lambda peak: int(share * peak))
    assert found.limit is not None
    optimum = exhaustive(program, found.limit)
    if found.best is None:
        return
    assert optimum is not None
    assert not exceeded(program, found.best.schedule.saved)
    assert found.best.simulation.peak_bytes <= found.limit
    assert found.bound.seconds <= optimum + 1e-6
    assert optimum <= found.best.simulation.extra_seconds + 1e-6


@given(programs(5))
def test_least_bytes_is_reached_and_no_less(program: Program) -> None:
    """A limit of exactly the least is feasible, and one byte less is not."""
    values = countable(program)
    assume(values)
    least = least_bytes(program, values)
    found = PriceSearch()(limited(program, (values, least)), lambda peak: None)
    assert found.best is not None
    if least:
        with pytest.raises(BudgetInfeasible, match=r"r0 allows"):
            PriceSearch()(limited(program, (values, least - 1)), lambda peak: None)


def test_limit_recomputes_the_cheap_value() -> None:
    """Of two equal values the cheap one is recomputed; a limit on the other binds on it alone."""
    program = two_values()
    both = PriceSearch()(limited(program, ([0, 1], 10)), lambda peak: None)
    assert both.best is not None and both.best.schedule.saved == (1,)
    assert both.best.simulation.extra_seconds == 1.0
    assert binding(limited(program, ([0, 1], 10)), both.best.schedule, 0.0) == (True,)
    dear = PriceSearch()(limited(program, ([1], 0), ([0], 10)), lambda peak: None)
    assert dear.best is not None and dear.best.schedule.saved == (0,)
    assert dear.best.simulation.extra_seconds == 9.0
    limits = limited(program, ([1], 0), ([0], 10))
    assert binding(limits, dear.best.schedule, 0.0) == (True, False)


def test_nested_limits_count_inner_values_outside() -> None:
    """The outer limit counts the inner region's values too."""
    program = two_values()
    found = PriceSearch()(limited(program, ([0, 1], 0), ([1], 10)), lambda peak: None)
    assert found.best is not None and found.best.schedule.saved == ()
    for limits, expected in (
        ([([0, 1], 0), ([1], 10)], (True, False)),
        ([([0, 1], 10), ([0, 1], 0)], (False, True)),
        ([([0, 1], 10), ([1], 0), ([0], 0)], (False, True, True)),
        ([([0, 1], 0), ([1], 0)], (True, False)),
    ):
        assert binding(limited(program, *limits), found.best.schedule, 0.0) == expected


def test_frontier_keeps_the_limits() -> None:
    """Every plan of a frontier keeps them."""
    program = limited(two_values(), ([0, 1], 10))
    found = PriceSearch().frontier(
        program, lambda low, high: [low.simulation.peak_bytes, high.simulation.peak_bytes]
    )
    for each in found:
        assert each.best is not None and not exceeded(program, each.best.schedule.saved)
