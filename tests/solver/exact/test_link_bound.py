"""No plan that sends values away beats the bound with a link."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from fxckpt.solver.link_use import Movable
from fxckpt.solver.program import Program
from fxckpt.solver.schedule import Away, Schedule, StageAssignment, emit, save_all
from fxckpt.solver.simulate import simulate
from tests.solver.programs import QUICK_SEARCH, programs
from tests.solver.test_link_use import with_link


def one_stage(program: Program) -> Iterator[Schedule]:
    """Every schedule of one stage."""
    runnable = [i for i, op in enumerate(program.ops) if op.no_recompute is None]
    for n in range(len(runnable) + 1):
        for runs in itertools.combinations(runnable, n):
            yield emit(program, StageAssignment((0,), (frozenset(),), (frozenset(runs),)))


def every_way(program: Program, schedule: Schedule, most: int = 2) -> Iterator[Schedule]:
    """A schedule with every choice of ops at which up to ``most`` values are away."""
    movable = Movable.of(program, schedule)
    end = movable.forward_ops
    ways = [
        [
            Away(int(movable.storage[i]), first, last)
            for first in range(int(movable.used[i]) + 1, end + 1)
            for last in range(end - 1, int(movable.read[i]))
            if first <= last
        ]
        for i in range(len(movable.storage))
    ]
    for n in range(most + 1):
        for some in itertools.combinations(ways, n):
            for away in itertools.product(*some):
                if sum(program.storages[a.storage].bytes for a in away) <= (
                    movable.link.limit_bytes
                ):
                    yield replace(schedule, away=tuple(sorted(away)))


@given(data=st.data(), program=programs(max_ops=3))
def test_no_plan_beats_the_bound(data: st.DataObject, program: Program) -> None:
    """Of all schedules of one stage, with up to two values away at any ops, none is faster."""
    limit_away = data.draw(st.sampled_from([5, 20, 1000]))
    rates = [data.draw(st.sampled_from([0.5, 2.0, 8.0, 64.0])) for _ in range(2)]
    program = with_link(program, rates[0], rates[1], limit_away)
    floor = QUICK_SEARCH(program, lambda peak: 0).least_peak.simulation.peak_bytes
    peak = simulate(program, save_all(program)).peak_bytes
    limit = data.draw(st.integers(min(floor, peak), max(floor, peak)))
    found = QUICK_SEARCH(program, lambda peak: limit)
    assert found.best is not None and found.best.simulation.peak_bytes <= limit
    for schedule in one_stage(program):
        for sent in every_way(program, schedule):
            simulation = simulate(program, sent)
            if simulation.peak_bytes <= limit:
                assert simulation.extra_seconds >= found.bound.seconds - 1e-6
