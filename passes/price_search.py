"""The price search: the least extra time whose simulated peak fits a budget in bytes.

The peak constraint of every stage is dualized into a price per byte. The search tries one price for all stages, the price on the tight
stage alone, and prices moved multiplicatively by how far each stage is over the budget; the simulator judges every schedule and the best
that fits is kept. It ends after a fixed number of cuts and reads no clock, so the same graph always gets the same plan.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from fxckpt.passes.facts import Program
from fxckpt.passes.flow import Memo
from fxckpt.passes.schedule import Schedule, emit
from fxckpt.passes.simulate import Simulation, save_all, simulate
from fxckpt.passes.staged_cut import StagedCut, Tables
from fxckpt.passes.stages import CutIntoStages

Prices = tuple[float, ...]


@dataclass(frozen=True)
class Candidate:
    """A schedule and what it costs."""

    schedule: Schedule
    simulation: Simulation

    @property
    def rank(self) -> tuple[float, int, int]:
        """Less is better: time first, then peak, then saved bytes."""
        return self.simulation.extra_seconds, self.simulation.peak_bytes, self.simulation.saved_bytes


@dataclass(frozen=True)
class Found:
    """What a search found. ``best`` is None if nothing fits."""

    best: Candidate | None
    floor: Candidate
    """The least peak reached."""
    baseline: Candidate
    """The uncheckpointed schedule."""


@dataclass(frozen=True)
class PriceSearch:
    """Search prices for schedules within a budget."""

    stage_counts: tuple[int, ...] = (12, 24, 48)
    """Guess: 8 to 64 were tried; bench/planner.py prints the planner's time."""
    grid: int = 8
    """Prices tried at every stage count, evenly spaced in their logarithm."""
    bisections: int = 6
    dual_steps: int = 6
    dual_rate: float = 2.0
    """Guess: step of the multiplicative update, per relative overshoot."""
    cut: StagedCut = field(default_factory=StagedCut)

    def __call__(self, program: Program, budget: Callable[[int], int | None]) -> Found:
        """Return the best schedule within ``budget(baseline_peak_bytes)`` bytes; None asks for no extra time."""
        search = _Search(self, program)
        baseline = search.judge(save_all(program))
        limit = budget(baseline.simulation.peak_bytes)
        free = search.free(self.stage_counts[-1])
        floor = search.floor()
        if limit is None or limit >= free.simulation.peak_bytes:
            # Bytes below the budget buy nothing: of the plans without extra time the one of least peak is as good as any.
            best = free if limit is None else min(search.within(limit), key=lambda c: c.rank)
            return Found(best, floor, baseline)
        if limit < floor.simulation.peak_bytes:
            # The floor is found before and without the budget, so that asking for just the floor always succeeds.
            return Found(None, floor, baseline)
        for count in self.stage_counts:
            search.fit(count, limit)
        return Found(min(search.within(limit), key=lambda c: c.rank), floor, baseline)


class _Search:
    """All candidates seen for one program."""

    def __init__(self, options: PriceSearch, program: Program) -> None:
        self.options = options
        self.program = program
        self.tables = Tables.of(program)
        self.needs: dict[tuple[int, ...], list[tuple[int, ...]]] = {}
        self.starts: dict[int, tuple[int, ...]] = {}
        self.solver = Memo(options.cut.solver)
        self.seen: dict[Schedule, Candidate] = {}
        self.tried: dict[tuple[tuple[int, ...], Prices], Candidate] = {}
        self.low, self.high = price_range(program)

    def judge(self, schedule: Schedule) -> Candidate:
        if schedule not in self.seen:
            self.seen[schedule] = Candidate(schedule, simulate(self.program, schedule))
        return self.seen[schedule]

    def within(self, limit: int) -> Iterator[Candidate]:
        return (c for c in self.legal() if c.simulation.peak_bytes <= limit)

    def legal(self) -> Iterator[Candidate]:
        """Candidates that save nothing they must not; the uncheckpointed schedule may."""
        storages = self.program.storages
        return (c for c in self.seen.values() if all(storages[s].is_savable for s in c.schedule.saved))

    def try_prices(self, starts: tuple[int, ...], prices: Sequence[float]) -> Candidate:
        key = (starts, tuple(prices))
        if key not in self.tried:
            if starts not in self.needs:
                self.needs[starts] = self.tables.stage_needs(starts)
            decisions = self.options.cut(self.tables, starts, self.needs[starts], prices, self.solver)
            self.tried[key] = self.judge(emit(self.program, decisions))
        return self.tried[key]

    def stages(self, count: int) -> tuple[int, ...]:
        if count not in self.starts:
            self.starts[count] = CutIntoStages(count)(self.program)
        return self.starts[count]

    def free(self, count: int) -> Candidate:
        """The least extra time there is, and the least peak at it."""
        starts = self.stages(count)
        self.try_prices(starts, [self.low * 1e-6] * len(starts))
        return min(self.legal(), key=lambda c: c.rank)

    def floor(self) -> Candidate:
        """The least peak of any schedule seen, over a grid of prices at every stage count."""
        for count in self.options.stage_counts:
            starts = self.stages(count)
            for price in _between(self.low, self.high, self.options.grid):
                self.try_prices(starts, [price] * len(starts))
        for count in self.options.stage_counts:
            # Press on from the best uniform price of this stage count: prices where the peak is, no prices elsewhere.
            starts = self.stages(count)
            grid = _between(self.low, self.high, self.options.grid)
            price = min(grid, key=lambda p: self.try_prices(starts, [p] * len(starts)).simulation.peak_bytes)
            least = self.try_prices(starts, [price] * len(starts)).simulation.peak_bytes
            self._dual(starts, [price] * len(starts), least * 9 // 10)
        return min(self.legal(), key=lambda c: (c.simulation.peak_bytes, c.rank))

    def fit(self, count: int, limit: int) -> None:
        """Look for schedules within ``limit`` at one stage count."""
        starts = self.stages(count)
        price = self._bisect(starts, [1.0] * len(starts), limit)
        self._bisect(starts, [1.0, *[0.01] * (len(starts) - 1)], limit)
        self._dual(starts, [price] * len(starts), limit)

    def _bisect(self, starts: tuple[int, ...], shape: Sequence[float], limit: int) -> float:
        """Return about the least price of this shape that fits, having tried those on the way."""
        grid = _between(self.low, self.high, self.options.grid)
        low, high = 0, len(grid) - 1
        while high - low > 1:
            middle = (low + high) // 2
            if self._fits(starts, shape, grid[middle], limit):
                high = middle
            else:
                low = middle
        below, above = grid[low], grid[high]
        for _ in range(self.options.bisections):
            price = (below * above) ** 0.5
            if self._fits(starts, shape, price, limit):
                above = price
            else:
                below = price
        return above

    def _fits(self, starts: tuple[int, ...], shape: Sequence[float], price: float, limit: int) -> bool:
        return self.try_prices(starts, [price * w for w in shape]).simulation.peak_bytes <= limit

    def _dual(self, starts: tuple[int, ...], prices: list[float], limit: int) -> None:
        for _ in range(self.options.dual_steps):
            candidate = self.try_prices(starts, prices)
            peaks = stage_peaks(self.program, starts, candidate)
            factors = [(max(p, 1) / limit) ** self.options.dual_rate for p in peaks]
            prices = [p * min(4.0, max(0.25, f)) for p, f in zip(prices, factors, strict=True)]


def price_range(program: Program) -> tuple[float, float]:
    """Return the seconds per byte below which nothing and above which everything that may is recomputed, roughly.

    The ends are the least and the greatest seconds per byte of any one op, the former shared by many stages, the latter times the ops a
    chain may have.
    """
    rates = [
        op.seconds / nbytes for op in program.ops if op.seconds > 0 and (nbytes := sum(program.storages[s].bytes for s in op.writes)) > 0
    ]
    if not rates:
        return 1e-15, 1e-6
    return min(rates) / 100, max(rates) * 100


def stage_peaks(program: Program, starts: tuple[int, ...], candidate: Candidate) -> list[int]:
    """Return the peak of each stage of the backward; the forward's peak counts for the first stage, which it runs into."""
    profile = candidate.simulation.profile
    at = candidate.simulation.forward_ops
    peaks = [0] * len(starts)
    peaks[0] = max(profile[:at], default=0)
    runs_before: dict[int, int] = {}
    for run in candidate.schedule.runs:
        runs_before[run.before] = runs_before.get(run.before, 0) + 1
    k = 0
    for j in range(len(program.backward)):
        while k + 1 < len(starts) and starts[k + 1] <= j:
            k += 1
        n = runs_before.get(j, 0) + 1
        peaks[k] = max(peaks[k], *profile[at : at + n])
        at += n
    return peaks


def _between(low: float, high: float, count: int) -> list[float]:
    """Return ``count`` prices from low to high, evenly spaced in their logarithm."""
    ratio = (high / low) ** (1 / (count - 1))
    return [low * ratio**i for i in range(count)]
