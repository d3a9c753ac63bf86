"""Lowering search: plans are lowered until one fits, for less memory each time.

The solver searches on a model of Inductor's kernels, so that a plan within the budget may compile
to one over it. A search is a tuple of attempts, to which its phases add: where the latest is over
the budget, the next one aims lower, by as much as the model was wrong. Each lowering calibrates
the model for the next. The choice of torch's default partitioner is always a candidate, so that
without a budget nothing gets worse.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from fxckpt import budgets
from fxckpt.inductor.attempt import Attempt, CandidateLowerer
from fxckpt.planner.planner import device_of
from fxckpt.planner.refusals import infeasible
from fxckpt.planner.tier_link import offload_hint
from fxckpt.solver.program import Program
from fxckpt.solver.schedule import Schedule
from fxckpt.solver.search.candidates import Candidate, SearchResult
from fxckpt.solver.simulate import simulate

Attempts = tuple[Attempt, ...]
"""Attempts of a search so far, in order."""


@dataclass(frozen=True)
class LoweringSearch:
    """Searches one joint graph for the fastest plans whose lowered halves fit the budget."""

    lowerer: CandidateLowerer
    """Makes attempts at candidates."""
    descents: int = 3
    """Most plans lowered for less and less memory, before those near the least peak."""
    refinements: int = 2
    """Most searches for a faster plan once one fits."""
    slack: float = 0.03
    """Share of the budget that may be left over without a search for a faster plan."""
    worthwhile: float = 0.02
    """Least share of the step's time that a faster plan must save."""
    scarce: float = 0.2
    """Share of the step's time by which a plan over the budget must be faster than the one that
    fits, so that every byte counts and a faster plan is sought within the slack too."""
    margin: float = 0.001
    """Share of the budget that the first plan leaves over."""
    last_resorts: tuple[float, ...] = (1.03, 1.1, 1.25, 1.5)
    """Multiples of the model's least peak at which the last plans are searched."""

    def finalists(self, *, is_timed: bool) -> Attempts:
        """Return attempts that fit, the one expected to be fastest first.

        It is the only one, unless others are ``is_timed`` against it. Raises
        :class:`~fxckpt.errors.BudgetInfeasible`.
        """
        planner, program = self.lowerer.planner, self.lowerer.facts.program
        device = device_of(self.lowerer.joint.module.graph)
        if planner.choose_level is not None:
            found = planner.choose_level(program)
            assert found.best is not None
            return self._add((), found, found.best, None, is_whole=True)
        asked = budgets.parse(planner.budget)
        if isinstance(asked, budgets.LeastMemory):
            return (self._least_memory(asked.max_slowdown, device),)
        limit: int | None = None

        def aim(peak: int) -> int | None:
            nonlocal limit
            limit = planner.budget_bytes(planner.budget, peak, device)
            return None if limit is None else int((1 - self.margin) * limit)

        found = planner.search(program, aim)
        attempts = self._until_fit(found, limit)
        if any(attempt.fits(limit) for attempt in attempts):
            first = _latest_fit(attempts, limit)
        else:
            assert limit is not None
            first, limit = self._within_share_of_default(attempts, found, limit)
        if not is_timed:
            return (first,)
        return (first, *self._alternatives(found, attempts, first, limit))

    def _until_fit(self, found: SearchResult, limit: int | None) -> Attempts:
        """Return attempts, of which one fits if any can.

        The plans near the least peak and the default choice are lowered in full, as their peaks may
        become the number that an error names.
        """
        default = self.lowerer.default
        if limit is None:
            return self._add((), found, default or found.best or found.baseline, None)
        attempts: Attempts = ()
        phases = (
            self._default_if_promising,
            self._descend,
            self._near_least_peak_of_all,
            self._default_otherwise,
        )
        for phase in phases:
            attempts = phase(attempts, found, limit)
            if attempts and attempts[-1].fits(limit):
                is_default = attempts[-1].candidate is default
                return attempts if is_default else self._refine(attempts, limit)
        return attempts

    def _within_share_of_default(
        self, attempts: Attempts, found: SearchResult, limit: int
    ) -> tuple[Attempt, int]:
        """Return the fastest attempt within a fraction of the default choice, and its limit.

        The default partitioner's choice may compile to more than the uncheckpointed peak as
        planned, as it does for tiny models; then a fraction is of that. Raises
        :class:`~fxckpt.errors.BudgetInfeasible`.
        """
        budget, whole = self.lowerer.planner.budget, [each for each in attempts if each.is_whole]
        base = planned = found.baseline.simulation.peak_bytes
        default = [each for each in whole if each.candidate is self.lowerer.default]
        if default and isinstance(share := budgets.parse(budget), float):
            base = max(planned, default[0].compiled_bytes)
            limit = int(share * base)
        fitting = [each for each in whole if each.fits(limit)]
        if not fitting:
            least = min(each.compiled_bytes for each in whole)
            planner, facts = self.lowerer.planner, self.lowerer.facts
            device = device_of(self.lowerer.joint.module.graph)
            hint = offload_hint(planner.offload, device, facts, found)
            raise infeasible(budget, limit, least, base, hint, is_compiled=base > planned)
        fastest = min(fitting, key=lambda each: each.candidate.simulation.extra_seconds)
        return fastest.with_budget(limit), limit

    def _default_if_promising(
        self, attempts: Attempts, found: SearchResult, limit: int
    ) -> Attempts:
        """Add the default partitioner's choice, if it fits where the compiler does its best."""
        default = self.lowerer.default
        if default is None or self.lowerer.optimistic_default_peak() > limit:
            return attempts
        return self._add(attempts, found, default, limit, is_whole=True)

    def _default_otherwise(self, attempts: Attempts, found: SearchResult, limit: int) -> Attempts:
        """Add the default partitioner's choice, unless it was tried."""
        default = self.lowerer.default
        if default is None or any(attempt.candidate is default for attempt in attempts):
            return attempts
        return self._add(attempts, found, default, limit, is_whole=True)

    def _descend(self, attempts: Attempts, found: SearchResult, limit: int) -> Attempts:
        """Add plans for less and less memory; only the last may fit."""
        aim = found.limit or limit
        # What kernels write over is known to the model only from a lowering.
        program = self._calibrated(attempts)
        is_calibrated = program is not self.lowerer.facts.program
        best = self._search(program, aim).best if is_calibrated else found.best
        seen: set[Schedule] = set()
        for _ in range(self.descents):
            if best is None or best.schedule in seen:
                break
            seen.add(best.schedule)
            attempts = self._add(attempts, found, best, limit)
            latest = attempts[-1]
            if latest.fits(limit):
                break
            # As much less as the model was wrong, and a little more.
            aim = min(aim, latest.planned_bytes) - int(1.1 * latest.overshoot_bytes(limit))
            best = self._search(latest.program, aim).best
        return attempts

    def _near_least_peak_of_all(
        self, attempts: Attempts, found: SearchResult, limit: int
    ) -> Attempts:
        """Add plans of about the least peak that the model finds for any budget.

        They do not depend on the budget, so that a budget of the least peak that an error names is
        feasible.
        """
        return self._near_least_peak(attempts, self._search(self.lowerer.facts.program, 0), limit)

    def _near_least_peak(self, attempts: Attempts, found: SearchResult, limit: int) -> Attempts:
        """Add plans of about the least peak; only the last may fit.

        A candidate planned to take more than another was compiled to is skipped, unless the model
        may be wrong by that much: about one this way, about the other that way.
        """
        before = len(attempts)
        attempts = self._add(attempts, found, found.least_peak, limit, is_whole=True)
        if attempts[-1].fits(limit):
            return attempts
        program = attempts[-1].program
        for candidate in self._candidates_near(found.least_peak, program):
            error = max(each.model_error for each in attempts[before:])
            least = min(each.compiled_bytes for each in attempts[before:])
            if peak_bytes(program, candidate.schedule) <= (1 + 2 * error) * least:
                attempts = self._add(attempts, found, candidate, limit, is_whole=True)
                if attempts[-1].fits(limit):
                    break
        return attempts

    def _candidates_near(self, least: Candidate, program: Program) -> Iterator[Candidate]:
        """Yield candidates of the least peak on a calibrated program, and of a little more."""
        if program is not self.lowerer.facts.program:
            better = self._search(program, peak_bytes(program, least.schedule)).least_peak
            if better.schedule != least.schedule:
                least = better
                yield least
        for factor in self.last_resorts:
            limit = int(factor * peak_bytes(program, least.schedule))
            if (best := self._search(program, limit).best) is not None:
                yield best

    def _refine(self, attempts: Attempts, limit: int) -> Attempts:
        """Add faster plans for the budget that the latest fit leaves over."""
        share = 1 - self.margin
        for _ in range(self.refinements):
            found = self._search_in_gap(attempts, limit, share)
            if found is None:
                break
            faster = self._fastest_new(attempts, found, limit)
            spent = _latest_fit(attempts, limit).candidate.simulation.extra_seconds
            if faster is None or faster.simulation.extra_seconds > spent - self._worthwhile_seconds:
                break
            attempts = self._add(attempts, found, faster, limit)
            if not attempts[-1].fits(limit):
                share /= 2
        return attempts

    @property
    def _worthwhile_seconds(self) -> float:
        """Least seconds that a faster plan must save."""
        return self.worthwhile * self.lowerer.facts.program.step_seconds

    def _search_in_gap(self, attempts: Attempts, limit: int, share: float) -> SearchResult | None:
        """Search within the latest fit's peak and a share of the bytes that it leaves over.

        Between it and the latest plan refused, planned bytes are expected to grow with compiled
        ones. None if little is left over, or little time can be saved.
        """
        program, step_seconds = self._calibrated(attempts), self.lowerer.facts.program.step_seconds
        fit = _latest_fit(attempts, limit)
        planned = peak_bytes(program, fit.schedule)
        left = limit - fit.compiled_bytes
        spent = fit.candidate.simulation.extra_seconds
        faster_by, rate = 0.0, 1.0
        refused = [each for each in attempts if not each.is_whole and not each.fits(limit)]
        if refused:
            over = simulate(program, refused[-1].schedule)
            faster_by = spent - over.extra_seconds
            bytes_between = refused[-1].compiled_bytes - fit.compiled_bytes
            rate = (over.peak_bytes - planned) / bytes_between
        is_scarce = faster_by > self.scarce * step_seconds
        if spent <= self._worthwhile_seconds or (left <= self.slack * limit and not is_scarce):
            return None
        return self._search(program, planned + int(max(rate, 0.0) * share * left))

    def _fastest_new(self, attempts: Attempts, found: SearchResult, limit: int) -> Candidate | None:
        """Return the fastest candidate within a search's limit that was not lowered yet."""
        program = self._calibrated(attempts)
        lowered = {attempt.schedule for attempt in attempts}
        new = (
            candidate
            for candidate in (self.lowerer.default, found.best)
            if candidate is not None
            and candidate.schedule not in lowered
            and peak_bytes(program, candidate.schedule) <= (found.limit or limit)
        )
        return min(new, key=lambda candidate: candidate.simulation.extra_seconds, default=None)

    def _alternatives(
        self, found: SearchResult, attempts: Attempts, first: Attempt, limit: int | None
    ) -> Iterator[Attempt]:
        """Yield other attempts that fit, to be timed against the first.

        They are the default partitioner's choice, and the model's fastest plans within the first
        one's peak and within a little less.
        """
        plan = first.halves[2]
        peak = plan.compiled_peak_bytes or plan.peak_bytes
        seen = {plan.digest}
        for less in (None, 0.0, self.slack):
            candidate = self.lowerer.default
            if less is not None:
                found = self._search(self._calibrated(attempts), int((1 - less) * peak))
                candidate = found.best
            if candidate is None:
                continue
            digest = self.lowerer.plan_of(found, candidate, limit).digest
            if digest not in seen:
                seen.add(digest)
                attempts = self._add(attempts, found, candidate, limit)
                if attempts[-1].fits(limit):
                    yield attempts[-1]

    def _least_memory(self, max_slowdown: float, device: torch.device) -> Attempt:
        """Return the attempt of the least compiled peak among plans of at most that extra time.

        They are the model's plan, its plans once a lowering calibrated it, and the default
        partitioner's choice, all lowered in full.
        """
        planner, default = self.lowerer.planner, self.lowerer.default
        found = planner.search_budget(self.lowerer.facts.program, device)
        if math.isinf(max_slowdown):
            attempts = self._near_least_peak((), found, 0)
        else:
            assert found.best is not None
            attempts = self._add((), found, found.best, 0, is_whole=True)
            again = planner.search_budget(self._calibrated(attempts), device)
            if again.best is not None and again.best.schedule != found.best.schedule:
                attempts = self._add(attempts, again, again.best, 0, is_whole=True)
        if default is not None:
            program = self._calibrated(attempts)
            spent = simulate(program, default.schedule).extra_seconds
            if math.isinf(max_slowdown) or spent <= max_slowdown * program.step_seconds:
                attempts = self._add(attempts, found, default, 0, is_whole=True)
        return min(attempts, key=lambda each: each.compiled_bytes).with_its_peak_as_budget()

    def _add(
        self,
        attempts: Attempts,
        found: SearchResult,
        candidate: Candidate,
        limit: int | None,
        *,
        is_whole: bool = False,
    ) -> Attempts:
        """Return the attempts, and one at a candidate of a search."""
        attempt = self.lowerer.attempt(
            found, candidate, limit, number=len(attempts) + 1, is_whole=is_whole
        )
        return (*attempts, attempt)

    def _calibrated(self, attempts: Attempts) -> Program:
        """Return the program, calibrated by the latest lowering."""
        return attempts[-1].program if attempts else self.lowerer.facts.program

    def _search(self, program: Program, limit: int) -> SearchResult:
        """Search a program for plans within a limit in bytes."""
        return self.lowerer.planner.search(program, lambda peak: limit)


def peak_bytes(program: Program, schedule: Schedule) -> int:
    """Return the simulated peak of a schedule."""
    return simulate(program, schedule).peak_bytes


def _latest_fit(attempts: Attempts, limit: int | None) -> Attempt:
    """Return the latest attempt that fits; there is one."""
    return next(attempt for attempt in reversed(attempts) if attempt.fits(limit))
