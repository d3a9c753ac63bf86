"""Live intervals: last uses, and bytes added up."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from fxckpt.utils.intervals import last_uses, live_bytes

INTERVALS = st.lists(st.tuples(st.integers(-3, 9), st.integers(-3, 9), st.integers(0, 99)))


def test_the_last_use_counts() -> None:
    """A value used twice has the later position; an unused one has none."""
    assert last_uses([[], ["a", "b"], ["a"], []]) == {"a": 2, "b": 1}
    assert last_uses([]) == {}


def test_both_ends_are_live() -> None:
    """An interval is live at its first and at its last position."""
    assert live_bytes([(1, 2, 5)], 4).tolist() == [0, 5, 5, 0]
    assert live_bytes([(2, 2, 5), (2, 3, 1)], 4).tolist() == [0, 0, 6, 1]


def test_an_interval_that_ends_early_is_empty() -> None:
    """An interval whose last position is before its first has no bytes."""
    assert live_bytes([(2, 1, 5)], 4).tolist() == [0, 0, 0, 0]


def test_no_positions_or_no_intervals() -> None:
    """Nothing is live without intervals, and there may be no positions."""
    assert live_bytes([], 3).tolist() == [0, 0, 0]
    assert live_bytes([(0, 5, 7)], 0).tolist() == []


@given(INTERVALS, st.integers(0, 7))
def test_agrees_with_a_sum_at_each_position(
    intervals: list[tuple[int, int, int]], length: int
) -> None:
    """Intervals that reach beyond the positions at either end count inside."""
    expected = [
        sum(nbytes for first, last, nbytes in intervals if first <= at <= last)
        for at in range(length)
    ]
    assert live_bytes(intervals, length).tolist() == expected
