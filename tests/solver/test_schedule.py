"""Schedules without stages, and without dead recomputes."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from fxckpt.solver.program import Program
from fxckpt.solver.schedule import save_all, with_runs
from tests.solver.programs import QUICK_SEARCH, interpret, programs


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
