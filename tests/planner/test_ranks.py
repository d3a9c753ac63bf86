"""Decisions of several ranks, which are threads with a store in memory."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from torch.distributed import HashStore

import fxckpt
from fxckpt.planner.ranks import Neighbour, Ranks, group_of


def together(*parts: Callable[[Ranks], Any], seconds: float = 60.0) -> list[Any]:
    """Run a function as each rank; return their results, or the errors that they raised."""
    store = HashStore()

    def run(rank: int) -> Any:
        try:
            return parts[rank](Ranks(store, rank, len(parts), "test", seconds))
        except Exception as error:
            return error

    with ThreadPoolExecutor(len(parts)) as pool:
        return list(pool.map(run, range(len(parts))))


def infeasible() -> fxckpt.BudgetInfeasible:
    return fxckpt.BudgetInfeasible("too little", floor_bytes=2, budget_bytes=1)


def test_first_rank_chooses_for_all() -> None:
    """Every rank gets what the first one makes of all values, which are in order."""
    each = [lambda ranks, i=i: ranks.decide("x", i * i, tuple) for i in range(3)]
    assert together(*each) == [(0, 1, 4)] * 3


def test_decisions_follow_one_another() -> None:
    """Answers of many decisions do not mix, and what all have read is dropped."""
    store = HashStore()

    def run(rank: int) -> list[int]:
        ranks = Ranks(store, rank, 2, "test")
        return [ranks.decide("x", rank + i, sum) for i in range(20)]

    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(run, range(2))) == [[2 * i + 1 for i in range(20)]] * 2
    assert not store.check(["fxckpt test 18 told"])


@pytest.mark.parametrize("failing", [0, 1])
def test_all_raise_what_one_raised(failing: int) -> None:
    """The error of one rank is raised on the others, with its type, its bytes and its number."""

    def fails(ranks: Ranks) -> None:
        ranks.fail(infeasible())

    def goes_on(ranks: Ranks) -> None:
        ranks.decide("x", 1, sum)

    parts = [goes_on, goes_on]
    parts[failing] = fails
    error = together(*parts)[1 - failing]
    assert isinstance(error, fxckpt.BudgetInfeasible)
    assert str(error) == f"rank {failing}: too little" and error.floor_bytes == 2


def test_error_of_the_choice_is_everyones() -> None:
    """What the choice raises is raised on all ranks; to tell it again is no news."""

    def choose(values: Any) -> None:
        raise infeasible()

    def run(ranks: Ranks) -> int:
        try:
            ranks.decide("x", None, choose)
        except fxckpt.BudgetInfeasible as error:
            ranks.fail(error)
        return ranks.decide("y", 1, sum)

    assert together(run, run) == [2, 2]


def test_missing_rank_is_named() -> None:
    """A rank that does not come is named on all others, after a while."""
    ask = lambda ranks: ranks.confirm("the plan")  # noqa: E731
    first, other, _ = together(ask, ask, lambda ranks: None, seconds=0.2)
    assert str(first).startswith("rank 2 did not come to decide on the plan within")
    assert str(other) == str(first)
    _, alone = together(lambda ranks: None, ask, seconds=0.1)
    assert str(alone).startswith("rank 0 did not come")


def test_other_subjects_are_an_error() -> None:
    """Ranks that decide on different things are told which."""
    found = together(lambda r: r.confirm("graph 1"), lambda r: r.confirm("graph 2"))
    assert all(isinstance(error, fxckpt.RanksDisagree) for error in found)
    assert "rank 0 decides on graph 1, and rank 1 on graph 2" in str(found[1])


def test_group_must_be_one() -> None:
    """An option that is no group is refused, as is one before torch.distributed is initialized."""
    assert group_of(None) is None
    with pytest.raises(fxckpt.InvalidOption, match=r"init_process_group"):
        group_of("world")


def test_neighbour_tells_of_another_plan() -> None:
    """Plans of one program are compared once both ranks have them; other programs are not."""
    store = HashStore()
    first, second = (Neighbour(store, rank, 2, "test") for rank in range(2))
    assert first.differing([("a", "1"), ("b", "1"), ("c", "1")]) is None
    assert second.differing([("a", "1"), ("x", "2"), ("c", "2")]) == (2, 0)
    assert first.differing([("a", "1"), ("b", "1"), ("c", "1")]) == (2, 1)
