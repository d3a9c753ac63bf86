"""Retaining copies spends what a schedule leaves of the budget."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from fxckpt.solver.moves.retain import Retain
from fxckpt.solver.program import Program
from fxckpt.solver.schedule import emit
from fxckpt.solver.simulate import simulate
from tests.solver.programs import assignments, interpret, programs


@given(data=st.data(), program=programs())
def test_saves_time_within_the_limit(data: st.DataObject, program: Program) -> None:
    """Retaining copies never takes more time, nor more bytes than the limit."""
    schedule = emit(program, data.draw(assignments(program)))
    before = simulate(program, schedule)
    limit = before.peak_bytes + data.draw(st.integers(0, 40))
    retained = Retain(limit)(program, schedule, before)
    ran = interpret(program, retained)
    assert max(ran.profile) <= limit
    assert ran.seconds <= before.extra_seconds
