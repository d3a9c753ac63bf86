"""Stages begin at narrow places, at all of a depth or at none."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from fxckpt.solver.program import Program
from fxckpt.solver.stages import StageBoundaries, persistence
from tests.solver.programs import programs


def test_a_valley_is_as_deep_as_the_way_to_a_lower_one() -> None:
    assert persistence(np.array([0, 5, 2, 9, 1, 3])) == {0: 9, 2: 3, 4: 8}


def test_a_level_stretch_counts_once() -> None:
    assert persistence(np.array([4, 1, 1, 4, 0])) == {1: 3, 4: 4}


def test_nothing_is_narrow_on_level_ground() -> None:
    assert persistence(np.array([3, 3, 3])) == {0: 0}


@given(heights=st.lists(st.integers(0, 9), min_size=1, max_size=20))
def test_every_climb_is_the_least_there_is(heights: list[int]) -> None:
    """Oracle: walk from a place both ways to the next that is lower, or level with it and before it."""
    for place, climb in persistence(np.array(heights)).items():
        lower = [i for i, h in enumerate(heights) if (h, i) < (heights[place], place)]
        ways = [max(heights[min(i, place) : max(i, place) + 1]) for i in lower] or [max(heights)]
        assert climb == min(ways) - heights[place]


@given(program=programs(), count=st.integers(1, 12))
def test_stages_begin_at_the_start_and_are_in_order(program: Program, count: int) -> None:
    starts = StageBoundaries(program).stages(count)
    assert starts[0] == 0
    assert list(starts) == sorted(set(starts))
    assert starts[-1] < len(program.backward)
