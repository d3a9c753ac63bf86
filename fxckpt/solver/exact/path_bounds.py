"""Lower bounds on the time of any plan, from what is recomputed within windows of the backward.

A moment is the end of the forward, or an op of the backward while it runs. A window begins at one
moment, i, and ends with a later one, whose own reads are its last. A forward value that it reads is
held at moment i, or its op runs within the window, after what that op reads, which is held at
moment i or recomputed within the window too. So what a plan holds at i and what it recomputes in
the window are a cut of the window's recompute graph, as in
:mod:`~fxckpt.solver.exact.lower_bounds`, where windows end with the backward.

Give every window a share of each op's seconds, such that the shares of the windows over any one
point of time sum up to at most 1; give every moment a price per byte, and each value's price, in
shares that sum up to 1, to the windows that begin there. A run of an op then costs at most its
seconds over all windows that it is in, and a value that is held at a moment at most its price. With
``room`` the most bytes of forward values at a moment, any plan within the limit takes at least ::

    sum over windows of the least cut - sum over moments of price * room

for its own cut of each window costs at least the least one. That holds for any shares and prices.

Good shares are found from the other side. Say how much of each value is held at each moment, as
fractions that fit the rooms. An op must run in a window to the extent that the path from it to what
the window needs is not held, whichever path that is least on, and over all time in the sum over the
windows without overlap in which that is most. The least seconds over all fractions are the greatest
bound, by duality of linear programs: subgradient steps go there, and the windows and paths that
decided, averaged, are the shares. The prices are halved in last.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from itertools import chain

import numpy as np

from fxckpt.solver.cuts.min_cut import Network
from fxckpt.solver.cuts.staged_cut import stage_cuts
from fxckpt.solver.exact.lower_bounds import Bound, LowerBounds
from fxckpt.solver.program import BoolArray, FloatArray, IntArray, Program

FAR = 4.0
"""Distance of what a window does not need; 1 is as good as held."""
FORBIDDEN = 3.0
"""Cost of an op that must not be recomputed, in sums of the seconds of all ops."""
BISECTIONS = 16
"""Halvings of the price at which what is held fits."""
AIM = 0.8
"""Seconds that a step aims at, as a share of the least found so far."""
FORGOTTEN = 3.0
"""Weight that earlier rounds lose to the next in the average, times the number of rounds."""


@dataclass(frozen=True)
class Windows:
    """Windows between any two of some moments of a program's backward."""

    program: Program
    moments: tuple[int, ...]
    """Backward op of each moment, ascending; the first is the end of the forward."""

    @cached_property
    def begin(self) -> IntArray:
        """First moment of each window."""
        return np.repeat(np.arange(len(self.moments)), np.arange(len(self.moments), 0, -1))

    @cached_property
    def end(self) -> IntArray:
        """Last moment before the end of each window."""
        count = len(self.moments)
        return np.concatenate([np.arange(i, count) for i in range(count)])

    @cached_property
    def index(self) -> IntArray:
        """Window by its first moment and its last moment before the end."""
        count = len(self.moments)
        found = np.full((count, count), -1)
        found[self.begin, self.end] = np.arange(len(self.begin))
        return found

    @cached_property
    def ranges(self) -> tuple[range, ...]:
        """Backward ops whose reads each window needs."""
        ends = [*[m + 1 for m in self.moments[1:]], len(self.program.backward)]
        return tuple(
            range(self.moments[i] + 1, ends[j])
            for i, j in zip(self.begin.tolist(), self.end.tolist(), strict=True)
        )

    @cached_property
    def is_free(self) -> BoolArray:
        """Whether each storage is held at each moment in any case, beside its room."""
        tables = self.program.tables
        found = np.repeat(tables.is_output[:, np.newaxis], len(self.moments), axis=1)
        for k, position in enumerate(self.moments[1:], 1):
            found[list(self.program.forward_reads[position]), k] = True
        return found

    @cached_property
    def is_needed(self) -> BoolArray:
        """Whether each window needs each storage, and it is not held in any case."""
        found = np.zeros((len(self.program.storages), len(self.begin)), dtype=np.bool_)
        for w, positions in enumerate(self.ranges):
            reads = self.program.forward_reads[positions.start : positions.stop]
            found[list(chain.from_iterable(reads)), w] = True
        return found & ~self.is_free[:, self.begin]

    @cached_property
    def _cut(self) -> tuple[Network, IntArray, IntArray]:
        """The network of all windows, and the ops and storages of its vertices."""
        return stage_cuts(self.program, self.ranges, len(self.program.ops))

    def least(
        self, op_shares: FloatArray, value_shares: FloatArray, prices: FloatArray
    ) -> tuple[FloatArray, FloatArray]:
        """Return the seconds and the bytes of the least cuts, summed by first moment.

        The shares are by op or storage and by window, the prices by moment; the seconds are less
        what rounding may have added.
        """
        tables, count = self.program.tables, len(self.moments)
        network, ops, values = self._cut
        at_op, at_value = network.problem_of_op, network.problem_of_value
        moment = self.begin[at_value]
        # The first run of an op that only the backward depends on may be part of any step.
        seconds = np.where(tables.is_either[ops], 0.0, tables.seconds[ops]) * op_shares[ops, at_op]
        recompute_cost = np.where(tables.is_recomputable[ops], seconds, math.inf)
        nbytes = tables.bytes[values] * value_shares[values, at_value]
        nbytes = np.where(self.is_free[values, moment], 0.0, nbytes)
        may_keep = tables.is_savable[values] | tables.is_output[values] | (moment > 0)
        keep_cost = np.where(may_keep, nbytes * prices[moment], math.inf)
        kept, runs = network.solve(recompute_cost, keep_cost)
        spent = np.bincount(at_op[runs], seconds[runs], len(self.begin)).astype(np.float64)
        spent -= network.rounding_errors(recompute_cost, keep_cost)
        held = np.bincount(at_value[kept], nbytes[kept], len(self.begin))
        return (
            np.bincount(self.begin, spent, count).astype(np.float64),
            np.bincount(self.begin, held, count).astype(np.float64),
        )


@dataclass(frozen=True)
class PathBounds:
    """Lower bounds on the plans of one program from windows of its backward."""

    bounds: LowerBounds
    rounds: int
    """Most subgradient steps; each takes time as the ops times the square of the moments."""
    moments: int = 8
    """Number of moments, beside those of ``bounds``: more are tighter after more rounds."""

    def seconds(self, limit: int) -> Bound:
        """Return the bound on the extra time of any plan within ``limit`` bytes.

        It is at least that of ``bounds``, whose price it has.
        """
        known = self.bounds.seconds(limit)
        program = self.bounds.program
        if limit < self.bounds.peak_bytes or not (self.rounds and program.ops):
            return known
        rooms = np.asarray(
            [self.bounds.room(limit, p) for p in self.windows.moments], dtype=np.float64
        )
        op_shares, value_shares = Shares(self.windows, rooms)(self.rounds)
        return Bound(max(known.seconds, self.at(op_shares, value_shares, rooms)), known.price)

    def at(self, op_shares: FloatArray, value_shares: FloatArray, rooms: FloatArray) -> float:
        """Return the bound at these shares, and the best prices found for each moment."""
        low = np.full(len(rooms), self.bounds.low)
        high = np.full(len(rooms), self.bounds.high)
        best = np.zeros(len(rooms))  # at a price of 0 nothing is recomputed
        for _ in range(self.bounds.steps):
            prices = np.sqrt(low * high)
            seconds, held = self.windows.least(op_shares, value_shares, prices)
            best = np.maximum(best, seconds + prices * (held - rooms))
            fits = held <= rooms
            low, high = np.where(fits, low, prices), np.where(fits, prices, high)
        return float(best.sum())

    @cached_property
    def windows(self) -> Windows:
        """Windows between the ops with most bytes in equal parts of the backward."""
        at_ops = np.asarray(self.bounds.at_ops)
        parts = np.array_split(np.arange(len(at_ops)), self.moments)
        peaks = {int(part[at_ops[part].argmax()]) for part in parts if len(part)}
        return Windows(self.bounds.program, tuple(sorted({*self.bounds.positions, *peaks})))


class Shares:
    """Search for shares of good bounds: subgradient steps on how much is held at each moment."""

    def __init__(self, windows: Windows, rooms: FloatArray) -> None:
        program, tables = windows.program, windows.program.tables
        self.windows, self.program = windows, program
        self.rooms = rooms
        seconds = np.where(tables.is_either, 0.0, tables.seconds[: len(program.ops)])
        total = float(seconds.sum()) or 1.0
        self.cost = np.where(tables.is_recomputable, seconds / total, FORBIDDEN)
        self.bytes = np.maximum(tables.bytes, 1).astype(np.float64)[:, np.newaxis]
        self.is_fixed = windows.is_free | (tables.bytes == 0)[:, np.newaxis]
        self.held = self._fitting(np.zeros(self.is_fixed.shape))
        """Part of each storage that is held at each moment."""

    def __call__(self, rounds: int) -> tuple[FloatArray, FloatArray]:
        """Return the shares of each op and of each storage in each window."""
        windows = self.windows
        size = len(windows.begin)
        op_shares = np.zeros((len(self.program.ops), size))
        flows = np.zeros((len(self.program.storages), size))
        weights, least = 0.0, math.inf
        memory = 1 - min(1.0, FORGOTTEN / rounds)
        for _ in range(rounds):
            distance, next_reader, written = self._distances()
            chosen, cost = self._chains(np.maximum(0.0, 1.0 - distance))
            flow = self._flows(chosen * self.cost[:, np.newaxis], next_reader, written)
            least = min(least, cost)
            gain = np.where(self.is_fixed, 0.0, self._by_moment(flow))
            norm = float((gain * gain / self.bytes).sum())
            step = max(cost - AIM * least, 1e-9) / norm if norm > 0 else 0.0
            # A convex combination of choices without overlap has no more than one over any time.
            op_shares, flows = memory * op_shares + step * chosen, memory * flows + step * flow
            weights = memory * weights + step
            if not step:
                break
            self.held = self._fitting(self.held + step * gain / self.bytes)
        if not weights:
            return chosen, self._shares(flow)
        return op_shares / weights, self._shares(flows / weights)

    def _by_moment(self, by_window: FloatArray) -> FloatArray:
        """Return the sums over the windows that begin at each moment."""
        starts = np.flatnonzero(np.diff(self.windows.begin, prepend=-1))
        sums: FloatArray = np.add.reduceat(by_window, starts, axis=1)
        return sums

    def _shares(self, flows: FloatArray) -> FloatArray:
        """Return flows as shares of their sum by moment, equal ones where nothing flows."""
        flows = flows + 1e-12
        shares: FloatArray = flows / self._by_moment(flows)[:, self.windows.begin]
        return shares

    def _fitting(self, held: FloatArray) -> FloatArray:
        """Return the nearest fractions that fit the rooms, by a price at each moment."""
        bytes_held = np.where(self.is_fixed, 0.0, self.bytes)
        movable = np.flatnonzero((~self.is_fixed).any(axis=1))
        wanted, nbytes = held[movable], bytes_held[movable]
        low, high = np.zeros(len(self.rooms)), np.maximum(wanted.max(axis=0, initial=0.0), 0.0)
        for _ in range(BISECTIONS):
            price = (low + high) / 2
            fits = (nbytes * np.clip(wanted - price, 0.0, 1.0)).sum(axis=0) <= self.rooms
            low, high = np.where(fits, low, price), np.where(fits, price, high)
        fits = (nbytes * np.clip(wanted, 0.0, 1.0)).sum(axis=0) <= self.rooms
        found = np.zeros(held.shape)
        found[movable] = np.clip(wanted - np.where(fits, 0.0, high), 0.0, 1.0)
        found[self.is_fixed] = 1.0
        return found

    def _distances(self) -> tuple[FloatArray, IntArray, dict[int, IntArray]]:
        """Return how much is held on the path from each op to what each window needs.

        Of several paths it is the least. With it comes the reader next on that path of each
        storage, -1 if the window needs it, and the result on it of each op with several.
        """
        ops, held = self.program.ops, self.held[:, self.windows.begin]
        of_op = np.full((len(ops), held.shape[1]), FAR)
        of_value = np.where(self.windows.is_needed, 0.0, FAR)
        reader = np.full(of_value.shape, -1)
        written: dict[int, IntArray] = {}
        for o in range(len(ops) - 1, -1, -1):
            op = ops[o]
            if not op.writes:
                continue
            if len(op.writes) == 1:
                distance = held[op.writes[0]] + of_value[op.writes[0]]
            else:
                through = held[list(op.writes)] + of_value[list(op.writes)]
                written[o] = through.argmin(axis=0)
                distance = through.min(axis=0)
            of_op[o] = distance
            for u in op.needs:
                nearer = distance < of_value[u]
                if nearer.any():
                    of_value[u][nearer] = distance[nearer]
                    reader[u][nearer] = o
        return of_op, reader, written

    def _chains(self, parts: FloatArray) -> tuple[FloatArray, float]:
        """Return for each op the windows without overlap of most ``parts``, and the whole cost."""
        count, index = len(self.windows.moments), self.windows.index
        every = np.arange(len(parts))
        most = np.zeros((len(parts), count + 1))
        first = np.full((len(parts), count + 1), -1)
        for end in range(1, count + 1):
            reached = most[:, :end] + parts[:, index[:end, end - 1]]
            start = reached.argmax(axis=1)
            value = reached[every, start]
            is_better = value > most[:, end - 1]
            first[:, end] = np.where(is_better, start, -1)
            most[:, end] = np.where(is_better, value, most[:, end - 1])
        chosen = np.zeros(parts.shape)
        at = np.full(len(parts), count)
        for end in range(count, 0, -1):
            start = first[:, end]
            taken = np.flatnonzero((at == end) & (start >= 0))
            chosen[taken, index[start[taken], end - 1]] = 1.0
            at = np.where(at == end, np.where(start >= 0, start, end - 1), at)
        return chosen, float((self.cost * most[:, count]).sum())

    def _flows(
        self, flow: FloatArray, reader: IntArray, written: dict[int, IntArray]
    ) -> FloatArray:
        """Return what flows through each storage from the ops to what the windows need."""
        through = np.zeros(reader.shape)
        for o, op in enumerate(self.program.ops):
            passed = flow[o]
            for u in op.needs:
                passed = passed + through[u] * (reader[u] == o)
            if len(op.writes) == 1:
                through[op.writes[0]] = passed
            elif op.writes:
                for i, s in enumerate(op.writes):
                    through[s] = passed * (written[o] == i)
        return through
