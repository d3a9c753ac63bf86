"""The price search: the least extra time whose simulated peak fits a budget in bytes.

The peak constraint is dualized into prices per byte: one at the forward's end, where all that is saved is live, and a share of it at every stage.
Around the price of the lower bound a few prices and shares are cut at several numbers of stages. Cuts flip whole classes of identical layers at
once, so the most promising schedules, over the budget or under it, are then brought to it by single moves: :mod:`~fxckpt.solver.evict` gives up
copies until the peak fits, :mod:`~fxckpt.solver.retain` drops runs that the slack pays for. The best is shaken a few times: trimmed below the
budget and filled again; small programs are searched from random starts too, and the smallest by an integer program. The simulator judges
every schedule. The search ends after a fixed number of steps and reads no clock and no true randomness, so the same graph always gets the
same plan.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, product
from random import Random

from fxckpt.solver.evict import Evict
from fxckpt.solver.heuristics import Heuristics
from fxckpt.solver.lower_bounds import Bound, LowerBounds
from fxckpt.solver.milp import in_forward, optimum
from fxckpt.solver.program import Program
from fxckpt.solver.retain import Retain
from fxckpt.solver.schedule import Schedule, StageAssignment, emit, save_all, with_runs
from fxckpt.solver.simulate import Simulation, simulate
from fxckpt.solver.staged_cut import Layout, StagedCut
from fxckpt.solver.stages import StageBoundaries

NEXT_BYTES = 100 * 2**20
PRICE_STEP = 1.1


@dataclass(frozen=True)
class Candidate:
    """A schedule and what it costs."""

    schedule: Schedule
    simulation: Simulation

    @property
    def rank(self) -> tuple[float, int, int]:
        """Less is better: time first, then peak, then saved bytes."""
        return (
            self.simulation.extra_seconds,
            self.simulation.peak_bytes,
            self.simulation.saved_bytes,
        )


@dataclass(frozen=True)
class SearchResult:
    """What a search found within one limit. ``best`` is None if nothing fits."""

    limit: int | None
    """Bytes; None asks for no extra time."""
    best: Candidate | None
    floor: Candidate
    """The least peak reached."""
    baseline: Candidate
    """The uncheckpointed schedule."""
    bound: Bound
    """No plan within the limit takes less extra time."""
    next_bound: Bound
    """The same for a limit that is greater by ``NEXT_BYTES``."""
    floor_bound_bytes: int
    """No plan at all has a lower peak."""


@dataclass(frozen=True)
class PriceSearch:
    """Search prices for schedules within a budget. The numbers are guesses; bench/planner.py prints what they come to in time and in quality."""

    stage_counts: tuple[int, ...] = (32, 64)
    share: float = 0.01
    """Price of each stage beside that of the forward's end."""
    factors: tuple[float, ...] = (1.0, 1.5, 2.5, 4.0)
    """Prices tried for one budget, beside the price of its lower bound."""
    factors_along: tuple[float, ...] = (1.5,)
    """The same for each budget of a frontier of more than ``few`` points."""
    small_ops: int = 150
    small_factors: tuple[float, ...] = (1.0, 1.5, 2.5, 4.0, 0.5, 0.25, 8.0, 16.0, 64.0)
    """The same for programs of at most ``small_ops`` forward ops."""
    floor_shares: tuple[float, ...] = (0.01, 0.001)
    floor_prices: int = 3
    descents: int = 6
    """How often the floor is trimmed further."""
    refined: int = 6
    """How many schedules are brought to a budget by single moves."""
    refined_along: int = 2
    """The same for each budget of a frontier of more than ``few`` points."""
    few: int = 8
    shakes: tuple[float, ...] = (0.9, 0.9, 0.97, 0.98)
    """Shares of the budget that the best schedule is trimmed to before it is filled again."""
    restarts: int = 200
    """How often a small program's schedules are brought to a budget by moves in an order drawn at random."""
    restart_ops: int = 1500
    """Restarts times forward ops at most."""
    noise: float = 1.5
    """Standard deviation of the logarithm of what the ops' seconds are multiplied by for a restart."""
    depths: tuple[float, ...] = (0.9, 0.7, 0.5, 0.97)
    """Shares of the budget that restarts trim to, in turn."""
    exact_size: int = 320
    """Forward ops times backward ops up to which an integer program is solved."""
    exact_nodes: int = 2000
    """Nodes of its search tree at most."""
    enough: float = 0.005
    """No more moves for a schedule that is certified to be this near to the best, relatively."""
    cut: StagedCut = field(default_factory=StagedCut)

    def __call__(self, program: Program, budget: Callable[[int], int | None]) -> SearchResult:
        """Return the best schedule within ``budget(baseline_peak_bytes)`` bytes; None asks for no extra time."""
        search = _Search(self, program)
        limit = budget(search.baseline.simulation.peak_bytes)
        free = search.free()
        floor = search.floor()
        # The floor is found before and without the budget, so that asking for just the floor always succeeds; less may be found too.
        if limit is not None and search.bounds.peak_bytes <= limit < free.simulation.peak_bytes:
            search.fit(limit, self.factors)
            search.refine(limit, self.refined, self.shakes)
        return search.found(limit, floor)

    def frontier(
        self,
        program: Program,
        limits: Callable[[Candidate, Candidate], Sequence[int]],
        tick: Callable[[], object] = lambda: None,
    ) -> tuple[SearchResult, ...]:
        """Return the best schedules at ``limits(floor, baseline)``, ascending. ``tick`` is called once a limit.

        All limits choose from all schedules seen, so the time never rises with the limit.
        """
        search = _Search(self, program)
        search.free()
        floor = search.floor()
        chosen = sorted(limits(floor, search.baseline))
        # The plan of one limit is a good start for the next.
        refined, shakes, factors = self.refined, self.shakes, self.factors
        if len(chosen) > self.few:
            refined, shakes, factors = self.refined_along, self.shakes[:1], self.factors_along
        for limit in reversed(chosen):
            search.fit(limit, factors)
            search.refine(limit, refined, shakes)
            tick()
        return tuple(search.found(limit, floor) for limit in chosen)


def evenly_spaced(count: int, floor: Candidate, baseline: Candidate) -> tuple[int, ...]:
    """Return ``count`` limits from the floor's peak to the uncheckpointed one, evenly spaced in their logarithm; one if the two are the same."""
    low, high = floor.simulation.peak_bytes, baseline.simulation.peak_bytes
    if high <= low:
        return (low,)
    return (low, *(round(p) for p in _between(max(low, 1), high, count)[1:-1]), high)


class _Search:
    """All candidates seen for one program."""

    def __init__(self, options: PriceSearch, program: Program) -> None:
        self.options = options
        self.program = program
        self.places = StageBoundaries(program)
        self.layouts: dict[int, Layout] = {}
        self.seen: dict[Schedule, Candidate] = {}
        self.legal: list[Candidate] = []
        """Those that save nothing they must not; the uncheckpointed schedule may."""
        self.low, self.high = price_range(program)
        self.bounds = LowerBounds(program, self.low, self.high)
        self.tried: set[int] = set()
        """Logarithms of prices."""
        self.bound_at: dict[int, Bound] = {}
        self.baseline = self.judge(save_all(program))
        for schedule in Heuristics(program, self.places)():
            self.judge(schedule)

    def judge(self, schedule: Schedule) -> Candidate:
        if schedule not in self.seen:
            candidate = self.seen[schedule] = Candidate(schedule, simulate(self.program, schedule))
            if self.program.tables.is_savable[list(schedule.saved)].all():
                self.legal.append(candidate)
        return self.seen[schedule]

    def within(self, limit: int) -> Iterator[Candidate]:
        return (c for c in self.legal if c.simulation.peak_bytes <= limit)

    def found(self, limit: int | None, floor: Candidate) -> SearchResult:
        """Return the best seen. Bytes below the limit buy nothing: of the fastest the one of least peak is as good as any."""
        candidates = self.legal if limit is None else self.within(limit)
        best = min(candidates, key=lambda c: c.rank, default=None)
        bound = next_bound = Bound(0.0, 0.0)
        if best is not None and limit is not None and best.simulation.extra_seconds > 0:
            bound, next_bound = self.bound(limit), self.bound(limit + NEXT_BYTES)
        return SearchResult(
            limit, best, floor, self.baseline, bound, next_bound, self.bounds.peak_bytes
        )

    def layout(self, count: int) -> Layout:
        if count not in self.layouts:
            self.layouts[count] = self.options.cut.lay_out(self.program, self.places.stages(count))
        return self.layouts[count]

    def shaped(
        self, count: int, shapes: Sequence[tuple[float, float]], sweeps: int | None = None
    ) -> list[list[StageAssignment]]:
        """Return the decisions at some prices at the forward's end, each with a share of it that is the price of every stage."""
        cut = self.options.cut if sweeps is None else replace(self.options.cut, sweeps=sweeps)
        layout = self.layout(count)
        return cut(
            layout, [[price, *[price * share] * len(layout.starts)] for price, share in shapes]
        )

    def judge_all(self, decided: Iterable[Iterable[StageAssignment]]) -> None:
        for decisions in chain.from_iterable(decided):
            self.judge(emit(self.program, decisions))

    def free(self) -> Candidate:
        """The least extra time there is, and the least peak at it."""
        self.judge_all(self.shaped(self.options.stage_counts[0], [(self.low * 1e-6, 1.0)]))
        return min(self.legal, key=lambda c: c.rank)

    def floor(self) -> Candidate:
        """The least peak of any schedule seen: at high prices, where one sweep mostly gives less than two, then trimmed further."""
        prices = _between((self.low * self.high) ** 0.5, self.high, self.options.floor_prices)
        for count in self.options.stage_counts:
            self.judge_all(
                self.shaped(count, list(product(prices, self.options.floor_shares)), sweeps=1)
            )
        least = self._least_peak()
        for _ in range(self.options.descents):
            peak = least.simulation.peak_bytes
            self.judge(
                Evict(max(self.bounds.peak_bytes, peak * 19 // 20))(
                    self.program, least.schedule, least.simulation
                )
            )
            least = self._least_peak()
            if least.simulation.peak_bytes >= peak:
                break
        return least

    def _least_peak(self) -> Candidate:
        return min(self.legal, key=lambda c: (c.simulation.peak_bytes, c.rank))

    def fit(self, limit: int, factors: Sequence[float]) -> None:
        """Look for schedules about ``limit``."""
        price = self.bound(limit).price or self.low
        factors = (
            factors
            if len(self.program.ops) > self.options.small_ops
            else self.options.small_factors
        )
        self._shapes(price * factor for factor in factors)

    def _shapes(self, prices: Iterable[float]) -> None:
        """Try every number of stages at prices that a value saved through half the stages pays, rounded so that near budgets share them."""
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
            shapes = {
                n: [(PRICE_STEP**step / (1 + share * n / 2), share) for step in steps]
                for n in self.options.stage_counts
            }
            decided = [self.shaped(n, shapes[n]) for n in self.options.stage_counts]
            # All stage counts of a price before the next price: of equals the first one counts.
            self.judge_all(chain.from_iterable(zip(*decided, strict=True)))

    def refine(self, limit: int, count: int, shakes: Sequence[float]) -> None:
        """Bring the most promising schedules to ``limit`` by single moves."""
        enough = (1 + self.options.enough) * self.bound(limit).seconds
        for candidate in self._promising(limit, count):
            if self._best(limit) <= enough:
                return
            self._bring(candidate, limit, limit)
        for share in shakes:
            best = min(self.within(limit), key=lambda c: c.rank, default=None)
            if best is None or best.simulation.extra_seconds <= enough:
                return
            self._bring(best, int(limit * share), limit)
        if len(self.program.ops) * len(self.program.backward) <= self.options.exact_size:
            self._solve(limit, enough)
        else:
            self._restart(limit, enough)

    def _solve(self, limit: int, enough: float) -> None:
        """Look for the optimum itself."""
        if self._best(limit) <= enough:
            return
        schedule = optimum(
            in_forward(self.program), limit, seconds=math.inf, nodes=self.options.exact_nodes
        ).schedule
        if schedule is not None:
            # An op that may run on either side costs nothing if the forward has no need of it.
            self.judge(with_runs(self.program, schedule.runs, schedule.before))

    def _restart(self, limit: int, enough: float) -> None:
        """Look farther from what single moves reach (compare GRASP, Feo and Resende 1995)."""
        options, random, ops = self.options, Random(0), max(len(self.program.ops), 1)
        # What is free has a little weight too, so that it takes turns.
        plain = [
            s + self.program.step_seconds / 1000
            for s in self.program.tables.seconds[: len(self.program.ops)]
        ]
        for k in range(
            min(options.restarts, options.restart_ops // ops) if ops <= options.small_ops else 0
        ):
            best = min(self.within(limit), key=lambda c: c.rank, default=None)
            if best is None or best.simulation.extra_seconds <= enough:
                return
            start = random.choice(self.legal) if k % 3 == 0 else best
            if k % 2:
                seconds = list(plain)
                for o in random.choices(range(ops), k=random.randint(1, 3)):
                    seconds[o] *= random.choice((1e-3, 1e3))
            else:
                seconds = [s * random.lognormvariate(0, options.noise) for s in plain]
            self._bring(start, int(limit * options.depths[k % len(options.depths)]), limit, seconds)

    def _best(self, limit: int) -> float:
        return min((c.simulation.extra_seconds for c in self.within(limit)), default=math.inf)

    def bound(self, limit: int) -> Bound:
        if limit not in self.bound_at:
            self.bound_at[limit] = self.bounds.seconds(limit)
        return self.bound_at[limit]

    def _promising(self, limit: int, count: int) -> list[Candidate]:
        """Return candidates whose time, and their distance to ``limit`` at the bound's price, and at four times that, are least."""
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

    def _bring(
        self, candidate: Candidate, low: int, limit: int, seconds: Sequence[float] | None = None
    ) -> None:
        """Evict ``candidate`` to at most ``low`` bytes, as far as it goes, then spend what is left up to ``limit``; at last by true seconds."""
        program = self.program
        while candidate.simulation.peak_bytes > low:
            trimmed = self.judge(
                Evict(low, seconds)(program, candidate.schedule, candidate.simulation)
            )
            if trimmed.simulation.peak_bytes >= candidate.simulation.peak_bytes:
                break
            candidate = trimmed
        if candidate.simulation.peak_bytes <= limit and seconds is not None:
            candidate = self._filled(candidate, limit, seconds)
        if candidate.simulation.peak_bytes <= limit:
            self._filled(candidate, limit, None)

    def _filled(
        self, candidate: Candidate, limit: int, seconds: Sequence[float] | None
    ) -> Candidate:
        while True:
            fuller = self.judge(
                Retain(limit, seconds)(self.program, candidate.schedule, candidate.simulation)
            )
            if fuller.simulation.peak_bytes > limit or len(fuller.schedule.runs) >= len(
                candidate.schedule.runs
            ):
                return candidate
            candidate = fuller


def price_range(program: Program) -> tuple[float, float]:
    """Return the seconds per byte below which nothing and above which everything that may is recomputed, roughly.

    The ends are the least and the greatest seconds per byte of any one op, the former shared by many stages, the latter times the ops a
    chain may have.
    """
    tables = program.tables
    count = len(program.ops)
    costs = (tables.seconds[:count] > 0) & (tables.written_bytes[:count] > 0)
    if not costs.any():
        return 1e-15, 1e-6
    rates = tables.seconds[:count][costs] / tables.written_bytes[:count][costs]
    return float(rates.min()) / 100, float(rates.max()) * 100


def _between(low: float, high: float, count: int) -> list[float]:
    """Return ``count`` prices from low to high, evenly spaced in their logarithm."""
    ratio = (high / low) ** (1 / (count - 1))
    return [low * ratio**i for i in range(count)]
