"""The price search: the least extra time whose simulated peak fits a budget in bytes.

The peak constraint of every stage is dualized into a price per byte. The search starts from the price of the lower bound and bisects the prices of
several shapes: high at the forward's end, the same everywhere, and moved multiplicatively by how far each stage is over the budget. The
simulator judges every schedule and the best that fits is kept; what it leaves of the budget is spent by :mod:`~fxckpt.passes.fill`. The search
ends after a fixed number of cuts and reads no clock, so the same graph always gets the same plan.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from fxckpt.passes.bounds import Bound, LowerBounds
from fxckpt.passes.fill import Fill
from fxckpt.passes.program import Program
from fxckpt.passes.schedule import Schedule, emit, save_all
from fxckpt.passes.simulate import Simulation, simulate
from fxckpt.passes.staged_cut import Layout, StagedCut
from fxckpt.passes.stages import NarrowPlaces

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
    floor_bound_bytes: int
    """No plan at all has a lower peak."""


@dataclass(frozen=True)
class PriceSearch:
    """Search prices for schedules within a budget."""

    stage_counts: tuple[int, ...] = (32, 64, 16)
    shares: tuple[float, ...] = (0.1, 0.01, 1.0)
    """Price of each stage beside that of the forward's end."""
    floor_counts: tuple[int, ...] = (32, 64)
    grid: int = 3
    """Prices tried for the floor at each of ``floor_counts``, evenly spaced in their logarithm."""
    sweep: int = 20
    """Prices of each shape tried for a whole frontier."""
    bisections: int = 6
    dual_steps: int = 4
    dual_rate: float = 2.0
    """Guess: step of the multiplicative update, per relative overshoot."""
    filled: int = 5
    """How many of the best schedules have their slack spent."""
    cut: StagedCut = field(default_factory=StagedCut)

    def __call__(self, program: Program, budget: Callable[[int], int | None]) -> Found:
        """Return the best schedule within ``budget(baseline_peak_bytes)`` bytes; None asks for no extra time."""
        search = _Search(self, program)
        limit = budget(search.baseline.simulation.peak_bytes)
        free = search.free()
        floor = search.floor()
        # The floor is found before and without the budget, so that asking for just the floor always succeeds.
        if limit is not None and floor.simulation.peak_bytes <= limit < free.simulation.peak_bytes:
            search.fit(limit)
            search.fill(limit)
        return search.found(limit, floor)

    def frontier(self, program: Program, points: int, tick: Callable[[], object] = lambda: None) -> tuple[Found, ...]:
        """Return the best schedules at ``points`` limits from the floor to the uncheckpointed peak, evenly spaced in their logarithm.

        All limits choose from all schedules seen, so the time never rises with the limit. ``tick`` is called once a point.
        """
        search = _Search(self, program)
        search.free()
        floor = search.floor()
        search.price_sweep()
        low, high = floor.simulation.peak_bytes, search.baseline.simulation.peak_bytes
        limits = [round(p) for p in _between(max(low, 1), max(high, 1), points)][1:-1] if high > low else []
        limits = [low, *limits, high] if high > low else [low]
        for limit in limits:
            search.fill(limit)
            tick()
        return tuple(search.found(limit, floor) for limit in limits)


class _Search:
    """All candidates seen for one program."""

    def __init__(self, options: PriceSearch, program: Program) -> None:
        self.options = options
        self.program = program
        self.layouts: dict[int, Layout] = {}
        self.seen: dict[Schedule, Candidate] = {}
        self.tried: dict[tuple[int, Prices, int], tuple[Candidate, ...]] = {}
        self.low, self.high = price_range(program)
        self.bounds = LowerBounds(program, self.low, self.high)
        self.baseline = self.judge(save_all(program))
        self.places = NarrowPlaces(program)

    def judge(self, schedule: Schedule) -> Candidate:
        if schedule not in self.seen:
            self.seen[schedule] = Candidate(schedule, simulate(self.program, schedule))
        return self.seen[schedule]

    def within(self, limit: int) -> Iterator[Candidate]:
        return (c for c in self.legal() if c.simulation.peak_bytes <= limit)

    def legal(self) -> Iterator[Candidate]:
        """Candidates that save nothing they must not; the uncheckpointed schedule may."""
        is_savable = self.program.tables.is_savable
        return (c for c in self.seen.values() if is_savable[list(c.schedule.saved)].all())

    def found(self, limit: int | None, floor: Candidate) -> Found:
        """Return the best seen. Bytes below the limit buy nothing: of the fastest the one of least peak is as good as any."""
        candidates = self.legal() if limit is None else self.within(limit)
        best = min(candidates, key=lambda c: c.rank, default=None)
        bound = Bound(0.0, 0.0)
        if best is not None and limit is not None and best.simulation.extra_seconds > 0:
            bound = self.bounds.seconds(limit)
        return Found(limit, best, floor, self.baseline, bound, self.bounds.peak_bytes)

    def layout(self, count: int) -> Layout:
        if count not in self.layouts:
            self.layouts[count] = self.options.cut.lay_out(self.program, self.places.stages(count))
        return self.layouts[count]

    def try_prices(self, count: int, prices: Sequence[float], sweeps: int | None = None) -> Candidate:
        """Return the schedule of least peak among those of the sweeps at ``prices``."""
        cut = self.options.cut if sweeps is None else replace(self.options.cut, sweeps=sweeps)
        key = (count, tuple(prices), cut.sweeps)
        if key not in self.tried:
            self.tried[key] = tuple(self.judge(emit(self.program, d)) for d in cut(self.layout(count), prices))
        return min(self.tried[key], key=lambda c: c.simulation.peak_bytes)

    def shaped(self, count: int, price: float, share: float, sweeps: int | None = None) -> Candidate:
        """Try ``price`` at the forward's end and ``share`` of it at every stage."""
        return self.try_prices(count, [price, *[price * share] * len(self.layout(count).starts)], sweeps)

    def free(self) -> Candidate:
        """The least extra time there is, and the least peak at it."""
        self.shaped(self.options.stage_counts[0], self.low * 1e-6, 1.0)
        return min(self.legal(), key=lambda c: c.rank)

    def floor(self) -> Candidate:
        """The least peak of any schedule seen, over a grid of prices at every stage count. One sweep mostly gives the least peaks."""
        sweeps = None
        prices = _between((self.low * self.high) ** 0.5, self.high, self.options.grid)
        for count in self.options.floor_counts:
            # Press on from the best uniform price: prices where the peak is, no prices elsewhere.
            price = min(prices, key=lambda p: self.shaped(count, p, 1.0, sweeps).simulation.peak_bytes)
            least = self.shaped(count, price, 1.0, sweeps).simulation.peak_bytes
            self._dual(count, [price] * (len(self.layout(count).starts) + 1), least * 9 // 10, sweeps)
        return min(self.legal(), key=lambda c: (c.simulation.peak_bytes, c.rank))

    def fit(self, limit: int) -> None:
        """Look for schedules within ``limit``."""
        start = self.bounds.seconds(limit).price or self.low
        for count in self.options.stage_counts:
            for share in self.options.shares:
                self._bisect(count, share, start / (1 + share * count / 2), limit)

    def price_sweep(self) -> None:
        """Look for schedules at all prices."""
        for count in self.options.stage_counts:
            for price in _between(self.low, self.high, self.options.sweep):
                for share in self.options.shares:
                    self.shaped(count, price / (1 + share * count / 2), share)

    def fill(self, limit: int) -> None:
        """Spend what the fastest schedules within ``limit`` leave of it."""
        for candidate in sorted(self.within(limit), key=lambda c: c.rank)[: self.options.filled]:
            while True:
                fuller = self.judge(Fill(limit)(self.program, candidate.schedule, candidate.simulation))
                if fuller.simulation.peak_bytes > limit or fuller.rank >= candidate.rank:
                    break
                candidate = fuller

    def _bisect(self, count: int, share: float, guess: float, limit: int) -> float:
        """Return about the least price of this shape that fits, having tried those on the way: out from the guess, then in."""
        low, high, step = 0.0, float("inf"), 2.0
        price = guess
        for _ in range(self.options.bisections):
            if self.shaped(count, price, share).simulation.peak_bytes <= limit:
                high = price
                price = price / step if low == 0.0 else (low * high) ** 0.5
            else:
                low = price
                price = price * step if high == float("inf") else (low * high) ** 0.5
            step *= step if low == 0.0 or high == float("inf") else 1.0
        return min(high, price)

    def _dual(self, count: int, prices: list[float], limit: int, sweeps: int | None = None) -> None:
        for _ in range(self.options.dual_steps):
            candidate = self.try_prices(count, prices, sweeps)
            peaks = stage_peaks(self.program, self.layout(count).starts, candidate)
            factors = [(max(p, 1) / max(limit, 1)) ** self.options.dual_rate for p in peaks]
            prices = [p * min(4.0, max(0.25, f)) for p, f in zip(prices, factors, strict=True)]


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


def stage_peaks(program: Program, starts: tuple[int, ...], candidate: Candidate) -> list[int]:
    """Return the peak of the forward, then of each stage of the backward."""
    profile = np.asarray(candidate.simulation.profile)
    at = candidate.simulation.forward_ops
    before = np.asarray(candidate.schedule.before, dtype=np.int64)
    # A stage begins with the runs in front of its first backward op.
    begins = at + np.asarray(starts) + np.searchsorted(before, np.asarray(starts), side="left")
    return [int(profile[:at].max(initial=0)), *np.maximum.reduceat(profile, begins).tolist()]


def _between(low: float, high: float, count: int) -> list[float]:
    """Return ``count`` prices from low to high, evenly spaced in their logarithm."""
    ratio = (high / low) ** (1 / (count - 1))
    return [low * ratio**i for i in range(count)]
