"""The search: the least extra time whose simulated peak fits a budget in bytes.

Multi-start local search on Lagrange multipliers. The peak constraint is dualized into prices per
byte: one at the end of the forward, where all saved values are live, and a share of it at every
stage. A few prices and shares around the price of the lower bound are cut at several numbers of
stages. Cuts flip whole classes of identical layers at once, so the most promising schedules, over
the budget or under it, are then repaired by single moves: :mod:`~fxckpt.solver.moves.evict` lowers
the peak until it fits, :mod:`~fxckpt.solver.moves.retain` removes recomputes that the slack pays
for. The best schedule is perturbed a few times: evicted to less than the budget and repaired. Far
from the bound, schedules that run blocks several times are repaired too
(:mod:`~fxckpt.solver.blocks.chain_program`), and a single budget is approached from above. Small
programs have random restarts too, and the smallest are solved exactly, by a dynamic program over
sets of live values or by an integer program. The simulator evaluates every schedule. A program with
limits on saved values is searched in parts, one for each choice of values within the limits
(:mod:`~fxckpt.solver.search.limited`), and one with a link by values sent away as well
(:mod:`~fxckpt.solver.search.offload_search`). The search ends after a fixed number of steps and
reads neither a clock nor true randomness, so that the same graph always has the same plan.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from fxckpt.solver.program import Program
from fxckpt.solver.search.candidates import Candidate, SearchResult
from fxckpt.solver.search.limited import LimitedSearch
from fxckpt.solver.search.local_search import LocalSearch
from fxckpt.solver.search.offload_search import OffloadSearch
from fxckpt.solver.search.options import SearchOptions
from fxckpt.solver.search.prices import between


@dataclass(frozen=True)
class PriceSearch(SearchOptions):
    """Multi-start local search on Lagrange multipliers."""

    def __call__(self, program: Program, budget: Callable[[int], int | None]) -> SearchResult:
        """Return the best schedule within ``budget(baseline_peak_bytes)`` bytes.

        A budget of None asks for no extra time.
        """
        search = search_of(self, program)
        away = OffloadSearch(search)
        limit = budget(search.baseline.simulation.peak_bytes)
        fastest = search.least_time()
        # The least peak is searched before the budget's schedules and without the budget, so that a
        # budget of exactly that peak always succeeds; the search may find a lower one too.
        least_peak = search.least_peak()
        if limit is not None and limit < least_peak.simulation.peak_bytes:
            # Near its bound, what is named to a budget below that bound is low enough.
            if limit >= search.bounds.peak_bytes or search.is_small or not search.is_near_bound:
                return self._least(away, least_peak, limit)
        elif limit is not None and limit < fastest.simulation.peak_bytes:
            self._search_for(away, limit)
        return away.result(limit, away.least_peak(least_peak))

    def further(self, program: Program, found: SearchResult) -> SearchResult:
        """Return ``found``, or the result of a search below its floor where nothing fits its limit.

        There more of the forward is recomputed than any plan above the floor does; where kernels
        fuse, such plans may take more memory than planned.
        """
        if found.limit is None or found.best is not None or self._is_near_bound(found):
            return found
        options = replace(self, chain_recomputes=self.further_recomputes)
        away = OffloadSearch(search_of(options, program))
        away.search.least_time()
        least_peak = away.least_peak(away.search.lowest_reachable(away.search.least_peak()))
        if least_peak.simulation.peak_bytes >= found.least_peak.simulation.peak_bytes:
            return found
        if least_peak.simulation.peak_bytes <= found.limit:
            options._search_for(away, found.limit)
        return away.result(found.limit, least_peak)

    def _is_near_bound(self, found: SearchResult) -> bool:
        """Return whether the least peak found is near its lower bound."""
        near = (1 + self.near_peak) * found.peak_bound_bytes
        return _peak(found) <= near

    def _least(self, away: OffloadSearch, least_peak: Candidate, limit: int | None) -> SearchResult:
        """Return the best schedule within ``limit`` bytes after a search for the least peak.

        The limit is below ``least_peak``, which moves at high prices reach; None is the least peak.
        A limit below the lowest one reached is not searched for, so that no budget fits by luck
        which is below the least peak that others are told.
        """
        least_peak = away.least_peak(away.search.lowest_reachable(least_peak))
        least = least_peak.simulation.peak_bytes
        self._search_for(away, least if limit is None else max(limit, least))
        # A search within the least peak may find a lower one.
        least_peak = min(
            least_peak, away.search.lowest_peak(), key=lambda c: c.simulation.peak_bytes
        )
        return away.result(least_peak.simulation.peak_bytes if limit is None else limit, least_peak)

    def _search_for(self, away: OffloadSearch, limit: int) -> None:
        """Search as thoroughly as for a single budget."""
        away.search.fit(limit, self.factors)
        away.search.refine(limit, self.refined, self.perturbations, self.exact_states)
        away.search.approach(limit)
        away.fit(limit)

    def least_memory(self, program: Program, most_seconds: float) -> SearchResult:
        """Return the schedule of least peak whose extra time is at most ``most_seconds``.

        Its limit is that peak. With ``math.inf`` it is the fastest of the least peak. If even the
        fastest takes longer, the fastest is returned.
        """
        search = search_of(self, program)
        away = OffloadSearch(search)
        fastest = search.least_time()
        least_peak = search.least_peak()
        if math.isinf(most_seconds):
            return self._least(away, least_peak, None)
        limit = away.least_peak(least_peak).simulation.peak_bytes
        found = self._least_at(away, limit, most_seconds)
        if found is None:
            return away.result(fastest.simulation.peak_bytes, least_peak)
        low = search.bounds.peak_bytes - 1  # the greatest limit known, or found, to take too long
        if found.simulation.peak_bytes <= limit:
            # There time does not bind, and perhaps nowhere.
            least = self.least_memory(program, math.inf)
            if _seconds(least) <= most_seconds:
                return self._least_further(search, least, most_seconds)
        for _ in range(self.bisections - 1):
            peak = found.simulation.peak_bytes
            if peak > limit:
                low = limit
            # Halfway from the limit that takes too long to the peak that does not.
            limit = min(round((max(low, 1) * peak) ** 0.5), peak - 1)
            if limit <= low or peak <= (1 + self.tolerance) * low:
                break
            found = self._least_at(away, limit, most_seconds) or found
        return away.result(found.simulation.peak_bytes, least_peak)

    def _least_at(self, away: OffloadSearch, limit: int, most_seconds: float) -> Candidate | None:
        """Return the candidate of least peak in time, after a search within ``limit`` bytes."""
        search = away.search
        if search.bound_away(limit).seconds <= most_seconds:
            search.fit(limit, self.factors_along)
            search.refine(limit, self.refined, self.perturbations, self.exact_states_along)
            away.fit(limit)
        return search.least_within(most_seconds)

    def _least_further(
        self, search: LocalSearch, least: SearchResult, most_seconds: float
    ) -> SearchResult:
        """Return ``least``, or the result of recomputing more where there is time for more.

        That is where ``most_seconds`` are more than any schedule of a chain takes otherwise.
        """
        most = self.repaired_recomputes * search.forward_seconds
        if search.is_small or not 0 < most < most_seconds or self._is_near_bound(least):
            return least
        recomputes = min(most_seconds / search.forward_seconds, self.further_recomputes)
        options = replace(self, chain_recomputes=recomputes, evicted_recomputes=1.0)
        lower = options.least_memory(search.program, math.inf)
        is_in_time = _seconds(lower) <= most_seconds
        return min(least, lower, key=_peak) if is_in_time else least

    def frontier(
        self,
        program: Program,
        limits: Callable[[Candidate, Candidate], Sequence[int]],
        tick: Callable[[], object] = lambda: None,
    ) -> tuple[SearchResult, ...]:
        """Return the best schedules at ``limits(least_peak, baseline)``, ascending.

        All limits choose among all schedules seen, so that the time never rises with the limit.
        Limits below the least peak are searched :meth:`further`. ``tick`` is called once per limit.
        """
        search = search_of(self, program)
        away = OffloadSearch(search)
        search.least_time()
        least_peak = away.least_peak(search.lowest_reachable(search.least_peak()))
        chosen = sorted(limits(least_peak, search.baseline))
        # The plan of one limit is a good start for the next.
        refined, perturbations, factors = self.refined, self.perturbations, self.factors
        exact_states = self.exact_states
        if len(chosen) > self.short_frontier:
            refined, factors = self.refined_along, self.factors_along
            perturbations, exact_states = self.perturbations[:1], self.exact_states_along
        for limit in reversed(chosen):
            if limit >= least_peak.simulation.peak_bytes:
                search.fit(limit, factors)
                search.refine(limit, refined, perturbations, exact_states)
                away.fit(limit)
            tick()
        found = (away.result(limit, least_peak) for limit in chosen)
        return never_slower(self.further(program, each) for each in found)


def search_of(options: SearchOptions, program: Program) -> LocalSearch:
    """Return the search of a program; limits that nothing can exceed are none."""
    nbytes = program.tables.bytes
    can_exceed = any(nbytes[list(limit.storages)].sum() > limit.bytes for limit in program.limits)
    return (LimitedSearch if can_exceed else LocalSearch)(options, program)


def _peak(found: SearchResult) -> int:
    """Return the least peak found."""
    return found.least_peak.simulation.peak_bytes


def _seconds(found: SearchResult) -> float:
    """Return the extra time of the best schedule, infinite if there is none."""
    return math.inf if found.best is None else found.best.simulation.extra_seconds


def never_slower(results: Iterable[SearchResult]) -> tuple[SearchResult, ...]:
    """Return results at ascending limits, each with the best schedule of those up to its own.

    Searches below the floor (:meth:`PriceSearch.further`) are searches of their own.
    """
    found: list[SearchResult] = []
    best: Candidate | None = None
    for result in results:
        if best is not None and (result.best is None or best.rank < result.best.rank):
            result = replace(result, best=best)
        best = result.best
        found.append(result)
    return tuple(found)


def evenly_spaced(count: int, least_peak: Candidate, baseline: Candidate) -> tuple[int, ...]:
    """Return ``count`` limits from the least peak to the uncheckpointed one, evenly in logarithm.

    There is only one if the two peaks are equal.
    """
    low, high = least_peak.simulation.peak_bytes, baseline.simulation.peak_bytes
    if high <= low:
        return (low,)
    return (low, *(round(p) for p in between(max(low, 1), high, count)[1:-1]), high)
