"""Step choice: a level for every call of a step, so that the step's peak fits a budget.

A step is a sequence of moments. At each, the calls in flight hold their saved values, at most one
call runs and works with more, and other bytes are allocated outside of all graphs. The peak is the
greatest sum; the time is the sum of the calls' extra seconds. With x[i, l] = 1 where call i takes
level l this is a multiple-choice knapsack with one row per moment (Kellerer, Pferschy and Pisinger,
Knapsack Problems, 2004, chapter 11), and its linear relaxation is the Lagrangian bound of one price
per moment.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np

from fxckpt.solver.levels import Level
from fxckpt.solver.program import FloatArray, IntArray


@dataclass(frozen=True)
class Moment:
    """A stretch of a step during which the same calls are in flight."""

    outside_bytes: int
    """Most bytes allocated outside of what the calls hold and work with."""
    held: tuple[int, ...]
    """Calls whose saved values are live, without the running one."""
    running: int | None = None
    """Call whose forward or backward runs; None for code between the calls."""
    is_backward: bool = False
    keeps: tuple[int, ...] = ()
    """Calls that keep inputs of theirs which nothing else holds by then."""


@dataclass(frozen=True)
class StepProgram:
    """Calls and moments of a step as plain data."""

    calls: tuple[tuple[Level, ...], ...]
    """Levels that each call may take."""
    moments: tuple[Moment, ...]
    away_limit: int | None = None
    """Most bytes that all calls have sent away at any moment; None if nothing bounds them."""

    @cached_property
    def tables(self) -> StepTables:
        """The step as arrays."""
        return StepTables.of(self)

    def beginning_with(self, taken: Sequence[int]) -> StepProgram:
        """Return the step whose first calls have taken their levels, and may take no other."""
        fixed = tuple((levels[i],) for levels, i in zip(self.calls, taken, strict=False))
        return replace(self, calls=(*fixed, *self.calls[len(fixed) :]))

    def has_room(self, levels: Sequence[int]) -> bool:
        """Return whether what these levels send away fits where it is sent."""
        return self.away_limit is None or self.tables.most_away(levels) <= self.away_limit


@dataclass(frozen=True, eq=False)
class StepTables:
    """A step as arrays; rows of levels are padded with the last one."""

    outside: IntArray
    """Outside bytes of each moment."""
    terms: tuple[tuple[FloatArray, FloatArray], ...]
    """What calls hold, work with and keep: in each pair 1 where a call, by column, does so in a
    moment, by row; and the bytes of each level, by column, of each call, by row."""
    in_flight: FloatArray
    """1 where a call is in flight, or runs, in a moment."""
    seconds: FloatArray
    """Extra seconds."""
    away: FloatArray
    """Bytes sent away."""

    @classmethod
    def of(cls, step: StepProgram) -> StepTables:
        """Return the arrays of ``step``."""
        calls, moments = step.calls, step.moments
        shape = (len(moments), len(calls))
        is_held, forward, backward, keeps = (np.zeros(shape) for _ in range(4))
        for k, moment in enumerate(moments):
            is_held[k, list(moment.held)] = 1
            keeps[k, list(moment.keeps)] = 1
            if moment.running is not None:
                (backward if moment.is_backward else forward)[k, moment.running] = 1
        most = max((len(levels) for levels in calls), default=0)
        padded = [[*levels, *[levels[-1]] * (most - len(levels))] for levels in calls]

        def table(name: str) -> FloatArray:
            return np.asarray(
                [[getattr(level, name) for level in levels] for levels in padded], dtype=np.float64
            ).reshape(len(calls), most)

        return cls(
            np.asarray([moment.outside_bytes for moment in moments], dtype=np.int64),
            (
                (is_held, table("held_bytes")),
                (forward, table("forward_bytes")),
                (backward, table("backward_bytes")),
                (keeps, table("input_bytes")),
            ),
            is_held + forward + backward,
            table("extra_seconds"),
            table("away_bytes"),
        )

    def usage(self, levels: Sequence[int]) -> FloatArray:
        """Return the bytes of each moment when each call takes one of its levels."""
        rows, chosen = np.arange(len(levels)), np.asarray(levels, dtype=np.int64)
        outside = self.outside.astype(np.float64)
        return sum((m @ table[rows, chosen] for m, table in self.terms), start=outside)

    def change(self, call: int, before: int, after: int) -> FloatArray:
        """Return the bytes by which each moment changes when a call takes another level."""
        none = np.zeros(len(self.outside))
        return sum(
            (m[:, call] * (table[call, after] - table[call, before]) for m, table in self.terms),
            start=none,
        )

    def most_away(self, levels: Sequence[int]) -> float:
        """Return the most bytes away at any moment when each call takes one of its levels."""
        away = self.away[np.arange(len(levels)), np.asarray(levels, dtype=np.int64)]
        return float((self.in_flight @ away).max(initial=0))

    def weighed(self, weights: FloatArray) -> FloatArray:
        """Return the bytes of every level of every call, summed over moments by weight."""
        none = np.zeros_like(self.seconds)
        return sum(((weights @ m)[:, None] * table for m, table in self.terms), start=none)


@dataclass(frozen=True)
class LevelChoice:
    """A level for every call of a step."""

    levels: tuple[int, ...]
    peak_bytes: int
    """Peak of the step."""
    extra_seconds: float
    """Sum of the calls' extra seconds."""


def choice_of(step: StepProgram, levels: Sequence[int]) -> LevelChoice:
    """Return the choice of these levels, with its peak and its time."""
    tables = step.tables
    # The rows of the tables are padded with the last level.
    levels = [min(level, len(call) - 1) for level, call in zip(levels, step.calls, strict=True)]
    seconds = tables.seconds[np.arange(len(levels)), np.asarray(levels, dtype=np.int64)]
    return LevelChoice(
        tuple(levels),
        int(tables.usage(levels).max(initial=0)),
        float(seconds.sum()),
    )


def choose(step: StepProgram, limit: int) -> LevelChoice:
    """Return the levels of least extra time whose peak is at most ``limit`` bytes.

    If nothing fits, the choice is the one of the least peak that was found. Where the calls would
    send more away than there is room for, the later ones, whose values come back first, send none.
    """
    return _within_away_limit(step, lambda some: _choose(some, limit))


def _within_away_limit(
    step: StepProgram, choice: Callable[[StepProgram], LevelChoice]
) -> LevelChoice:
    """Return a choice that sends no more away than there is room for, if there is one."""
    best = choice(step)
    if step.has_room(best.levels):
        return best
    low, high = 0, len(step.calls)  # Numbers of first calls that may send: one fits, one does not.
    found = _of_first(step, 0, choice)
    while high - low > 1:
        middle = (low + high) // 2
        trial = _of_first(step, middle, choice)
        if step.has_room(trial.levels):
            low, found = middle, trial
        else:
            high = middle
    return found


def _of_first(
    step: StepProgram, count: int, choice: Callable[[StepProgram], LevelChoice]
) -> LevelChoice:
    """Return a choice in which only the first calls send values away, and those that must."""
    kept = []
    for number, levels in enumerate(step.calls):
        least = min(level.away_bytes for level in levels)
        kept.append(
            [i for i, level in enumerate(levels) if number < count or level.away_bytes == least]
        )
    return _chosen_of(step, kept, choice)


def _chosen_of(
    step: StepProgram, kept: Sequence[Sequence[int]], choice: Callable[[StepProgram], LevelChoice]
) -> LevelChoice:
    """Return a choice among some of the levels of each call."""
    calls = tuple(
        tuple(levels[i] for i in some) for levels, some in zip(step.calls, kept, strict=True)
    )
    found = choice(replace(step, calls=calls))
    return choice_of(step, [some[i] for some, i in zip(kept, found.levels, strict=True)])


def fastest_choice(step: StepProgram) -> LevelChoice:
    """Return the levels of least extra time; of those, the ones that send the least away."""

    def first(levels: Sequence[Level]) -> int:
        keys = [(level.extra_seconds, level.away_bytes) for level in levels]
        return keys.index(min(keys))

    return choice_of(step, [first(levels) for levels in step.calls])


def _choose(step: StepProgram, limit: int) -> LevelChoice:
    """Return the levels of least extra time, whatever is sent away.

    Greedy by the price of a byte over the limit, then by seconds where bytes are left; small steps
    that end away from the bound are solved as an integer program.
    """
    best = fastest_choice(step)
    fast = best.levels
    if best.peak_bytes <= limit or not step.calls:
        return best
    best = choice_of(step, _lowered(step, fast, limit))
    if best.peak_bytes > limit:
        best = _least_peak(step)
    if best.peak_bytes <= limit:
        best = choice_of(step, _raised(step, list(best.levels), limit))
    size = step.tables.seconds.size
    is_good = best.peak_bytes <= limit and best.extra_seconds <= (1 + TOLERANCE) * bound_seconds(
        step, limit
    )
    if not is_good and size <= EXACT_SIZE and (exact := _exact(step, limit)) is not None:
        better = choice_of(step, exact)
        if better.peak_bytes <= limit and (
            best.peak_bytes > limit or better.extra_seconds < best.extra_seconds
        ):
            return better
    return best


def choose_few(
    step: StepProgram,
    limit: int,
    graphs: Sequence[int],
    ready: Collection[tuple[int, int]] = (),
    *,
    most: int,
    spare: float = 0.0,
) -> LevelChoice:
    """Return a choice within ``limit`` bytes of few levels for each graph, as each is a compile.

    ``graphs`` is the graph of each call; calls of one graph have the same levels. ``ready`` are the
    graphs and levels that are compiled already, which are allowed beside the ``most`` others that
    the best choice takes most often. If that fits nothing, or with ``most`` above 0 takes over
    :data:`FEW_COST` and ``spare`` seconds more time, the best choice is returned. Where the levels
    that are ready take at most ``spare`` seconds more, there are no others.
    """
    best = choose(step, limit)
    if best.peak_bytes > limit:
        return best
    if most and (found := choose_few(step, limit, graphs, ready, most=0)) != best:
        if found.peak_bytes <= limit and found.extra_seconds <= best.extra_seconds + spare:
            return found
    used = Counter(zip(graphs, best.levels, strict=True))
    allowed: dict[int, set[int]] = {}
    for graph in dict.fromkeys(graphs):
        often = [level for (g, level), _ in used.most_common() if g == graph][:most]
        allowed[graph] = {*often, *(level for g, level in ready if g == graph)}
    kept = [sorted(allowed[graph]) for graph in graphs]
    if not all(kept):
        return best
    found = _chosen_of(step, kept, lambda few: choose(few, limit))
    most_seconds = max((1 + FEW_COST) * best.extra_seconds, best.extra_seconds + spare)
    is_slow = most > 0 and found.extra_seconds > most_seconds
    has_less_room = step.has_room(best.levels) and not step.has_room(found.levels)
    if found.peak_bytes > limit or is_slow or has_less_room:
        return best
    return found


FEW_COST = 0.25
"""Share of the recompute time that fewer compiles may cost."""


def least_peak(step: StepProgram) -> LevelChoice:
    """Return the choice of least peak that was found, of the fastest such."""
    return _within_away_limit(step, _least_peak)


def _least_peak(step: StepProgram) -> LevelChoice:
    """Return the choice of least peak, whatever is sent away.

    Ever lower limits are tried, each as far below the last peak as the greatest share that worked.
    """
    if not step.calls:
        return choice_of(step, ())
    least = [
        min(range(len(c)), key=lambda i: (c[i].held_bytes, c[i].backward_bytes)) for c in step.calls
    ]
    best = choice_of(step, _lowered(step, least, 0))
    for _ in range(ROUNDS):
        lower = choice_of(step, _lowered(step, best.levels, best.peak_bytes - 1))
        if lower.peak_bytes >= best.peak_bytes:
            break
        best = lower
    return choice_of(step, _raised(step, list(best.levels), best.peak_bytes))


ROUNDS = 64
"""Most rounds of a descent to the least peak."""


def _lowered(step: StepProgram, levels: Sequence[int], limit: int) -> list[int]:
    """Return levels moved, one call at a time, until the peak fits or no move lowers it.

    A move is rated by the seconds it costs for each byte over the limit that it removes.
    """
    tables, chosen = step.tables, list(levels)
    rows = np.arange(len(chosen))
    usage = tables.usage(chosen)
    while True:
        over = np.maximum(usage - limit, 0.0)
        if not over.any():
            return chosen
        # Only the moments near the worst count at first, so that each move lowers the peak.
        worst = over.max()
        weights = np.where(over >= worst * NEAR, over / worst, 0.0)
        bytes_of = tables.weighed(weights)
        relief = bytes_of[rows, chosen][:, None] - bytes_of
        cost = np.maximum(tables.seconds - tables.seconds[rows, chosen][:, None], 0.0)
        rating = np.where(relief > 0, relief / (cost + 1e-12), -1.0)
        moved = False
        for flat in np.argsort(-rating, axis=None, kind="stable")[: 4 * len(chosen)]:
            call, level = divmod(int(flat), rating.shape[1])
            if rating[call, level] <= 0:
                break
            after = usage + tables.change(call, chosen[call], level)
            if _excess(after, limit) < _excess(usage, limit):
                chosen[call], usage, moved = level, after, True
                break
        if not moved:
            return chosen


NEAR = 0.5
"""Share of the greatest excess from which a moment counts in the rating of moves."""


def _excess(usage: FloatArray, limit: int) -> tuple[float, float]:
    """Return the greatest excess over the limit, and the sum of all."""
    over = np.maximum(usage - limit, 0.0)
    return float(over.max(initial=0.0)), float(over.sum())


def _raised(step: StepProgram, levels: list[int], limit: int) -> list[int]:
    """Return levels moved to faster ones while the peak fits, the greatest gain first."""
    tables, chosen = step.tables, list(levels)
    rows, usage = np.arange(len(chosen)), tables.usage(levels)
    while True:
        gain = tables.seconds[rows, chosen][:, None] - tables.seconds
        for flat in np.argsort(-gain, axis=None, kind="stable"):
            call, level = divmod(int(flat), gain.shape[1])
            if gain[call, level] <= 0:
                return chosen
            after = usage + tables.change(call, chosen[call], level)
            if after.max(initial=0) <= limit:
                chosen[call], usage = level, after
                break
        else:
            return chosen


def bound_seconds(step: StepProgram, limit: int) -> float:
    """Return a lower bound on the extra seconds of any choice within ``limit`` bytes.

    It is the linear relaxation, which one price per moment attains; infinite if nothing fits.
    """
    from scipy.optimize import linprog

    cost, rows, once = _linear(step, limit)
    found = linprog(
        cost,
        A_ub=rows[0],
        b_ub=rows[1],
        A_eq=once,
        b_eq=np.ones(len(step.calls)),
        bounds=(0, 1),
        method="highs",
    )
    return float(found.fun or 0.0) if found.status == 0 else float("inf")


def _exact(step: StepProgram, limit: int) -> list[int] | None:
    """Return the levels of the integer program, or None if it ends without a solution."""
    from scipy.optimize import Bounds, LinearConstraint, milp

    cost, (rows, most), once = _linear(step, limit)
    found = milp(
        cost,
        integrality=np.ones(len(cost), dtype=np.int64),
        bounds=Bounds(0, 1),
        constraints=[
            LinearConstraint(rows, -np.inf, most),
            LinearConstraint(once, 1, 1),
        ],
        options={"node_limit": EXACT_NODES, "mip_rel_gap": TOLERANCE},
    )
    if found.x is None:
        return None
    return [int(row.argmax()) for row in found.x.reshape(len(step.calls), -1)]


EXACT_SIZE = 600
"""Most calls times levels for which the integer program is solved."""
EXACT_NODES = 2000
"""Most nodes of the integer program's search tree."""
TOLERANCE = 0.002
"""Relative distance to the bound at which a choice is good enough."""


def _linear(step: StepProgram, limit: int) -> tuple[FloatArray, tuple[Any, FloatArray], Any]:
    """Return the cost, the rows of moments with their right side, and the rows of calls."""
    from scipy.sparse import csr_matrix

    tables = step.tables
    calls, most = tables.seconds.shape
    none = np.zeros((len(step.moments), calls, most))
    columns = sum((m[:, :, None] * table for m, table in tables.terms), start=none)
    columns = columns.reshape(len(step.moments), calls * most)
    unit = float(max(1, limit))
    return (
        tables.seconds.ravel(),
        (csr_matrix(columns / unit), (limit - tables.outside) / unit),
        csr_matrix(np.kron(np.eye(calls), np.ones(most))),
    )
