"""The search around lowerings, on a stand-in for Inductor that compiles to a multiple of a plan."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

import fxckpt
from fxckpt.inductor.attempt import Attempt, CandidateLowerer
from fxckpt.inductor.lowering_search import LoweringSearch
from fxckpt.passes.graphs import Joint
from fxckpt.planner.planner import Planner
from fxckpt.solver.program import Program
from fxckpt.solver.schedule import save_all
from fxckpt.solver.search.candidates import Candidate, SearchResult
from fxckpt.solver.search.price_search import PriceSearch
from fxckpt.solver.simulate import simulate
from tests.passes.graphs import chain as chain_of_ops
from tests.passes.graphs import traced
from tests.solver.programs import QUICK_SEARCH, chain

PROGRAM = chain(12)
BASELINE = simulate(PROGRAM, save_all(PROGRAM)).peak_bytes


@dataclass(frozen=True)
class StandIn:
    """What a search reads of a plan."""

    digest: Any
    compiled_peak_bytes: int
    budget_bytes: int | None


@dataclass(frozen=True)
class ScaledLowerer:
    """Compiles each plan to ``factor`` times its peak."""

    factor: float
    planner: Planner
    default: Candidate | None = None
    made: list[Attempt] = field(default_factory=list)
    facts: Any = field(default_factory=lambda: SimpleNamespace(program=PROGRAM, owner={}))
    joint: Joint = field(
        default_factory=lambda: Joint(traced(chain_of_ops, torch.ones(4), torch.ones(4)), 1)
    )

    def optimistic_default_peak(self) -> int:
        assert self.default is not None
        return self.default.simulation.peak_bytes

    def plan_of(self, found: SearchResult, candidate: Candidate, limit: int | None) -> Any:
        return SimpleNamespace(digest=candidate.schedule)

    def attempt(
        self,
        found: SearchResult,
        candidate: Candidate,
        limit: int | None,
        *,
        number: int,
        is_whole: bool = False,
    ) -> Attempt:
        assert number == len(self.made) + 1
        planned = simulate(PROGRAM, candidate.schedule).peak_bytes
        compiled = int(self.factor * planned)
        plan: Any = StandIn(candidate.schedule, compiled, limit)
        halves: Any = (None, None, plan)
        self.made.append(Attempt(candidate, halves, PROGRAM, planned, compiled, is_whole))
        return self.made[-1]


def searched(
    budget: int | float, *, factor: float, default: Candidate | None = None, is_timed: bool = False
) -> tuple[tuple[Attempt, ...], list[Attempt]]:
    """Return the finalists of a search, and all of its attempts."""
    lowerer = ScaledLowerer(factor, Planner(budget=budget, search=QUICK_SEARCH), default)
    search = LoweringSearch(cast(CandidateLowerer, lowerer))
    return search.finalists(is_timed=is_timed), lowerer.made


def saving_all(program: Program) -> Candidate:
    """Return the candidate that saves everything."""
    return Candidate(save_all(program), simulate(program, save_all(program)))


def test_plans_aim_lower_until_one_fits() -> None:
    """Where kernels take a quarter more than the model says, the second plan is for less."""
    budget = int(0.8 * BASELINE)
    (found,), made = searched(budget, factor=1.25)
    assert found.fits(budget)
    assert not made[0].fits(budget) and not made[0].is_whole
    assert made[1].planned_bytes < made[0].planned_bytes


def test_default_choice_that_fits_is_the_only_attempt() -> None:
    """It is not refined: without recomputes nothing is faster."""
    default = saving_all(PROGRAM)
    found, made = searched(BASELINE, factor=1.0, default=default)
    assert list(found) == made and made[0].candidate is default and made[0].is_whole


def test_default_choice_is_tried_once() -> None:
    """One over the budget where the compiler did its best is not lowered a second time."""
    default = saving_all(PROGRAM)
    for budget in (BASELINE, int(0.5 * BASELINE)):
        with pytest.raises(fxckpt.BudgetInfeasible):
            lowerer = ScaledLowerer(9.0, Planner(budget=budget, search=QUICK_SEARCH), default)
            LoweringSearch(cast(CandidateLowerer, lowerer)).finalists(is_timed=False)
        assert sum(each.candidate is default for each in lowerer.made) == 1
        assert (lowerer.made[0].candidate is default) == (budget == BASELINE)


def test_infeasible_budget_names_a_whole_lowering() -> None:
    """The least peak in the error is of halves that were lowered in full."""
    lowerer = ScaledLowerer(3.0, Planner(budget=BASELINE // 4, search=QUICK_SEARCH))
    with pytest.raises(fxckpt.BudgetInfeasible) as caught:
        LoweringSearch(cast(CandidateLowerer, lowerer)).finalists(is_timed=False)
    whole = [each.compiled_bytes for each in lowerer.made if each.is_whole]
    assert caught.value.floor_bytes == min(whole)
    assert len(whole) < len(lowerer.made)


@dataclass(frozen=True)
class Hurried(PriceSearch):
    """Searches for the least peak only where no plan can be within the limit."""

    def __call__(self, program: Program, budget: Callable[[int], int | None]) -> SearchResult:
        found = QUICK_SEARCH(program, budget)
        return replace(found, least_peak=found.baseline) if found.limit else found


@pytest.mark.parametrize("share", [0.1, 0.3, 0.5])
def test_named_least_peak_is_accepted(share: float) -> None:
    """It is of a plan that is tried whatever the budget is."""
    planner = Planner(budget=int(share * BASELINE), search=Hurried())
    with pytest.raises(fxckpt.BudgetInfeasible) as caught:
        lowerer = ScaledLowerer(3.0, planner)
        LoweringSearch(cast(CandidateLowerer, lowerer)).finalists(is_timed=False)
    lowerer = ScaledLowerer(3.0, replace(planner, budget=caught.value.floor_bytes))
    (found,) = LoweringSearch(cast(CandidateLowerer, lowerer)).finalists(is_timed=False)
    assert found.fits(caught.value.floor_bytes)
    assert (
        found.planned_bytes == QUICK_SEARCH(PROGRAM, lambda _: 0).least_peak.simulation.peak_bytes
    )


def test_infeasible_fraction_is_not_named_again() -> None:
    """Where no fraction of the planned peak is enough as compiled, the error names bytes."""
    lowerer = ScaledLowerer(9.0, Planner(budget=1.0, search=QUICK_SEARCH))
    with pytest.raises(fxckpt.BudgetInfeasible, match="as planned, before it is comp") as caught:
        LoweringSearch(cast(CandidateLowerer, lowerer)).finalists(is_timed=False)
    assert caught.value.floor_bytes > BASELINE
    assert f"to at least '{caught.value.floor_bytes}B', or" in str(caught.value)


def test_fractions_may_be_of_the_default_choice() -> None:
    """Where the default choice compiles to more than was planned, a fraction is of that."""
    default = saving_all(PROGRAM)
    (found,), made = searched(1.0, factor=9.0, default=default)
    assert found.candidate is default and sum(each.candidate is default for each in made) == 1
    assert found.halves[2].budget_bytes == found.compiled_bytes == 9 * BASELINE
    with pytest.raises(fxckpt.BudgetInfeasible) as caught:
        searched(0.1, factor=9.0, default=default)
    named = re.search(r"to at least (\S+) \('(\d+)B'\)", str(caught.value))
    assert named is not None
    least, floor = named.groups()
    assert caught.value.budget_bytes == int(0.9 * BASELINE)
    assert caught.value.floor_bytes == int(floor) <= float(least) * 9 * BASELINE
    (found,), _ = searched(float(least), factor=9.0, default=default)
    assert found.compiled_bytes == caught.value.floor_bytes
    with pytest.raises(fxckpt.BudgetInfeasible):
        searched(BASELINE, factor=9.0, default=default)


def test_bytes_left_over_buy_a_faster_plan() -> None:
    """Kernels that take half of what the model says leave room for a plan of fewer recomputes."""
    budget = int(0.6 * BASELINE)
    (found,), made = searched(budget, factor=0.5)
    first = made[0].candidate.simulation.extra_seconds
    assert made[0].fits(budget) and found.fits(budget)
    assert found.candidate.simulation.extra_seconds < first


def test_finalists_to_be_timed_differ_and_fit() -> None:
    """Alternatives are lowered only where steps are timed; each plan is lowered once."""
    budget = int(0.7 * BASELINE)
    default = saving_all(PROGRAM)
    alone, few = searched(budget, factor=0.9, default=default)
    timed, made = searched(budget, factor=0.9, default=default, is_timed=True)
    assert len(alone) == 1 and timed[0].schedule == alone[0].schedule
    assert len(made) > len(few)
    assert all(each.fits(budget) for each in timed)
    assert len({each.schedule for each in timed}) == len(timed)
