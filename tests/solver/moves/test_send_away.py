"""Values of a schedule are sent away so that it fits."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from fxckpt.solver.moves.send_away import fetch_early, reachable_peak, send_away
from fxckpt.solver.program import Program
from fxckpt.solver.schedule import emit, save_all
from fxckpt.solver.simulate import simulate
from tests.solver.programs import assignments, chain, programs
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


@given(data=st.data(), program=programs())
def test_early_fetches_cost_nothing(data: st.DataObject, program: Program) -> None:
    """Fetches begin no later, with the same peak and no more of a wait."""
    program = with_link(program, data.draw(st.integers(1, 9)), data.draw(st.integers(1, 9)))
    schedule = emit(program, data.draw(assignments(program)))
    live = simulate(program, schedule).live
    limit = reachable_peak(program, schedule, live) + data.draw(st.integers(0, 40))
    sent = send_away(program, schedule, live, limit)
    assert sent is not None
    before = simulate(program, sent)
    early = fetch_early(program, sent, live, before.peak_bytes)
    after = simulate(program, early)
    assert after.peak_bytes <= before.peak_bytes
    assert after.stall_seconds <= before.stall_seconds + 1e-9
    for one, other in zip(sent.away, early.away, strict=True):
        assert one[:2] == other[:2] and other.first <= other.last <= one.last


def test_fetches_begin_where_memory_allows() -> None:
    """The values of a chain come back one after another as the backward frees others."""
    program = with_link(chain(6), 1e9, 1e9)
    live = simulate(program, save_all(program)).live
    sent = send_away(program, save_all(program), live, 50)
    assert sent is not None
    early = fetch_early(program, sent, live, 50)
    assert [each.last for each in sent.away] == [9, 8]
    assert [each.last for each in early.away] == [8, 7]
