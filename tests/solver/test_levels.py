"""Families of levels: plans of one graph that trade held bytes for time."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from fxckpt.solver.levels import LevelSearch, level_of
from fxckpt.solver.program import Link
from fxckpt.solver.schedule import save_all
from fxckpt.solver.search.candidates import Candidate
from fxckpt.solver.search.price_search import PriceSearch
from fxckpt.solver.simulate import simulate
from tests.solver.programs import chain


def test_family_reaches_from_all_to_nothing() -> None:
    program = chain(8)
    family = LevelSearch()(PriceSearch(), program)
    held = [level.held_bytes for level in family.levels]
    seconds = [level.extra_seconds for level in family.levels]
    assert seconds == sorted(seconds) and seconds[0] == 0
    assert min(held) == 0 and max(held) == level_of(program, family.found.baseline).held_bytes


def test_no_level_is_worse_in_everything() -> None:
    family = LevelSearch()(PriceSearch(), chain(12))
    figures = [
        (x.extra_seconds, x.held_bytes, max(x.forward_bytes, x.backward_bytes))
        for x in family.levels
    ]
    for i, one in enumerate(figures):
        for other in figures[:i] + figures[i + 1 :]:
            assert not all(np.array(other) <= np.array(one))


def test_level_counts_what_others_do_not() -> None:
    program = chain(4)
    schedule = save_all(program)
    simulation = simulate(program, schedule)
    level = level_of(program, Candidate(schedule, simulation))
    outputs = sum(s.bytes for s in program.storages if s.is_output)
    kept = sum(program.storages[s].bytes for s in schedule.saved)
    kept -= sum(program.storages[s].bytes for s in schedule.saved if program.storages[s].is_output)
    assert level.held_bytes == kept
    assert level.backward_bytes + outputs + program.tangent_bytes >= simulation.peak_bytes


@pytest.mark.parametrize("required", [frozenset(), frozenset({2})], ids=["any", "one must"])
def test_levels_beside_a_link(required: frozenset[int]) -> None:
    """Some send nothing, unless a policy demands it, and the least holds less for no recompute."""
    program = chain(8)
    link = Link(1e9, 1e9, 1000, frozenset(range(8)), required)
    plain = LevelSearch()(PriceSearch(), program)
    program = replace(program, link=link)
    family = LevelSearch()(PriceSearch(), program)
    for candidate, level in zip(family.candidates, family.levels, strict=True):
        assert level == level_of(program, candidate)
        sent = {away.storage for away in candidate.schedule.away}
        assert required & {*candidate.schedule.saved} <= sent
        assert level.away_bytes == 10 * len(sent)
    fewest = min(level.held_bytes for level in family.levels if level.extra_seconds < 0.5)
    assert fewest < min(x.held_bytes for x in plain.levels if x.extra_seconds < 0.5)
    if not required:
        assert {*plain.levels} <= {*family.levels}
