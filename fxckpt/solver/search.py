"""The search: the least extra time whose simulated peak fits a budget in bytes.

Multi-start local search on Lagrange multipliers. The peak constraint is dualized into prices per
byte: one at the end of the forward, where all saved values are live, and a share of it at every
stage. A few prices and shares around the price of the lower bound are cut at several numbers of
stages. Cuts flip whole classes of identical layers at once, so the most promising schedules, over
the budget or under it, are then repaired by single moves: :mod:`~fxckpt.solver.moves.evict` lowers
the peak until it fits, :mod:`~fxckpt.solver.moves.retain` removes recomputes that the slack pays
for. The best schedule is perturbed a few times: evicted to less than the budget and repaired. Small
programs have random restarts too, and the smallest are solved exactly, by a dynamic program over
sets of live values or by an integer program. The simulator evaluates every schedule. A program with
limits on saved values is searched in parts, one for each choice of values within the limits
(:mod:`~fxckpt.solver.cuts.saved_limits`). The search ends after a fixed number of steps and reads
neither a clock nor true randomness, so that the same graph always has the same plan.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import chain, product
from random import Random

import numpy as np

from fxckpt.errors import BudgetInfeasible
from fxckpt.solver.cuts.saved_limits import SavedChoice, SavedLimits, exceeded
from fxckpt.solver.cuts.staged_cut import Layout, StagedCut
from fxckpt.solver.cuts.stages import StageBoundaries
from fxckpt.solver.exact.dynamic_program import DynamicProgram
from fxckpt.solver.exact.link_bound import bound_with_link
from fxckpt.solver.exact.lower_bounds import Bound, LowerBounds
from fxckpt.solver.exact.milp import Optimum, in_forward, optimum
from fxckpt.solver.moves.evict import Evict
from fxckpt.solver.moves.heuristics import Heuristics
from fxckpt.solver.moves.retain import Retain
from fxckpt.solver.moves.send_away import reachable_peak, send_away, send_between
from fxckpt.solver.program import Link, Program
from fxckpt.solver.schedule import Schedule, StageAssignment, emit, save_all, with_runs
from fxckpt.solver.simulate import Simulation, simulate
from fxckpt.utils.progress import tick

NEXT_BYTES = 100 * 2**20
"""Bytes beyond a limit at which a second bound is given."""
PRICE_STEP = 1.1
"""Ratio of neighboring prices in the grid of prices tried."""
AWAY_WORTH = 0.001
"""Share of the least peak that sending values away must lower it by, or the peak stays.

Where what remains at the peak cannot be away, small values at its edge can lower it by a few bytes,
for which the schedules of least memory would wait for copies as long as the step takes.
"""


@dataclass(frozen=True)
class Candidate:
    """A schedule with its memory and time."""

    schedule: Schedule
    simulation: Simulation

    @property
    def rank(self) -> tuple[float, int, int, int]:
        """Sort key, less is better: time, then bytes sent away, then peak, then saved bytes."""
        return (
            self.simulation.extra_seconds,
            self.simulation.away_bytes,
            self.simulation.peak_bytes,
            self.simulation.saved_bytes,
        )


@dataclass(frozen=True)
class SearchResult:
    """Result of a search within one limit."""

    limit: int | None
    """Budget in bytes; None asks for no extra time."""
    best: Candidate | None
    """Candidate of least extra time within the limit, or None if nothing fits."""
    least_peak: Candidate
    """Candidate of the least peak reached."""
    baseline: Candidate
    """The uncheckpointed schedule."""
    bound: Bound
    """Lower bound on the extra time of any plan within the limit."""
    next_bound: Bound
    """Lower bound for a limit that is greater by ``NEXT_BYTES``."""
    peak_bound_bytes: int
    """Lower bound on the peak of any plan."""
    binds: tuple[bool, ...] = ()
    """Whether each limit of the program on saved values binds."""
    least_seconds: float = 0.0
    """Least extra time of the plans seen, whatever their peak."""

    def reach_away(self, program: Program, storages: frozenset[int]) -> tuple[int, int]:
        """Return the bytes to be away, and the least peak then, of the plans at either end.

        Any of the storages may be away, as many as there are.
        """
        link = Link(math.inf, math.inf, sum(program.storages[s].bytes for s in storages), storages)
        program = replace(program, link=link)
        found = []
        for candidate in (self.least_peak, self.baseline):
            schedule = replace(candidate.schedule, away=())
            live = simulate(program, schedule).live
            sent = send_away(program, schedule, live, reachable_peak(program, schedule, live))
            assert sent is not None
            simulation = simulate(program, sent)
            found.append((simulation.peak_bytes, simulation.away_bytes))
        peak, away = min(found)
        return away, peak


@dataclass(frozen=True)
class PriceSearch:
    """Multi-start local search on Lagrange multipliers.

    The defaults are empirical; ``bench/planner.py`` prints their time and their quality.
    """

    stage_counts: tuple[int, ...] = (32, 64)
    """Numbers of stages that each price is tried with."""
    share: float = 0.01
    """Price at each stage as a share of that at the end of the forward."""
    factors: tuple[float, ...] = (1.0, 1.5, 2.5, 4.0)
    """Prices tried for one budget, in multiples of its lower bound's price."""
    factors_along: tuple[float, ...] = (1.5,)
    """``factors`` for each budget of a frontier of more than ``short_frontier`` points."""
    small_ops: int = 150
    """Most forward ops of a small program."""
    small_factors: tuple[float, ...] = (1.0, 1.5, 2.5, 4.0, 0.5, 0.25, 8.0, 16.0, 64.0)
    """``factors`` for small programs."""
    least_peak_shares: tuple[float, ...] = (0.01, 0.001)
    """Shares tried for the least peak."""
    least_peak_prices: int = 3
    """Number of prices tried for the least peak."""
    descents: int = 6
    """Most evictions that lower the least peak further."""
    refined: int = 6
    """Number of schedules repaired for one budget."""
    refined_along: int = 2
    """``refined`` for each budget of a frontier of more than ``short_frontier`` points."""
    short_frontier: int = 8
    """Most points of a frontier that is searched as thoroughly as a single budget."""
    perturbations: tuple[float, ...] = (0.9, 0.9, 0.97, 0.98)
    """Shares of the budget that the best schedule is evicted to before it is repaired."""
    restarts: int = 200
    """Number of random restarts for small programs."""
    restart_ops: int = 1500
    """Most restarts times forward ops."""
    noise: float = 1.5
    """Standard deviation of the logarithm of the random factors on the ops' seconds."""
    depths: tuple[float, ...] = (0.9, 0.7, 0.5, 0.97)
    """Shares of the budget that restarts evict to, in turn."""
    exact_states: int = 2**24
    """Most states for which a dynamic program is solved: about half a second and 100 MB."""
    exact_states_along: int = 2**22
    """``exact_states`` for each of many limits: those of a long frontier, or of a given time."""
    exact_size: int = 320
    """Most forward ops times backward ops for which an integer program is solved otherwise."""
    exact_nodes: int = 2000
    """Most nodes of the integer program's search tree."""
    offload_shares: tuple[float, ...] = (0.1, 0.25, 0.45, 0.7)
    """Peaks at which schedules are searched that send values away to fit a budget, as shares of
    the way from the budget to the uncheckpointed peak."""
    offload_depths: tuple[float, ...] = (0.85, 0.7)
    """Shares of the budget that values are sent away to fit, before recomputes are removed."""
    offload_rounds: int = 2
    """Number of times that peaks near that of the best such schedule are searched."""
    bisections: int = 10
    """Most limits tried for the least peak within a given time."""
    tolerance: float = 0.005
    """Relative distance to the lower bound at which the search stops."""
    cut: StagedCut = field(default_factory=StagedCut)
    """Solver of one choice of prices."""

    def __call__(self, program: Program, budget: Callable[[int], int | None]) -> SearchResult:
        """Return the best schedule within ``budget(baseline_peak_bytes)`` bytes.

        A budget of None asks for no extra time.
        """
        search = search_of(self, program)
        limit = budget(search.baseline.simulation.peak_bytes)
        fastest = search.least_time()
        # The least peak is searched before the budget's schedules and without the budget, so that a
        # budget of exactly that peak always succeeds; the search may find a lower one too.
        least_peak = search.least_peak()
        if limit is not None and search.bounds.peak_bytes <= limit < fastest.simulation.peak_bytes:
            search.fit(limit, self.factors)
            search.refine(limit, self.refined, self.perturbations, self.exact_states)
            search.offload(limit)
        return search.result(limit, search.least_peak_away(least_peak))

    def least_memory(self, program: Program, most_seconds: float) -> SearchResult:
        """Return the schedule of least peak whose extra time is at most ``most_seconds``.

        Its limit is that peak. With ``math.inf`` it is the fastest of the least peak. If even the
        fastest takes longer, the fastest is returned.
        """
        search = search_of(self, program)
        fastest = search.least_time()
        least_peak = search.least_peak()
        if math.isinf(most_seconds):  # as a limit of the least peak is searched
            least_peak = search.least_peak_away(least_peak)
            limit = least_peak.simulation.peak_bytes
            search.fit(limit, self.factors)
            search.refine(limit, self.refined, self.perturbations, self.exact_states)
            search.offload(limit)
            return search.result(limit, least_peak)
        low = search.bounds.peak_bytes - 1  # the greatest limit known, or found, to take too long
        limit = search.least_peak_away(least_peak).simulation.peak_bytes
        for _ in range(self.bisections):
            if search.bound_away(limit).seconds <= most_seconds:
                search.fit(limit, self.factors_along)
                search.refine(limit, self.refined, self.perturbations, self.exact_states_along)
                search.offload(limit)
            found = search.least_within(most_seconds)
            if found is None:
                return search.result(fastest.simulation.peak_bytes, least_peak)
            peak = found.simulation.peak_bytes
            if peak > limit:
                low = limit
            # Halfway from the limit that takes too long to the peak that does not.
            limit = min(round((max(low, 1) * peak) ** 0.5), peak - 1)
            if limit <= low or peak <= (1 + self.tolerance) * low:
                break
        found = search.least_within(most_seconds)
        assert found is not None
        return search.result(found.simulation.peak_bytes, least_peak)

    def frontier(
        self,
        program: Program,
        limits: Callable[[Candidate, Candidate], Sequence[int]],
        tick: Callable[[], object] = lambda: None,
    ) -> tuple[SearchResult, ...]:
        """Return the best schedules at ``limits(least_peak, baseline)``, ascending.

        All limits choose among all schedules seen, so that the time never rises with the limit.
        ``tick`` is called once per limit.
        """
        search = search_of(self, program)
        search.least_time()
        least_peak = search.least_peak_away(search.least_peak())
        chosen = sorted(limits(least_peak, search.baseline))
        # The plan of one limit is a good start for the next.
        refined, perturbations, factors = self.refined, self.perturbations, self.factors
        exact_states = self.exact_states
        if len(chosen) > self.short_frontier:
            refined, factors = self.refined_along, self.factors_along
            perturbations, exact_states = self.perturbations[:1], self.exact_states_along
        for limit in reversed(chosen):
            search.fit(limit, factors)
            search.refine(limit, refined, perturbations, exact_states)
            search.offload(limit)
            tick()
        return tuple(search.result(limit, least_peak) for limit in chosen)


def evenly_spaced(count: int, least_peak: Candidate, baseline: Candidate) -> tuple[int, ...]:
    """Return ``count`` limits from the least peak to the uncheckpointed one, evenly in logarithm.

    There is only one if the two peaks are equal.
    """
    low, high = least_peak.simulation.peak_bytes, baseline.simulation.peak_bytes
    if high <= low:
        return (low,)
    return (low, *(round(p) for p in between(max(low, 1), high, count)[1:-1]), high)


class Search:
    """All candidates seen for one program."""

    def __init__(self, options: PriceSearch, program: Program) -> None:
        self.options = options
        self.program = program
        self.boundaries = StageBoundaries(program)
        self.layouts: dict[int, Layout] = {}
        self.seen: dict[Schedule, Candidate] = {}
        self.legal: list[Candidate] = []
        """Candidates that save what may be saved; the uncheckpointed schedule may save more."""
        self.sending: list[Candidate] = []
        """Legal candidates with values sent away."""
        self.sent: set[tuple[Schedule, int]] = set()
        """Schedules of which values were sent away, and for which limit."""
        self.low, self.high = price_range(program)
        self.bounds = LowerBounds(program, self.low, self.high)
        self.tried: set[int] = set()
        """Prices tried, in steps of the price grid."""
        self.bound_at: dict[int, Bound] = {}
        self.baseline = self.evaluate(save_all(program))
        for schedule in Heuristics(program, self.boundaries)():
            self.evaluate(schedule)

    @cached_property
    def exact(self) -> DynamicProgram:
        """The dynamic program, solved if it is small."""
        return DynamicProgram(in_forward(self.program))

    def evaluate(self, schedule: Schedule) -> Candidate:
        """Return the candidate of ``schedule``, and remember it."""
        if schedule not in self.seen:
            tick()
            candidate = self.seen[schedule] = Candidate(schedule, simulate(self.program, schedule))
            if self.program.tables.is_savable[list(schedule.saved)].all() and not exceeded(
                self.program, schedule.saved
            ):
                self.legal.append(candidate)
        return self.seen[schedule]

    def within(self, limit: int) -> Iterator[Candidate]:
        """Yield the legal candidates within ``limit`` bytes."""
        return (c for c in self.legal if c.simulation.peak_bytes <= limit)

    def least_within(self, most_seconds: float) -> Candidate | None:
        """Return the legal candidate of least peak of at most ``most_seconds``, if any is."""
        return min(
            (
                c
                for c in chain(self.legal, self.sending)
                if c.simulation.extra_seconds <= most_seconds
            ),
            key=lambda c: (c.simulation.peak_bytes, c.rank),
            default=None,
        )

    def best(self, limit: int | None) -> Candidate | None:
        """Return the legal candidate of least rank within ``limit`` bytes, if any is.

        Bytes below the limit buy nothing, so that the least peak among the fastest does no harm.
        """
        if limit is None:
            return min(self.legal, key=lambda c: c.rank, default=None)
        sending = (c for c in self.sending if c.simulation.peak_bytes <= limit)
        return min(chain(self.within(limit), sending), key=lambda c: c.rank, default=None)

    def offload(self, limit: int) -> None:
        """Send values of the candidates away so that they fit the limit, if there is a link.

        The less time a candidate recomputes, the more of it has to be away; candidates of peaks
        between the limit and the uncheckpointed one are searched too, then those of peaks near the
        best one's.
        """
        if self.program.link is None:
            return
        most = max(limit, self.baseline.simulation.peak_bytes)
        peaks = [limit, most]
        for share in self.options.offload_shares:
            peaks.append(round(limit + share * (most - limit)))
            self._search_at(peaks[-1])
        self._send_all(limit)
        for _ in range(self.options.offload_rounds):
            best = self.best(limit)
            if best is None or not best.schedule.away:
                break
            peak = simulate(self.program, replace(best.schedule, away=())).peak_bytes
            peaks.append(peak)
            near = {max((p for p in peaks if p < peak), default=limit)}
            near.add(min((p for p in peaks if p > peak), default=most))
            for other in near - {peak}:
                peaks.append((peak + other) // 2)
                self._search_at(peaks[-1])
            self._send_all(limit)
            # Schedules that fit less leave room for values that are recomputed.
            for share in self.options.offload_depths:
                self._send_all(round(share * limit))
            # Those of the greater limits of a frontier take less time, and do not fit.
            fitting = (c for c in self.sending if c.simulation.peak_bytes <= limit)
            for sent in sorted(fitting, key=lambda c: c.rank)[: self.options.refined]:
                self._retain_beside(sent, limit)

    def _search_at(self, limit: int) -> None:
        """Search schedules within a limit that is not the one asked for.

        Many different schedules are better starts for sending than the optimum without a link.
        """
        self.fit(limit, (1.0,))
        self.refine(limit, self.options.refined_along, (), None)

    def _send_all(self, limit: int) -> None:
        """Send values away of every candidate that is not too slow without a wait."""
        best = self.best(limit)
        least = math.inf if best is None else best.simulation.extra_seconds
        for candidate in sorted(self.legal, key=lambda c: c.rank):
            simulation = candidate.simulation
            if simulation.extra_seconds >= least:
                break
            if simulation.peak_bytes <= limit or (candidate.schedule, limit) in self.sent:
                continue
            sent = self._sent(candidate, limit)
            if sent is not None:
                least = min(least, sent.simulation.extra_seconds)

    def _retain_beside(self, sent: Candidate, limit: int) -> None:
        """Remove recomputes where the values that are away leave room, as long as that gains."""
        while sent.simulation.peak_bytes <= limit:
            schedule = replace(sent.schedule, away=())
            retained = Retain(limit)(self.program, schedule, sent.simulation)
            if retained == schedule:
                return
            again = self._sent(self.evaluate(retained), limit)
            if again is None or again.rank >= sent.rank:
                return
            sent = again

    def with_required(self, best: Candidate | None) -> Candidate | None:
        """Return a candidate with the values sent away that must be."""
        link = self.program.link
        if best is None or link is None or best.schedule.away or not link.required:
            return best
        return self._sent(best, best.simulation.peak_bytes)

    def _sent(self, candidate: Candidate, limit: int) -> Candidate | None:
        """Return a candidate with values sent away to fit the limit, and remember it."""
        self.sent.add((candidate.schedule, limit))
        schedule = send_away(self.program, candidate.schedule, candidate.simulation.live, limit)
        return None if schedule is None else self._remember_sent(schedule)

    def sent_between(self, candidate: Candidate, share: float) -> Candidate:
        """Return a candidate with a share of its bytes away between its halves, remembered."""
        live = candidate.simulation.live
        schedule = replace(candidate.schedule, away=())
        return self._remember_sent(send_between(self.program, schedule, live, share))

    def _remember_sent(self, schedule: Schedule) -> Candidate:
        tick()
        sent = Candidate(schedule, simulate(self.program, schedule))
        self.sending.append(sent)
        return sent

    def least_peak_away(self, least_peak: Candidate) -> Candidate:
        """Return the candidate of least peak with values sent away, or ``least_peak`` without.

        Less than what the values allow may fit the memory that they are sent to. Peaks that are
        lower by less than :data:`AWAY_WORTH` are not worth the waits.
        """
        program = self.program
        if program.link is None:
            return least_peak

        def within(candidate: Candidate) -> int:
            live = candidate.simulation.live
            return max(reachable_peak(program, candidate.schedule, live), self.bounds.peak_bytes)

        best = least_peak
        for candidate in sorted(self.legal, key=within)[: self.options.refined]:
            low, high = within(candidate), best.simulation.peak_bytes
            while low < high:
                sent = self._sent(candidate, low)
                if sent is not None and sent.simulation.peak_bytes < high:
                    best, high = sent, sent.simulation.peak_bytes
                    break
                low = (low + high + 1) // 2
        most = (1 - AWAY_WORTH) * least_peak.simulation.peak_bytes
        return best if best.simulation.peak_bytes <= most else least_peak

    def result(self, limit: int | None, least_peak: Candidate) -> SearchResult:
        """Return the best candidate within ``limit`` bytes, with its bounds."""
        best = self.with_required(self.best(limit))
        bound = next_bound = Bound(0.0, 0.0)
        if best is not None and best.simulation.extra_seconds > 0:
            bound = self.bound_away(limit)
            next_bound = bound if limit is None else self.bound_away(limit + NEXT_BYTES)
        return SearchResult(
            limit,
            best,
            least_peak,
            self.baseline,
            bound,
            next_bound,
            self.bounds.peak_bytes,
            self.binds(bound),
            min((c.simulation.extra_seconds for c in self.legal), default=0.0),
        )

    def binds(self, bound: Bound) -> tuple[bool, ...]:
        """Return whether each limit of the program binds at the price of a bound."""
        return ()

    def layout(self, count: int) -> Layout:
        """Return the layout of about ``count`` stages."""
        if count not in self.layouts:
            starts = self.boundaries.stages(count)
            self.layouts[count] = self.options.cut.lay_out(self.program, starts)
        return self.layouts[count]

    def cut(
        self, count: int, prices: Sequence[tuple[float, float]], sweeps: int | None = None
    ) -> list[list[StageAssignment]]:
        """Return the assignments to about ``count`` stages at each of some prices.

        Each is given as the price at the end of the forward, and the share of it at every stage.
        """
        cut = self.options.cut if sweeps is None else replace(self.options.cut, sweeps=sweeps)
        layout = self.layout(count)
        return cut(
            layout, [[price, *[price * share] * len(layout.starts)] for price, share in prices]
        )

    def evaluate_all(self, assignments: Iterable[Iterable[StageAssignment]]) -> None:
        """Evaluate the schedules of all assignments."""
        for assignment in chain.from_iterable(assignments):
            self.evaluate(emit(self.program, assignment))

    def least_time(self) -> Candidate:
        """Return the candidate of least extra time, and of least peak among those."""
        self.evaluate_all(self.cut(self.options.stage_counts[0], [(self.low * 1e-6, 1.0)]))
        return min(self.legal, key=lambda c: c.rank)

    def least_peak(self) -> Candidate:
        """Return the candidate of least peak: at high prices, then evicted further.

        There one sweep mostly has a lower peak than two.
        """
        prices = between((self.low * self.high) ** 0.5, self.high, self.options.least_peak_prices)
        for count in self.options.stage_counts:
            self.evaluate_all(
                self.cut(count, list(product(prices, self.options.least_peak_shares)), sweeps=1)
            )
        least = self._lowest_peak()
        for _ in range(self.options.descents):
            peak = least.simulation.peak_bytes
            self.evaluate(
                Evict(max(self.bounds.peak_bytes, peak * 19 // 20))(
                    self.program, least.schedule, least.simulation
                )
            )
            least = self._lowest_peak()
            if least.simulation.peak_bytes >= peak:
                break
        return least

    def _lowest_peak(self) -> Candidate:
        """Return the legal candidate of least peak seen so far."""
        return min(self.legal, key=lambda c: (c.simulation.peak_bytes, c.rank))

    def fit(self, limit: int, factors: Sequence[float]) -> None:
        """Cut at prices around that of the lower bound at ``limit``."""
        price = self.bound(limit).price or self.low
        factors = (
            factors
            if len(self.program.ops) > self.options.small_ops
            else self.options.small_factors
        )
        self._try_prices(price * factor for factor in factors)

    def _try_prices(self, prices: Iterable[float]) -> None:
        """Cut at every number of stages, with total prices rounded to a grid.

        The total price is that of a value saved through half of the stages. Near budgets share the
        points of the grid.
        """
        steps = [
            s
            for s in dict.fromkeys(
                round(math.log(price) / math.log(PRICE_STEP)) for price in prices
            )
            if s not in self.tried
        ]
        self.tried.update(steps)
        if steps:
            share = self.options.share
            assignments = [
                self.cut(n, [(PRICE_STEP**step / (1 + share * n / 2), share) for step in steps])
                for n in self.options.stage_counts
            ]
            # All stage counts of a price before the next price: of equal candidates the first wins.
            self.evaluate_all(chain.from_iterable(zip(*assignments, strict=True)))

    def refine(
        self, limit: int, count: int, perturbations: Sequence[float], exact_states: int | None
    ) -> None:
        """Repair the most promising schedules, then perturb the best, up to near the bound.

        Small programs are solved exactly, or have random restarts; with ``exact_states`` of None
        they have restarts alone.
        """
        target = (1 + self.options.tolerance) * self.bound(limit).seconds
        for candidate in self._promising(limit, count):
            if self._least_seconds(limit) <= target:
                return
            self._repair(candidate, limit, limit)
        for share in perturbations:
            best = self.best(limit)
            if best is None or best.simulation.extra_seconds <= target:
                return
            self._repair(best, int(limit * share), limit)
        if self._least_seconds(limit) <= target:
            return
        if exact_states is None:
            self._restart(limit, target)
        elif self.exact.size <= exact_states:
            self._evaluate_exact(limit)
        elif len(self.program.ops) * len(self.program.backward) <= self.options.exact_size:
            nodes = self.options.exact_nodes
            self._evaluate_optimum(
                optimum(self.exact.program, limit, seconds=math.inf, nodes=nodes)
            )
        else:
            self._restart(limit, target)

    def _evaluate_exact(self, limit: int) -> None:
        """Evaluate the schedule of the dynamic program.

        It is solved for a bound first, whose schedule is the best there is if it fits.
        """
        if any(self.program.forward_takes):
            found = self._evaluate_optimum(replace(self.exact, takes_saved=True).optimum(limit))
            if found is None or found.simulation.peak_bytes <= limit:
                return
        self._evaluate_optimum(self.exact.optimum(limit))

    def _evaluate_optimum(self, optimum: Optimum) -> Candidate | None:
        """Evaluate and return the schedule of an exact solver, if it has one."""
        schedule = optimum.schedule
        if schedule is None:
            return None
        # An op on either side takes no extra time if the forward does not depend on it.
        return self.evaluate(with_runs(self.program, schedule.runs, schedule.before))

    def _restart(self, limit: int, target: float) -> None:
        """Repair with randomized seconds, beyond the reach of single moves.

        Compare GRASP (Feo and Resende 1995).
        """
        options, random, ops = self.options, Random(0), max(len(self.program.ops), 1)
        if ops > options.small_ops:
            return
        # Ops of no time have a little weight too, so that their order varies.
        plain = [
            s + self.program.step_seconds / 1000
            for s in self.program.tables.seconds[: len(self.program.ops)]
        ]
        for k in range(min(options.restarts, options.restart_ops // ops)):
            best = self.best(limit)
            if best is None or best.simulation.extra_seconds <= target:
                return
            start = random.choice(self.legal) if k % 3 == 0 else best
            if k % 2:
                seconds = list(plain)
                for o in random.choices(range(ops), k=random.randint(1, 3)):
                    seconds[o] *= random.choice((1e-3, 1e3))
            else:
                seconds = [s * random.lognormvariate(0, options.noise) for s in plain]
            depth = options.depths[k % len(options.depths)]
            self._repair(start, int(limit * depth), limit, seconds)

    def _least_seconds(self, limit: int) -> float:
        """Return the least extra time within ``limit`` bytes, infinite if nothing fits."""
        return min((c.simulation.extra_seconds for c in self.within(limit)), default=math.inf)

    def bound(self, limit: int | None) -> Bound:
        """Return the lower bound on the extra time within ``limit`` bytes."""
        if limit is None:
            return Bound(0.0, 0.0)
        if limit not in self.bound_at:
            self.bound_at[limit] = self.bounds.seconds(limit)
        return self.bound_at[limit]

    def bound_away(self, limit: int | None) -> Bound:
        """Return the lower bound on the extra time if saved values may be sent away."""
        if limit is None or self.program.link is None:
            return self.bound(limit)
        return bound_with_link(self.program, lambda more: self.bound(limit + more))

    def _promising(self, limit: int, count: int) -> list[Candidate]:
        """Return the candidates of least Lagrangian at the bound's price and at four times it."""
        price = self.bound(limit).price or self.low
        chosen: dict[Schedule, Candidate] = {}
        for times in (1.0, 4.0):
            scores: dict[float, Candidate] = {}
            for c in self.legal:
                scores.setdefault(
                    c.simulation.extra_seconds + times * price * (c.simulation.peak_bytes - limit),
                    c,
                )
            chosen.update(
                (scores[score].schedule, scores[score])
                for score in sorted(scores)[: count // 2 or 1]
            )
        return list(chosen.values())

    def _repair(
        self, candidate: Candidate, low: int, limit: int, seconds: Sequence[float] | None = None
    ) -> None:
        """Evict to at most ``low`` bytes, as far as possible, then retain up to ``limit`` bytes.

        ``seconds`` perturbs the order of the moves; the last pass retains by the true seconds.
        """
        program = self.program
        while candidate.simulation.peak_bytes > low:
            evicted = self.evaluate(
                Evict(low, seconds)(program, candidate.schedule, candidate.simulation)
            )
            if evicted.simulation.peak_bytes >= candidate.simulation.peak_bytes:
                break
            candidate = evicted
        if candidate.simulation.peak_bytes <= limit and seconds is not None:
            candidate = self._retained(candidate, limit, seconds)
        if candidate.simulation.peak_bytes <= limit:
            self._retained(candidate, limit, None)

    def _retained(
        self, candidate: Candidate, limit: int, seconds: Sequence[float] | None
    ) -> Candidate:
        """Retain within ``limit`` bytes until nothing more is gained."""
        while True:
            retained = self.evaluate(
                Retain(limit, seconds)(self.program, candidate.schedule, candidate.simulation)
            )
            if retained.simulation.peak_bytes > limit or len(retained.schedule.runs) >= len(
                candidate.schedule.runs
            ):
                return candidate
            candidate = retained


class _LimitedSearch(Search):
    """All candidates seen for one program with limits on saved values.

    Each part is a search in which only a choice of values within the limits may be saved. The
    first choices do not depend on the budget; more are made at its price.
    """

    def __init__(self, options: PriceSearch, program: Program) -> None:
        super().__init__(options, program)
        self.limits = SavedLimits(program, self.low, self.high)
        self.parts: dict[frozenset[int], Search] = {}
        self.prices: dict[float, tuple[float, ...]] = {}
        """Prices of the limits found, by the price of all saved values."""

    def _open(self, price: float) -> None:
        """Add the part of the choice at a price of all saved values."""
        if price in self.prices:
            return
        allowed = self.limits.choose(price)
        self.prices[price] = (0.0,) * len(self.program.limits)
        if allowed is not None:
            self.prices[price] = allowed.prices
            self._add(allowed.choice)

    def _add(self, choice: SavedChoice) -> None:
        """Add the part of a choice, with what else its recomputes leave room for."""
        candidate = self.evaluate(choice.schedule(self.program))
        if candidate in self.legal:
            candidate = self._retained(candidate, candidate.simulation.peak_bytes, None)
            candidate = self._retained(candidate, self._no_limit, None)
        saved = frozenset(candidate.schedule.saved)
        if saved in self.parts or exceeded(self.program, saved):
            return
        mask = np.zeros(len(self.program.storages), dtype=bool)
        mask[list(saved)] = True
        self.parts[saved] = Search(self.options, self.limits.restricted(mask))

    @property
    def _no_limit(self) -> int:
        """A peak that no schedule exceeds."""
        tables = self.program.tables
        return int(tables.bytes.sum() + tables.workspace_bytes.sum() + tables.written_bytes.sum())

    def _gather(self) -> None:
        """Take over the candidates of all parts."""
        for part in self.parts.values():
            for candidate in part.legal:
                if candidate.schedule not in self.seen:
                    self.seen[candidate.schedule] = candidate
                    self.legal.append(candidate)

    def least_time(self) -> Candidate:
        """Return the candidate of least extra time, and of least peak among those."""
        self._open(0.0)
        self._add(self.limits.fewest())
        if not self.parts:
            raise infeasible_together(self.program, self.limits.fewest())
        for part in self.parts.values():
            part.least_time()
        self._gather()
        self._solve_if_small(self._no_limit)
        return min(self.legal, key=lambda c: c.rank)

    def least_peak(self) -> Candidate:
        """Return the candidate of least peak."""
        self._open((self.low * self.high) ** 0.5)
        for part in self.parts.values():
            part.least_peak()
        self._gather()
        return self._lowest_peak()

    def fit(self, limit: int, factors: Sequence[float]) -> None:
        """Cut at prices around that of the lower bound at ``limit``."""
        price = self.bound(limit).price or self.low
        for factor in (1.0, 4.0):
            self._open(price * factor)
        for part in self.parts.values():
            part.fit(limit, factors)
        self._gather()

    def refine(
        self, limit: int, count: int, perturbations: Sequence[float], exact_states: int | None
    ) -> None:
        """Refine each part, then retain what the limits leave room for."""
        for part in self.parts.values():
            part.refine(limit, count, perturbations, exact_states)
        self._gather()
        if (best := self.best(limit)) is not None:
            self._retained(best, limit, None)
        if exact_states is not None:
            self._solve_if_small(limit)

    def _solve_if_small(self, limit: int) -> None:
        """Evaluate the schedule of an exact solver; both know the limits."""
        options, target = self.options, (1 + self.options.tolerance) * self.bound(limit).seconds
        if self._least_seconds(limit) <= target:
            return
        if self.exact.size <= options.exact_states_along:
            self._evaluate_exact(limit)
        elif len(self.program.ops) * len(self.program.backward) <= options.exact_size:
            nodes = options.exact_nodes
            self._evaluate_optimum(
                optimum(self.exact.program, limit, seconds=math.inf, nodes=nodes)
            )

    def bound(self, limit: int | None) -> Bound:
        """Return the greatest of the bounds by the peak and by the limits on saved values."""
        by_peak = super().bound(limit)
        if limit is None:
            room = None
        else:
            outputs = int(self.program.tables.bytes[self.program.tables.is_output].sum())
            room = limit - outputs - self.program.tangent_bytes
        return Bound(max(by_peak.seconds, self.limits.bound(room)), by_peak.price)

    def binds(self, bound: Bound) -> tuple[bool, ...]:
        """Return whether each limit of the program binds at the price of a bound."""
        self._open(bound.price)
        return self.limits.binding(bound.price, self.prices[bound.price])


def search_of(options: PriceSearch, program: Program) -> Search:
    """Return the search of a program; limits that nothing can exceed are none."""
    nbytes = program.tables.bytes
    can_exceed = any(nbytes[list(limit.storages)].sum() > limit.bytes for limit in program.limits)
    return (_LimitedSearch if can_exceed else Search)(options, program)


def infeasible_together(program: Program, fewest: SavedChoice) -> BudgetInfeasible:
    """Return the error for limits that no plan was found to keep, with the fewest bytes found."""
    saved = np.flatnonzero(fewest.saved).tolist()
    over = exceeded(program, saved) or program.limits
    tables = program.tables
    parts = []
    for limit in over:
        nbytes = sum(int(tables.bytes[s]) for s in {*limit.storages} & {*saved})
        parts.append(f"{limit.name} allows {limit.bytes} bytes, and {nbytes} are saved")
    return BudgetInfeasible(
        "the budgets of these regions cannot be kept together: " + "; ".join(parts) + " in the "
        "plan that saves the fewest bytes of all of them. Raise them to that.",
        floor_bytes=sum(
            int(tables.bytes[s]) for limit in over for s in {*limit.storages} & {*saved}
        ),
        budget_bytes=sum(limit.bytes for limit in over),
    )


def price_range(program: Program) -> tuple[float, float]:
    """Return about the seconds per byte below which nothing is recomputed, and above which all is.

    They are the least and the greatest seconds per byte of any op: the former divided by 100, for
    many stages share it, the latter times 100, for chains of ops.
    """
    tables = program.tables
    count = len(program.ops)
    costs = (tables.seconds[:count] > 0) & (tables.written_bytes[:count] > 0)
    if not costs.any():
        return 1e-15, 1e-6
    rates = tables.seconds[:count][costs] / tables.written_bytes[:count][costs]
    return float(rates.min()) / 100, float(rates.max()) * 100


def between(low: float, high: float, count: int) -> list[float]:
    """Return ``count`` prices from low to high, evenly spaced in their logarithm."""
    ratio = (high / low) ** (1 / (count - 1))
    return [low * ratio**i for i in range(count)]
