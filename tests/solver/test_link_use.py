"""Waits for copies are those of a clock that goes from op to op."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from fxckpt.solver.link_use import Movable
from fxckpt.solver.program import Link, Program
from fxckpt.solver.schedule import Away, Schedule, emit
from fxckpt.solver.simulate import simulate
from tests.solver.programs import assignments, chain, interpret, programs


def with_link(program: Program, out: float, back: float, limit: int = 10**9) -> Program:
    """The program with a link that any forward value but an output may take."""
    storages = frozenset(
        i
        for i, s in enumerate(program.storages)
        if s.producer >= 0 and not s.is_output and s.bytes and s.is_savable
    )
    return replace(program, link=Link(out, back, limit, storages))


def clock(program: Program, schedule: Schedule) -> float:
    """The seconds that a step waits, by the times at which its ops and copies begin."""
    assert program.link is not None
    movable = Movable.of(program, schedule)
    where = {int(s): i for i, s in enumerate(movable.storage)}
    windows = {where[a.storage]: a for a in schedule.away}
    sent, back = sorted(windows), sorted(windows, key=lambda i: (windows[i].last, movable.read[i]))
    out_end: dict[int, float] = {}
    in_end: dict[int, float] = {}
    now = 0.0
    for position, seconds in enumerate(movable.seconds.tolist()):
        for i in sent:
            if windows[i].first == position:
                now = max(now, out_end[i])
        for i in back:
            if windows[i].last + 1 == position:
                begin = max([now, *in_end.values()])
                in_end[i] = begin + int(movable.bytes[i]) / program.link.in_bytes_per_second
        for i in back:
            if movable.read[i] == position:
                now = max(now, in_end[i])
        now += seconds
        for i in sent:
            if movable.made[i] == position:
                begin = max([now, *out_end.values()])
                out_end[i] = begin + int(movable.bytes[i]) / program.link.out_bytes_per_second
    return now - float(movable.seconds.sum())


@st.composite
def windows(draw: st.DrawFn, program: Program, schedule: Schedule) -> Schedule:
    """Draw the ops at which some saved values are away."""
    movable = Movable.of(program, schedule)
    away = []
    for i, storage in enumerate(movable.storage.tolist()):
        end, read = movable.forward_ops, int(movable.read[i])
        first = draw(st.integers(int(movable.used[i]) + 1, end))
        last = draw(st.integers(end - 1, read - 1))
        if first <= last and draw(st.booleans()):
            away.append(Away(storage, first, last))
    return replace(schedule, away=tuple(sorted(away)))


@given(data=st.data(), program=programs())
def test_waits_are_those_of_a_clock(data: st.DataObject, program: Program) -> None:
    """Bytes away leave the profile, and the waits are added to the recomputes."""
    program = with_link(program, data.draw(st.integers(1, 9)), data.draw(st.integers(1, 9)))
    schedule = emit(program, data.draw(assignments(program)))
    sent = data.draw(windows(program, schedule))
    simulated, ran = simulate(program, sent), interpret(program, schedule)
    for storage, first, last in sent.away:
        for position in range(first, last + 1):
            ran.profile[position] -= program.storages[storage].bytes
    assert list(simulated.profile) == ran.profile
    if sent.away:
        assert abs(simulated.stall_seconds - clock(program, sent)) < 1e-9
        assert abs(simulated.extra_seconds - ran.seconds - simulated.stall_seconds) < 1e-9


def test_a_late_copy_is_waited_for() -> None:
    """A copy of ten bytes at one byte a second ends nine seconds after the next op's end."""
    program = with_link(chain(3), 1.0, 10.0)
    schedule = Schedule((0, 1, 2), (), (), (Away(0, 2, 3),))
    simulation = simulate(program, schedule)
    assert simulation.stall_seconds == 9.0
    assert simulation.away_bytes == 10
    assert simulation.profile == (10, 20, 20, 30, 40, 30)


def test_one_way_copies_one_after_another() -> None:
    """Values made at 1 and 2 take two seconds each; the second is sent at 5, the forward ends at 3.

    Both are fetched at once, and the one that is read first comes first.
    """
    program = with_link(chain(3), 5.0, 20.0)
    schedule = Schedule((0, 1, 2), (), (), (Away(0, 3, 3), Away(1, 3, 3)))
    assert simulate(program, schedule).stall_seconds == 2.5
