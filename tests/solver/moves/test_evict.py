"""Evictions lower the peak of a schedule."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from fxckpt.reason import Reason
from fxckpt.solver.moves.evict import Evict
from fxckpt.solver.program import IN_BACKWARD, Op, Program, Side, Storage
from fxckpt.solver.schedule import emit, save_all
from fxckpt.solver.simulate import simulate
from tests.solver.programs import assignments, interpret, programs, two_values


@given(data=st.data(), program=programs(), share=st.floats(0.0, 1.0), replaces=st.booleans())
def test_schedules_stay_legal(
    data: st.DataObject, program: Program, share: float, replaces: bool
) -> None:
    """Evictions leave a schedule that runs, as simulated, in no less time."""
    schedule = emit(program, data.draw(assignments(program)))
    before = simulate(program, schedule)
    evict = Evict(int(share * before.peak_bytes), replaces=replaces)
    evicted = evict(program, schedule, before)
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


def test_one_input_takes_the_place_of_two_copies() -> None:
    """Beside an op of twenty bytes ``x`` is held in the place of what is computed from it."""
    program = Program(
        ops=(
            Op("x", Side.FORWARD, 1.0, 1, (), (0,), no_recompute=Reason.EFFECT),
            Op("a", Side.FORWARD, 1.0, 1, (0,), (1,)),
            Op("b", Side.FORWARD, 1.0, 1, (0,), (2,)),
        ),
        backward=(
            Op("wide", Side.BACKWARD, 1.0, 1, (), (3,)),
            Op("da", Side.BACKWARD, 1.0, 1, (1,), (4,)),
            Op("db", Side.BACKWARD, 1.0, 1, (2,), (5,)),
        ),
        storages=(
            *(Storage(name, 4, i) for i, name in enumerate("xab")),
            Storage("wide", 20, IN_BACKWARD),
            *(Storage(name, 0, IN_BACKWARD) for name in ("da", "db")),
        ),
        tangents=(),
    )
    schedule = save_all(program)
    peaks = []
    for replaces in (False, True):
        simulation = simulate(program, schedule)
        schedule = Evict(24, replaces=replaces)(program, schedule, simulation)
        peaks.append(simulate(program, schedule).peak_bytes)
    assert peaks == [28, 24]
    assert schedule.saved == (0,)
