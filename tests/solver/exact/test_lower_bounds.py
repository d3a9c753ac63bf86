"""No schedule is faster, or has a lower peak, than its lower bound."""

from __future__ import annotations

import functools
import itertools

import pytest
from hypothesis import given

from fxckpt.solver.program import IN_BACKWARD, Op, Program, Side, Storage
from fxckpt.solver.schedule import StageAssignment, emit
from fxckpt.solver.simulate import simulate
from tests.solver.oracle import exhaustive
from tests.solver.programs import QUICK_SEARCH, interpret, programs


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


@given(program=programs())
def test_no_plan_peaks_below_the_bound(program: Program) -> None:
    """The least peak found is at least the bound on any peak."""
    found = QUICK_SEARCH(program, lambda baseline: 0)
    assert found.peak_bound_bytes <= max(
        interpret(program, found.least_peak.schedule).profile, default=0
    )
