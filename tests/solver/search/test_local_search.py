"""Local search: repairs and their ends."""

from __future__ import annotations

from fxckpt.solver.search.price_search import PriceSearch, search_of
from tests.solver.programs import chain


def test_repairs_end_where_recomputes_are_too_many() -> None:
    """Near the floor of a chain, no repair goes on to more than ten forwards and an eviction."""
    program, options = chain(300), PriceSearch()
    search = search_of(options, program)
    search.least_time()
    least = search.lowest_reachable(search.least_peak()).simulation.peak_bytes
    search.refine(least, options.refined, options.perturbations, None)
    forwards = [c.simulation.extra_seconds / len(program.ops) for c in search.seen.values()]
    assert 10 < max(forwards) < 11
