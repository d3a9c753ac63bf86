"""Whatever is planned: legal, inside the budget, as simulated, and the same every time."""

from __future__ import annotations

import functools
import itertools
import os
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fxckpt.solver.evict import Evict
from fxckpt.solver.heuristics import Heuristics
from fxckpt.solver.program import IN_BACKWARD, Op, Program, Side, Storage
from fxckpt.solver.retain import Retain
from fxckpt.solver.schedule import StageAssignment, emit, save_all, with_runs
from fxckpt.solver.search import PriceSearch, evenly_spaced
from fxckpt.solver.simulate import simulate
from fxckpt.solver.staged_cut import StagedCut
from fxckpt.solver.stages import StageBoundaries
from tests.solver.oracle import exhaustive
from tests.solver.programs import interpret, programs

SEARCH = PriceSearch(
    stage_counts=(2, 5),
    small_factors=(1.0, 4.0),
    least_peak_prices=2,
    refined=2,
    perturbations=(0.9,),
    restarts=3,
)


@st.composite
def decisions(draw: st.DrawFn, program: Program) -> StageAssignment:
    """Anything a cut could decide."""
    starts = StageBoundaries(program).stages(draw(st.integers(1, 4)))
    free = [i for i, op in enumerate(program.ops) if op.no_recompute is None]
    values = range(len(program.storages))
    kept = [frozenset(draw(st.sets(st.sampled_from(values)))) for _ in starts]
    runs = [
        frozenset(draw(st.sets(st.sampled_from(free)) if free else st.just(set()))) for _ in starts
    ]
    return StageAssignment(starts, tuple(kept), tuple(runs))


@given(data=st.data(), program=programs())
def test_simulator_agrees_with_the_interpreter(data: st.DataObject, program: Program) -> None:
    schedule = emit(program, data.draw(decisions(program)))
    simulated, ran = simulate(program, schedule), interpret(program, schedule)
    assert list(simulated.profile) == ran.profile
    assert simulated.extra_seconds == ran.seconds


@given(program=programs())
def test_saving_all_takes_no_extra_time(program: Program) -> None:
    assert interpret(program, save_all(program)).seconds == 0


@given(data=st.data(), program=programs())
def test_filling_takes_time_off_and_stays_inside(data: st.DataObject, program: Program) -> None:
    schedule = emit(program, data.draw(decisions(program)))
    before = simulate(program, schedule)
    limit = before.peak_bytes + data.draw(st.integers(0, 40))
    filled = Retain(limit)(program, schedule, before)
    ran = interpret(program, filled)
    assert max(ran.profile) <= limit
    assert ran.seconds <= before.extra_seconds


@given(data=st.data(), program=programs(), share=st.floats(0.0, 1.0))
def test_trimming_makes_legal_schedules(
    data: st.DataObject, program: Program, share: float
) -> None:
    schedule = emit(program, data.draw(decisions(program)))
    before = simulate(program, schedule)
    trimmed = Evict(int(share * before.peak_bytes))(program, schedule, before)
    ran = interpret(program, trimmed)
    assert simulate(program, trimmed).peak_bytes == max(ran.profile)
    assert ran.seconds >= before.extra_seconds


def test_trimming_gives_up_what_is_cheapest_to_make_again() -> None:
    """Two values of ten bytes are saved; at a limit of twelve the one that takes a second is made again, not the one that takes nine."""
    program = Program(
        ops=(
            Op("cheap", Side.FORWARD, 1.0, 1, (), (0,)),
            Op("dear", Side.FORWARD, 9.0, 9, (), (1,)),
        ),
        backward=(
            Op("b0", Side.BACKWARD, 1.0, 1, (1,), (2,)),
            Op("b1", Side.BACKWARD, 1.0, 1, (0,), (3,)),
        ),
        storages=(
            Storage("cheap", 10, 0),
            Storage("dear", 10, 1),
            Storage("g0", 1, IN_BACKWARD),
            Storage("g1", 1, IN_BACKWARD),
        ),
        tangents=(),
    )
    everything = save_all(program)
    trimmed = Evict(12)(program, everything, simulate(program, everything))
    assert trimmed.runs == (0,)
    assert trimmed.before == (1,)
    assert simulate(program, trimmed).peak_bytes <= 12


@pytest.mark.parametrize("dear", [1.0, 1e3, 1e6, 1e9])
def test_bound_holds_whatever_the_range_of_times(dear: float) -> None:
    """An op of ``dear`` seconds beside three of microseconds: rounding of the cut's capacities must not end up in the bound."""
    cheap = [Op(f"c{i}", Side.FORWARD, 1e-6, 1, (), (i,)) for i in range(3)]
    ops = (*cheap, Op("dear", Side.FORWARD, dear, 1, (), (3,)))
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
        found = SEARCH(program, functools.partial(lambda limit, baseline: limit, limit))
        if best is not None and found.best is not None:
            assert found.bound.seconds <= best * (1 + 1e-9)


@given(program=programs(), share=st.floats(0.0, 1.0))
def test_no_run_is_for_nothing(program: Program, share: float) -> None:
    found = SEARCH(program, lambda baseline: int(share * baseline))
    if found.best is not None:
        schedule = found.best.schedule
        assert with_runs(program, schedule.runs, schedule.before) == schedule


@given(program=programs(), share=st.floats(0.0, 1.0))
def test_best_is_inside_the_budget_or_there_is_none(program: Program, share: float) -> None:
    found = SEARCH(program, lambda baseline: int(share * baseline))
    limit = int(share * found.baseline.simulation.peak_bytes)
    if found.best is None:
        assert limit < found.least_peak.simulation.peak_bytes
        return
    ran = interpret(program, found.best.schedule)
    assert max(ran.profile) <= limit
    assert found.bound.seconds <= ran.seconds + 1e-6


@given(program=programs())
def test_never_worse_than_a_reference_plan(program: Program) -> None:
    for schedule in (save_all(program), *Heuristics(program, StageBoundaries(program))()):
        reference = interpret(program, schedule)
        peak = max(reference.profile, default=0)
        found = SEARCH(program, functools.partial(lambda limit, baseline: limit, peak))
        assert found.best is not None
        assert found.best.simulation.extra_seconds <= reference.seconds


@given(program=programs())
def test_the_floor_itself_is_always_feasible(program: Program) -> None:
    floor = SEARCH(program, lambda baseline: 0).least_peak.simulation.peak_bytes
    assert SEARCH(program, lambda baseline: floor).best is not None


@given(program=programs(max_ops=3))
def test_bound_is_below_every_schedule_of_one_stage(program: Program) -> None:
    free = [i for i, op in enumerate(program.ops) if op.no_recompute is None]
    every = (
        simulate(program, emit(program, StageAssignment((0,), (frozenset(),), (frozenset(runs),))))
        for n in range(len(free) + 1)
        for runs in itertools.combinations(free, n)
    )
    limit = SEARCH(program, lambda baseline: 0).least_peak.simulation.peak_bytes
    bound = SEARCH(program, lambda baseline: limit).bound.seconds
    assert all(s.extra_seconds >= bound - 1e-6 for s in every if s.peak_bytes <= limit)


@given(program=programs())
def test_no_plan_peaks_below_the_bound(program: Program) -> None:
    found = SEARCH(program, lambda baseline: 0)
    assert found.peak_bound_bytes <= max(
        interpret(program, found.least_peak.schedule).profile, default=0
    )


@given(program=programs(), points=st.integers(2, 6))
def test_along_a_frontier_time_only_falls(program: Program, points: int) -> None:
    frontier = SEARCH.frontier(program, functools.partial(evenly_spaced, points))
    found = [f.best for f in frontier]
    assert all(f.best.simulation.peak_bytes <= f.limit for f in frontier)
    assert all(
        a.simulation.extra_seconds >= b.simulation.extra_seconds
        for a, b in itertools.pairwise(found)
    )
    assert all(f.bound.seconds <= f.best.simulation.extra_seconds + 1e-6 for f in frontier)


@pytest.mark.parametrize("colors", [1, 4, 100])
@given(program=programs())
def test_any_colouring_makes_legal_schedules(program: Program, colors: int) -> None:
    cut = StagedCut(colors=colors)
    layout = cut.lay_out(program, StageBoundaries(program).stages(5))
    for prices, decided in zip(
        choices := [[p] * (len(layout.starts) + 1) for p in (0.1, 1.0, 10.0)],
        cut(layout, choices),
        strict=True,
    ):
        assert decided == cut(layout, [prices])[0]
        for decisions in decided:
            interpret(program, emit(program, decisions))


def test_same_plan_in_any_process() -> None:
    program = (
        "import torch, fxckpt\n"
        "m = torch.nn.Sequential(*(torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.GELU(), torch.nn.Dropout(), "
        "torch.nn.Linear(64, 16)) for _ in range(4)))\n"
        "p = fxckpt.plan(m, torch.ones(64, 16), budget=0.6)\n"
        "print(p.saved, p.schedule, p.peak_bytes)\n"
    )
    seen = {
        subprocess.run(
            [sys.executable, "-c", program],
            check=True,
            capture_output=True,
            env={**os.environ, "PYTHONHASHSEED": seed},
            timeout=120,
        ).stdout
        for seed in ("1", "2")
    }
    assert len(seen) == 1
