"""Values of a schedule are sent away so that it fits."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from fxckpt.solver.moves.send_away import reachable_peak, send_away
from fxckpt.solver.program import Program
from fxckpt.solver.schedule import emit
from fxckpt.solver.simulate import simulate
from tests.solver.programs import assignments, programs
from tests.solver.test_link_use import with_link


@given(data=st.data(), program=programs())
def test_the_schedule_fits_the_limit(data: st.DataObject, program: Program) -> None:
    """Within the least peak of its values, or a higher one, the simulated peak is below it."""
    program = with_link(program, data.draw(st.integers(1, 9)), data.draw(st.integers(1, 9)))
    schedule = emit(program, data.draw(assignments(program)))
    live = simulate(program, schedule).live
    floor = reachable_peak(program, schedule, live)
    limit = floor + data.draw(st.integers(0, 40))
    sent = send_away(program, schedule, live, limit)
    assert sent is not None
    simulation = simulate(program, sent)
    assert simulation.peak_bytes <= limit
    assert all(away.first <= away.last for away in sent.away)
    assert send_away(program, schedule, live, floor - 1) is None
