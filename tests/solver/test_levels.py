"""Families of levels: plans of one graph that trade held bytes for time."""

from __future__ import annotations

import numpy as np

from fxckpt.solver.levels import LevelSearch, level_of
from fxckpt.solver.schedule import save_all
from fxckpt.solver.search import Candidate, PriceSearch
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
