"""The exhaustive search and the integer program agree with each other and bound the search."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fxckpt.solver.exact.milp import in_forward, optimum
from fxckpt.solver.program import Program
from fxckpt.solver.search.price_search import PriceSearch
from tests.solver.oracle import exhaustive
from tests.solver.programs import interpret, programs, two_values


@pytest.mark.parametrize(("limit", "seconds"), [(21, 0.0), (20, 1.0), (11, 1.0), (10, None)])
def test_both_solve_two_values(limit: int, seconds: float | None) -> None:
    """Both oracles know the optimum of a program of two values."""
    assert exhaustive(two_values(), limit) == seconds
    assert optimum(two_values(), limit).seconds == (
        None if seconds is None else pytest.approx(seconds)
    )


@given(program=programs(max_ops=4), share=st.floats(0.0, 1.0))
def test_order_within_stages_only_restricts(program: Program, share: float) -> None:
    """The integer program, which orders a stage's ops topologically, never beats any order."""
    program = in_forward(program)
    search = PriceSearch(restarts=0)
    limit = int(share * search(program, lambda baseline: baseline).baseline.simulation.peak_bytes)
    any_order, in_order = exhaustive(program, limit), optimum(program, limit)
    assert in_order.is_proven
    if in_order.seconds is not None:
        assert any_order is not None
        assert any_order <= in_order.seconds + 1e-6


@pytest.mark.parametrize(
    "search",
    [PriceSearch(), PriceSearch(exact_states=0), PriceSearch(exact_states=0, exact_size=0)],
    ids=["dynamic program", "integer program", "heuristic"],
)
@given(program=programs(max_ops=5, in_place=False), share=st.floats(0.0, 1.0))
def test_search_finds_optima_of_tiny_programs(
    search: PriceSearch, program: Program, share: float
) -> None:
    """On tiny programs the search is within 5 % of the optimum, and its bound below it.

    Beside ops that run in place it may not be: a value that is recomputed although it could be
    saved is one that may be written into, and the search does not recompute for that alone.
    """
    found = search(program, lambda baseline: int(share * baseline))
    limit = int(share * found.baseline.simulation.peak_bytes)
    best = exhaustive(program, limit)
    if found.best is None:
        return  # below the least peak that the search found
    assert best is not None
    seconds = interpret(program, found.best.schedule).seconds
    assert found.bound.seconds <= best + 1e-6
    assert best <= seconds + 1e-9
    assert seconds <= 1.05 * best + 1e-9


@given(program=programs(max_ops=5), share=st.floats(0.0, 1.0))
def test_search_is_sound_in_place(program: Program, share: float) -> None:
    """With ops in place too, no plan beats the optimum, and the bound is below it."""
    found = PriceSearch()(program, lambda baseline: int(share * baseline))
    best = exhaustive(program, int(share * found.baseline.simulation.peak_bytes))
    if found.best is None:
        return
    assert best is not None
    assert found.bound.seconds <= best + 1e-6
    assert best <= interpret(program, found.best.schedule).seconds + 1e-9


@given(program=programs(max_ops=5, in_place=False), share=st.floats(0.0, 1.0))
def test_least_memory_is_near_the_optimum(program: Program, share: float) -> None:
    """On tiny programs no plan of that much time is far below the least memory found."""
    search = PriceSearch()
    most = share * program.step_seconds
    found = search.least_memory(program, most)
    assert found.best is not None and found.limit == found.best.simulation.peak_bytes
    assert interpret(program, found.best.schedule).seconds <= most + 1e-9
    less = exhaustive(program, int(0.95 * found.limit) - 1)
    assert less is None or less > most - 1e-9
