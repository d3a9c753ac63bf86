"""Nested plans recompute blocks from few boundaries, and never read what is not there."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fxckpt.solver.cuts.stages import StageBoundaries
from fxckpt.solver.moves.heuristics import Heuristics
from fxckpt.solver.moves.nested import Nested, advances
from fxckpt.solver.program import Program
from fxckpt.solver.schedule import Schedule
from fxckpt.solver.simulate import simulate
from tests.solver.programs import QUICK_SEARCH, chain, interpret, programs


def test_advances_begin_at_boundaries_held() -> None:
    """Six blocks with one boundary: it is in the middle, and is held for those after it."""
    assert list(advances(6, 0)) == [0, 0, 0, 0, 0, 0]
    assert list(advances(6, 1)) == [0, 1, 0, 3, 3, 3]
    assert list(advances(6, 5)) == [0, 1, 2, 3, 4, 5]


def _advanced(held: int) -> int:
    return sum(block - start for block, start in enumerate(advances(32, held)))


def test_fewer_boundaries_take_more_advances() -> None:
    """Each boundary more that is held saves advances, at last all of them."""
    steps = [_advanced(held) for held in range(32)]
    assert steps == sorted(steps, reverse=True)
    assert (steps[0], steps[31]) == (32 * 31 // 2, 0)


def test_chain_has_a_low_peak() -> None:
    """A chain of 64 values of ten bytes needs two boundaries and a block beside its gradients."""
    program = chain(64)
    nested = Nested(program, tuple(range(4, 64, 4)))
    peaks = [simulate(program, nested(held)).peak_bytes for held in (0, 2, 15)]
    gradients = 64 * 10
    assert peaks[0] < peaks[1] < peaks[2] < gradients + 64 * 10


def test_chains_of_equal_values_have_blocks() -> None:
    """Where no value is narrower than others, blocks are about equally long."""
    program = chain(64)
    found = Heuristics(program, StageBoundaries(program)).nested(8).boundaries
    sizes = [b - a for a, b in itertools.pairwise((0, *found, 64))]
    assert 4 <= min(sizes) <= max(sizes) <= 16


@pytest.mark.parametrize("held", [0, 1, 3])
@given(data=st.data())
def test_any_program_follows_nested_plans(held: int, data: st.DataObject) -> None:
    """The interpreter finds every value that a nested plan reads, and the simulator's figures."""
    program = data.draw(programs(in_place=False))
    boundaries = data.draw(st.sets(st.integers(1, max(1, len(program.ops) - 1))))
    schedule = Nested(program, tuple(sorted(boundaries)))(held)
    outcome, simulation = interpret(program, schedule), simulate(program, schedule)
    assert outcome.profile == list(simulation.profile)
    assert outcome.seconds == pytest.approx(simulation.extra_seconds)


def _found(program: Program, limit: int) -> Schedule | None:
    best = QUICK_SEARCH(program, lambda baseline: limit).best
    return None if best is None else best.schedule


def test_search_reaches_peaks_below_sqrt() -> None:
    """The search goes below the peak of any plan that recomputes every value once."""
    program = chain(64)
    once = min(
        simulate(program, Nested(program, tuple(range(n, 64, n)))(64)).peak_bytes
        for n in (4, 8, 16)
    )
    assert _found(program, once - 40) is not None
