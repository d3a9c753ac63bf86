"""Levels for the calls of a step, against exhaustive search."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

from hypothesis import given
from hypothesis import strategies as st

from fxckpt.solver.levels import Level
from fxckpt.solver.step_choice import (
    Moment,
    StepProgram,
    bound_seconds,
    choice_of,
    choose,
    choose_few,
    fastest_choice,
    least_peak,
)

LEVELS = st.lists(
    st.builds(
        Level,
        st.integers(0, 100),
        st.integers(0, 150),
        st.integers(0, 200),
        st.integers(0, 20).map(float),
        st.integers(0, 30),
    ),
    min_size=1,
    max_size=4,
).map(tuple)


@st.composite
def steps(draw: st.DrawFn) -> StepProgram:
    """Return forwards of a few calls, then their backwards in some order."""
    calls = draw(st.lists(LEVELS, min_size=1, max_size=4))
    numbers = range(len(calls))
    outside = st.integers(0, 50)
    moments = [Moment(draw(outside), tuple(numbers[:i]), i) for i in numbers]
    moments.append(Moment(draw(outside), tuple(numbers)))
    left = list(numbers)
    for i in draw(st.permutations(numbers)):
        left.remove(i)
        moments.append(Moment(draw(outside), tuple(left), i, True))
    return StepProgram(tuple(calls), tuple(moments))


def every_choice(step: StepProgram) -> list[tuple[int, float]]:
    """Return the peak and the seconds of every choice, counted moment by moment."""
    found = []
    for levels in product(*step.calls):
        peak = 0
        for moment in step.moments:
            nbytes = moment.outside_bytes + sum(levels[i].held_bytes for i in moment.held)
            if moment.running is not None:
                running = levels[moment.running]
                nbytes += running.backward_bytes if moment.is_backward else running.forward_bytes
            peak = max(peak, nbytes)
        found.append((peak, sum(level.extra_seconds for level in levels)))
    return found


@given(steps(), st.floats(0, 1))
def test_choice_is_the_fastest_that_fits(step: StepProgram, share: float) -> None:
    every = every_choice(step)
    low, high = min(every)[0], max(every)[0]
    limit = int(low + share * (high - low))
    best = min(seconds for peak, seconds in every if peak <= limit)
    choice = choose(step, limit)
    assert choice.peak_bytes <= limit
    assert (choice.peak_bytes, choice.extra_seconds) in every
    assert choice.extra_seconds <= 1.003 * best
    assert bound_seconds(step, limit) <= best + 1e-6


@given(steps())
def test_least_peak_is_near_the_least(step: StepProgram) -> None:
    least = min(every_choice(step))[0]
    assert choose(step, least).peak_bytes == least or least_peak(step).peak_bytes <= 1.1 * least


def test_nothing_fits_gives_the_floor() -> None:
    step = StepProgram(((Level(5, 10, 20, 0.0), Level(0, 10, 15, 1.0)),), (Moment(1, (), 0, True),))
    assert choose(step, 3).peak_bytes == 16


def test_equal_calls_share_few_levels() -> None:
    levels = tuple(Level(100 - 10 * i, 120, 130, 0.1 * i * i) for i in range(10))
    calls = range(8)
    moments = [
        *(Moment(0, tuple(calls[:i]), i) for i in calls),
        *(Moment(0, tuple(calls[:i]), i, True) for i in reversed(calls)),
    ]
    step = StepProgram((levels,) * 8, tuple(moments))
    few = choose_few(step, 600, [0] * 8, most=2)
    assert few.peak_bytes <= 600 and len(set(few.levels)) <= 2
    assert few == choice_of(step, few.levels)
    assert few.extra_seconds <= 1.25 * choose(step, 600).extra_seconds


def test_first_calls_send_what_there_is_room_for() -> None:
    """Two calls at most fit the tier: the first two, whose values come back last."""
    levels = (Level(10, 10, 10, 0.0), Level(2, 10, 10, 1.0, 8), Level(0, 10, 10, 5.0))
    numbers = range(4)
    moments = [Moment(0, tuple(numbers[:i]), i) for i in numbers]
    moments += [Moment(0, tuple(numbers[:i]), i, True) for i in reversed(numbers)]
    step = StepProgram((levels,) * 4, tuple(moments))
    assert choose(step, 20).levels == (1, 1, 1, 0)
    assert choose(replace(step, away_limit=16), 20).levels == (1, 1, 2, 0)
    assert choose(replace(step, away_limit=7), 20).extra_seconds == 10


def test_few_levels_fit_the_tier() -> None:
    """Fewer levels are no reason to send more away than there is room for."""
    levels = (Level(10, 10, 10, 0.0), Level(2, 10, 10, 1.0, 8), Level(0, 10, 10, 5.0))
    numbers = range(4)
    moments = [Moment(0, tuple(numbers[:i]), i) for i in numbers]
    moments += [Moment(0, tuple(numbers[:i]), i, True) for i in reversed(numbers)]
    step = StepProgram((levels,) * 4, tuple(moments))
    assert choose_few(step, 20, [0] * 4, most=1, spare=1.0).levels == (1, 1, 1, 1)
    step = replace(step, away_limit=16)
    assert choose_few(step, 20, [0] * 4, most=1, spare=1.0) == choose(step, 20)


def test_what_is_free_is_not_sent() -> None:
    """Of levels that take equal time, the one that sends less is taken where there is room."""
    levels = (Level(2, 10, 10, 0.0, 8), Level(10, 10, 10, 0.0))
    moments = (Moment(0, (), 0), Moment(0, (0,)), Moment(0, (), 0, True))
    step = StepProgram((levels,), moments)
    assert fastest_choice(step).levels == choose(step, 10).levels == (1,)
    assert choose(step, 9).levels == least_peak(step).levels == (0,)


@given(step=steps(), away_limit=st.integers(0, 100), limit=st.integers(0, 400))
def test_choice_sends_no_more_than_fits(step: StepProgram, away_limit: int, limit: int) -> None:
    """What is away fits where some choice does, and a peak within the limit is a true one."""
    step = replace(step, away_limit=away_limit)
    found = choose(step, limit)
    fewest = [min(range(len(c)), key=lambda i: c[i].away_bytes) for c in step.calls]
    assert step.has_room(found.levels) or not step.has_room(fewest)
    assert found == choice_of(step, found.levels)
