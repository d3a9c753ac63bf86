"""Schedules without stages, and without dead recomputes."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from fxckpt.solver.program import Program
from fxckpt.solver.schedule import Schedule, emit, save_all, with_runs
from tests.solver.programs import QUICK_SEARCH, assignments, interpret, programs


@given(program=programs())
def test_save_all_takes_no_extra_time(program: Program) -> None:
    """The uncheckpointed schedule recomputes nothing."""
    assert interpret(program, save_all(program)).seconds == 0


@given(program=programs(), share=st.floats(0.0, 1.0))
def test_no_recompute_is_dead(program: Program, share: float) -> None:
    """Every recompute of a plan has a reader."""
    found = QUICK_SEARCH(program, lambda baseline: int(share * baseline))
    if found.best is not None:
        schedule = found.best.schedule
        assert with_runs(program, schedule.runs, schedule.before) == schedule


@given(data=st.data())
def test_backward_reads_saved_or_recomputed_values(data: st.DataObject) -> None:
    """A forward output is saved where it is read, also if its op runs again for another result."""
    program = data.draw(programs())
    schedule = emit(program, data.draw(assignments(program)))
    _assert_reads_are_there(program, schedule)
    _assert_reads_are_there(program, with_runs(program, schedule.runs, schedule.before))


def _assert_reads_are_there(program: Program, schedule: Schedule) -> None:
    """Assert that all reads of forward values are of saved or recomputed ones."""
    outputs = {s for s, storage in enumerate(program.storages) if storage.is_output}
    there = set(schedule.saved)
    runs = list(zip(schedule.before, schedule.runs, strict=True))
    for j, reads in enumerate(program.forward_reads):
        for _, o in (run for run in runs if run[0] == j):
            assert there.issuperset(program.ops[o].needs)
            there |= set(program.ops[o].writes) - outputs
        assert there.issuperset(reads)
