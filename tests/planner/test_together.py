"""One search for several ranks, which are threads."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import fxckpt
from fxckpt.planner.ranks import Ranks
from fxckpt.planner.together import search_together
from fxckpt.solver.program import Program
from tests.planner.test_ranks import together
from tests.solver.test_figures import program


def search(merged: Program, room: int | None) -> tuple[int, float, int | None]:
    return merged.storages[0].bytes, merged.ops[0].seconds, room


def test_the_greatest_figures_are_searched() -> None:
    """Both ranks get the program of the largest sizes and slowest costs, and the least room."""
    found = together(
        lambda ranks: search_together(ranks, "x", program(4, 3.0), search, 70),
        lambda ranks: search_together(ranks, "x", program(16, 0.5), search, 50),
    )
    assert found == [(program(16, 3.0), (16, 3.0, 50))] * 2


def test_largest_rank_is_named_if_none_fits() -> None:
    """The error of an infeasible budget names the rank that needs most."""

    def fails(merged: Program, room: int | None) -> Any:
        raise fxckpt.BudgetInfeasible("too little", floor_bytes=2, budget_bytes=1)

    def part(nbytes: int) -> Any:
        return lambda ranks: search_together(ranks, "x", program(nbytes, 1.0), fails)

    assert [str(error) for error in together(part(4), part(16))] == ["rank 1: too little"] * 2


def test_other_programs_are_an_error() -> None:
    """Ranks whose programs differ are told of their ops."""
    other = replace(program(4, 1.0), ops=program(4, 1.0).ops[:1])

    def part(given: Program) -> Any:
        def run(ranks: Ranks) -> Any:
            return search_together(ranks, "graph 1", given, search)

        return run

    for error in together(part(program(4, 1.0)), part(other)):
        assert isinstance(error, fxckpt.RanksDisagree)
        assert "other programs as graph 1: of 3 and 2 ops" in str(error)
