"""Evictions lower the peak of a schedule."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from fxckpt.solver.moves.evict import Evict
from fxckpt.solver.program import Program
from fxckpt.solver.schedule import emit, save_all
from fxckpt.solver.simulate import simulate
from tests.solver.programs import assignments, chain, interpret, programs, two_values


@given(data=st.data(), program=programs(), share=st.floats(0.0, 1.0))
def test_schedules_stay_legal(data: st.DataObject, program: Program, share: float) -> None:
    """Evictions leave a schedule that runs, as simulated, in no less time."""
    schedule = emit(program, data.draw(assignments(program)))
    before = simulate(program, schedule)
    evicted = Evict(int(share * before.peak_bytes))(program, schedule, before)
    ran = interpret(program, evicted)
    assert simulate(program, evicted).peak_bytes == max(ran.profile)
    assert ran.seconds >= before.extra_seconds


def test_evicts_the_cheapest_to_recompute() -> None:
    """Of two saved values of ten bytes, the one of one second goes at a limit of twelve bytes."""
    program = two_values()
    everything = save_all(program)
    evicted = Evict(12)(program, everything, simulate(program, everything))
    assert evicted.runs == (0,)
    assert evicted.before == (1,)
    assert simulate(program, evicted).peak_bytes <= 12


def test_ends_beyond_the_most_extra_time() -> None:
    """Evictions of values of one second each go on to 31 seconds, or end with the eleventh."""
    program = chain(60)
    everything = save_all(program)
    before = simulate(program, everything)
    evicted = Evict(200)(program, everything, before)
    assert simulate(program, evicted).extra_seconds == 31
    evicted = Evict(200, most_seconds=10)(program, everything, before)
    assert simulate(program, evicted).extra_seconds == 11
