"""Bounds from windows are below every plan for any shares, and above those of one moment."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fxckpt.solver.exact.lower_bounds import END_OF_FORWARD, LowerBounds
from fxckpt.solver.exact.milp import optimum
from fxckpt.solver.exact.path_bounds import PathBounds, Shares, Windows
from fxckpt.solver.program import Program
from fxckpt.solver.schedule import save_all
from fxckpt.solver.search.price_search import PriceSearch
from fxckpt.solver.search.prices import price_range
from fxckpt.solver.simulate import simulate
from tests.solver.oracle import exhaustive
from tests.solver.programs import chain, programs


def _bounds(program: Program) -> LowerBounds:
    return LowerBounds(program, *price_range(program))


def _limit(program: Program, share: float) -> int:
    low, high = _bounds(program).peak_bytes, simulate(program, save_all(program)).peak_bytes
    return round(low + share * (high - low))


@given(program=programs(max_ops=4), share=st.floats(0, 1), rounds=st.integers(1, 20))
def test_bound_is_below_the_optimum(program: Program, share: float, rounds: int) -> None:
    """No schedule is faster than the bound, by a search of all states."""
    limit, bounds = _limit(program, share), _bounds(program)
    found = PathBounds(bounds, rounds, moments=4).seconds(limit)
    best = exhaustive(program, limit)
    assert found.seconds >= bounds.seconds(limit).seconds
    assert best is None or found.seconds <= best + 1e-6


@given(program=programs(max_ops=4), share=st.floats(0, 1), seed=st.integers(0, 2**16))
def test_any_shares_and_prices_give_bounds(program: Program, share: float, seed: int) -> None:
    """Shares and prices drawn at random are no more than the optimum either."""
    limit, bounds, random = _limit(program, share), _bounds(program), np.random.default_rng(seed)
    moments = (END_OF_FORWARD, *range(min(len(program.backward), 3)))
    windows = Windows(program, moments)
    rooms = np.asarray([bounds.room(limit, p) for p in moments], dtype=np.float64)
    size = len(windows.begin)
    op_shares = random.random((len(program.ops), size)) ** 3
    over = np.stack(
        [
            op_shares[:, (windows.begin <= k) & (k <= windows.end)].sum(axis=1)
            for k in range(len(moments))
        ]
    )
    op_shares /= over.max(axis=0)[:, np.newaxis]
    value_shares = random.random((len(program.storages), size))
    for k in range(len(moments)):
        ours = windows.begin == k
        value_shares[:, ours] /= value_shares[:, ours].sum(axis=1, keepdims=True)
    prices = random.random(len(moments))
    seconds, held = windows.least(op_shares, value_shares, prices)
    best = exhaustive(program, limit)
    assert best is None or (seconds + prices * (held - rooms)).sum() <= best + 1e-6


@given(program=programs(max_ops=6), share=st.floats(0, 1))
def test_shares_sum_up_to_one_at_most(program: Program, share: float) -> None:
    """Windows over an interval have at most the whole of an op, those of a moment of a value."""
    bounds = _bounds(program)
    limit = _limit(program, share)
    windows = PathBounds(bounds, 5, moments=5).windows
    rooms = np.asarray([bounds.room(limit, p) for p in windows.moments], dtype=np.float64)
    op_shares, value_shares = Shares(windows, rooms)(5)
    for k in range(len(windows.moments)):
        over = (windows.begin <= k) & (k <= windows.end)
        assert (op_shares[:, over].sum(axis=1) <= 1 + 1e-9).all()
        assert value_shares[:, windows.begin == k].sum(axis=1) == pytest.approx(1)


def test_low_peaks_recompute_more_than_once() -> None:
    """A chain in three values' memory is recomputed for every value: one moment sees a part."""
    program, limit = chain(12), 30
    bounds = _bounds(program)
    once = bounds.seconds(limit).seconds
    best = optimum(program, limit).seconds
    found = PathBounds(bounds, 100, moments=12).seconds(limit).seconds
    assert once == pytest.approx(10)
    assert found == pytest.approx(best) == pytest.approx(55)


def test_no_rounds_leave_the_bound_alone() -> None:
    """Without a round of the search the bound is that of single moments."""
    program, limit = chain(12), 30
    bounds = _bounds(program)
    assert PathBounds(bounds, 0).seconds(limit) == bounds.seconds(limit)


def test_search_gives_tighter_bounds_on_request() -> None:
    """With rounds the result has the bound from windows; the plan is the same."""
    program, limit = chain(12), 40
    plain = PriceSearch()(program, lambda baseline: limit)
    tight = PriceSearch(path_rounds=100)(program, lambda baseline: limit)
    assert plain.best is not None and tight.best is not None
    assert tight.best.schedule == plain.best.schedule
    assert plain.bound.seconds < tight.bound.seconds <= tight.best.simulation.extra_seconds
