"""Stages begin at positions that few bytes cross, at all of one depth or at none."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from fxckpt.solver.cuts.stages import StageBoundaries, persistence
from fxckpt.solver.program import Program
from tests.solver.programs import programs


def test_depth_is_the_climb_to_lower_minimum() -> None:
    """A local minimum is as deep as the climb from it to a lower one."""
    assert persistence(np.array([0, 5, 2, 9, 1, 3])) == {0: 9, 2: 3, 4: 8}


def test_level_stretch_counts_once() -> None:
    """The first position of a level stretch stands for all of it."""
    assert persistence(np.array([4, 1, 1, 4, 0])) == {1: 3, 4: 4}


def test_level_heights_have_no_depth() -> None:
    """Equal heights have one minimum of depth 0; no heights have none."""
    assert persistence(np.array([], dtype=np.int64)) == {}
    assert persistence(np.array([3, 3, 3])) == {0: 0}


@given(heights=st.lists(st.integers(0, 9), min_size=1, max_size=20))
def test_every_climb_is_the_least(heights: list[int]) -> None:
    """Oracle: walk both ways to the next lower position, or to an equal one before."""
    for position, climb in persistence(np.array(heights)).items():
        lower = [i for i, h in enumerate(heights) if (h, i) < (heights[position], position)]
        ways = [max(heights[min(i, position) : max(i, position) + 1]) for i in lower] or [
            max(heights)
        ]
        assert climb == min(ways) - heights[position]


@given(program=programs(), count=st.integers(1, 12))
def test_stages_ascend_from_the_start(program: Program, count: int) -> None:
    """The first stage begins at 0 and the others follow, within the backward."""
    starts = StageBoundaries(program).stages(count)
    assert starts[0] == 0
    assert list(starts) == sorted(set(starts))
    assert starts[-1] < len(program.backward)
