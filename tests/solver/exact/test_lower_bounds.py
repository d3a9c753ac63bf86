"""No schedule is faster, or has a lower peak, than its lower bound."""

from __future__ import annotations

import functools
import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fxckpt.solver.exact.lower_bounds import LowerBounds
from fxckpt.solver.exact.milp import optimum
from fxckpt.solver.program import IN_BACKWARD, Op, Program, Side, Storage
from fxckpt.solver.schedule import StageAssignment, emit, save_all
from fxckpt.solver.search.prices import price_range
from fxckpt.solver.simulate import simulate
from tests.solver.oracle import exhaustive
from tests.solver.programs import QUICK_SEARCH, blocks, interpret, programs


@pytest.mark.parametrize("seconds", [1.0, 1e3, 1e6, 1e9])
def test_time_bound_holds_for_any_range(seconds: float) -> None:
    """Rounding of the capacities stays out of the bound beside one op of many ``seconds``."""
    cheap = [Op(f"c{i}", Side.FORWARD, 1e-6, 1, (), (i,)) for i in range(3)]
    ops = (*cheap, Op("expensive", Side.FORWARD, seconds, 1, (), (3,)))
    storages = tuple(Storage(f"v{i}", 4, i) for i in range(4)) + tuple(
        Storage(f"g{i}", 1, IN_BACKWARD) for i in range(4)
    )
    backward = tuple(
        Op(f"b{i}", Side.BACKWARD, 1e-6, 1, (3 - i, *((3 + i,) if i else ())), (4 + i,))
        for i in range(4)
    )
    program = Program(ops, backward, storages, ())
    for limit in range(5, 20):
        best = exhaustive(program, limit)
        found = QUICK_SEARCH(program, functools.partial(lambda limit, baseline: limit, limit))
        if best is not None and found.best is not None:
            assert found.bound.seconds <= best * (1 + 1e-9)


@given(program=programs(max_ops=3))
def test_time_bound_is_below_one_stage_schedules(program: Program) -> None:
    """No schedule of one stage within the limit is faster than the bound."""
    runnable = [i for i, op in enumerate(program.ops) if op.no_recompute is None]
    every = (
        simulate(program, emit(program, StageAssignment((0,), (frozenset(),), (frozenset(runs),))))
        for n in range(len(runnable) + 1)
        for runs in itertools.combinations(runnable, n)
    )
    limit = QUICK_SEARCH(program, lambda baseline: 0).least_peak.simulation.peak_bytes
    bound = QUICK_SEARCH(program, lambda baseline: limit).bound.seconds
    assert all(s.extra_seconds >= bound - 1e-6 for s in every if s.peak_bytes <= limit)


def test_reads_of_an_op_leave_less_room() -> None:
    """While an op reads a value of fifteen bytes, five of twenty are left to hold another."""
    program = Program(
        ops=(
            Op("kept", Side.FORWARD, 7.0, 7, (), (0,)),
            Op("first", Side.FORWARD, 1.0, 1, (), (1,)),
            Op("wide", Side.FORWARD, 1.0, 1, (1,), (2,)),
        ),
        backward=(
            Op("b0", Side.BACKWARD, 1.0, 1, (), (3,)),
            Op("b1", Side.BACKWARD, 1.0, 1, (2,), (4,)),
            Op("b2", Side.BACKWARD, 1.0, 1, (0,), (5,)),
        ),
        storages=(
            Storage("kept", 10, 0),
            Storage("first", 1, 1),
            Storage("wide", 15, 2),
            *(Storage(f"g{j}", 0, IN_BACKWARD) for j in range(3)),
        ),
        tangents=(),
    )
    found = QUICK_SEARCH(program, lambda baseline: 20)
    assert found.best is not None
    assert found.best.simulation.extra_seconds == exhaustive(program, 20)
    bounds = LowerBounds(program, *price_range(program))
    assert bounds.seconds(20).seconds > 3


def test_first_backward_op_bounds_the_time() -> None:
    """While the first op runs, whose result is wide, no more than two narrow values are held."""
    program = blocks(3, crossing=10, inner=80)
    bounds = LowerBounds(program, *price_range(program))
    for limit, least in ((190, 3), (200, 2)):
        assert optimum(program, limit).seconds == pytest.approx(least)
        assert bounds.seconds(limit).seconds == pytest.approx(least, rel=1e-3)


@given(program=programs(max_ops=4), share=st.floats(0, 1))
def test_time_bound_is_below_the_optimum(program: Program, share: float) -> None:
    """No schedule at all is faster than the bound, by a search of all states."""
    bounds = LowerBounds(program, *price_range(program))
    baseline = simulate(program, save_all(program)).peak_bytes
    limit = round(bounds.peak_bytes + share * (baseline - bounds.peak_bytes))
    best = exhaustive(program, limit)
    assert best is None or bounds.seconds(limit).seconds <= best + 1e-6


@given(program=programs())
def test_no_plan_peaks_below_the_bound(program: Program) -> None:
    """The least peak found is at least the bound on any peak."""
    found = QUICK_SEARCH(program, lambda baseline: 0)
    assert found.peak_bound_bytes <= max(
        interpret(program, found.least_peak.schedule).profile, default=0
    )
