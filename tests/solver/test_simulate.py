"""The simulator agrees with an interpreter that shares no code with it."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from fxckpt.solver.program import Program
from fxckpt.solver.schedule import emit
from fxckpt.solver.simulate import simulate
from tests.solver.programs import assignments, interpret, programs


@given(data=st.data(), program=programs())
def test_agrees_with_the_interpreter(data: st.DataObject, program: Program) -> None:
    """The profile and the extra time are those of the interpreter."""
    schedule = emit(program, data.draw(assignments(program)))
    simulated, ran = simulate(program, schedule), interpret(program, schedule)
    assert list(simulated.profile) == ran.profile
    assert simulated.extra_seconds == ran.seconds
