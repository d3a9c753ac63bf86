"""The search over a link: values are kept, sent away or recomputed, whichever takes less time."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from fxckpt.reason import Reason
from fxckpt.solver.program import Link, Storage
from fxckpt.solver.search.price_search import PriceSearch
from tests.solver.programs import chain
from tests.solver.test_link_use import clock, with_link


def test_a_fast_link_takes_no_time() -> None:
    """Over a link as fast as the ops, a chain fits any budget from its floor up for free."""
    program = with_link(chain(12), 20.0, 20.0)
    for limit in (40, 60, 100):
        found = PriceSearch()(program, lambda peak, limit=limit: limit)
        assert found.best is not None
        assert found.best.simulation.extra_seconds == found.bound.seconds == 0.0
        assert found.best.simulation.peak_bytes <= limit


def test_a_slow_link_shares_with_recomputes() -> None:
    """A plan over a slow link takes less time than recomputes alone, and no less than the bound."""
    program, limit = chain(16), 60
    alone = PriceSearch()(program, lambda peak: limit).best
    found = PriceSearch()(with_link(program, 4.0, 4.0), lambda peak: limit)
    assert alone is not None and found.best is not None
    simulation = found.best.simulation
    assert found.bound.seconds <= simulation.extra_seconds < alone.simulation.extra_seconds
    assert found.best.schedule.runs and found.best.schedule.away
    assert simulation.stall_seconds == pytest.approx(
        clock(with_link(program, 4.0, 4.0), found.best.schedule)
    )


def test_a_full_place_limits_what_is_away() -> None:
    """No more bytes are away than the link's limit, and the least peak follows it."""
    peaks = []
    for limit_away in (1, 30, 60, 1000):
        program = with_link(chain(12), 1e9, 1e9, limit_away)
        found = PriceSearch()(program, lambda peak: 70)
        assert found.best is not None
        assert found.best.simulation.away_bytes <= limit_away
        peaks.append(found.best.simulation.extra_seconds)
    assert peaks == sorted(peaks, reverse=True) and peaks[0] > peaks[-1] == 0


def test_an_infinite_link_reaches_the_least_peak() -> None:
    """Without a link, the result tells what one would reach, and the bytes it would hold."""
    program = chain(12)
    program = replace(
        program, ops=tuple(replace(op, no_recompute=Reason.EFFECT) for op in program.ops)
    )
    found = PriceSearch()(program, lambda peak: 5)
    storages = with_link(program, 1.0, 1.0).link.storages  # type: ignore[union-attr]
    away, peak = found.reach_away(program, storages)
    assert found.best is None
    assert (away, peak) == (100, 30)
    assert found.least_peak.simulation.peak_bytes == 130


def test_no_more_is_away_than_helps() -> None:
    """Of plans that take equal time, the one that sends the fewest bytes away is chosen."""
    found = PriceSearch()(with_link(chain(12), 100.0, 100.0), lambda peak: 100)
    assert found.best is not None
    assert found.best.simulation.extra_seconds == 0.0
    assert found.best.simulation.away_bytes == found.baseline.simulation.peak_bytes - 100


@pytest.mark.parametrize("rate", [0.5, 4.0, 20.0])
@pytest.mark.parametrize("most", [0.0, 3.0, math.inf])
def test_least_memory_over_a_link(rate: float, most: float) -> None:
    """The least peak within a time is no higher than without the link, and what its plan has."""
    alone = PriceSearch().least_memory(chain(12), most)
    found = PriceSearch().least_memory(with_link(chain(12), rate, rate), most)
    assert found.best is not None and found.limit is not None and alone.limit is not None
    assert found.best.simulation.peak_bytes == found.limit <= alone.limit
    assert found.best.simulation.extra_seconds <= most
    assert found.bound.seconds <= found.best.simulation.extra_seconds
    within = PriceSearch()(with_link(chain(12), rate, rate), lambda peak: found.limit)
    assert within.best is not None
    assert found.best.simulation.extra_seconds <= 1.05 * within.best.simulation.extra_seconds + 0.1


@pytest.mark.parametrize(("small", "is_worth"), [(5, False), (5000, True)])
def test_a_few_bytes_are_no_lower_floor(small: int, is_worth: bool) -> None:
    """The least peak waits for copies only if they lower it by a share worth telling."""
    program = chain(6, nbytes=10_000)
    kept, first, last = len(program.storages), program.ops[0], program.backward[-1]
    program = replace(
        program,
        ops=(
            replace(first, writes=(*first.writes, kept), no_recompute=Reason.EFFECT),
            *program.ops[1:],
        ),
        backward=(*program.backward[:-1], replace(last, reads=(*last.reads, kept))),
        storages=(*program.storages, Storage("kept", small, 0)),
    )
    alone = PriceSearch().least_memory(program, math.inf)
    link = Link(1.0, 1.0, 10**9, frozenset({kept}))
    found = PriceSearch().least_memory(replace(program, link=link), math.inf)
    assert alone.best is not None and found.best is not None and alone.limit is not None
    if is_worth:
        assert found.limit == alone.limit - small
        assert found.best.schedule.away
    else:
        assert found.limit == alone.limit
        assert found.best.simulation.extra_seconds == alone.best.simulation.extra_seconds
