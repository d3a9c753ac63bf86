"""Evict: lower the peak of a schedule that is over the budget.

A cut flips all layers of the same shape at one price, so the fastest schedules of a search over
prices often miss the budget by little. Here single copies are evicted from the positions at which
the profile is over the limit, the least seconds per byte first. A copy is freed between two
accesses (its live range is split) and its op is recomputed before the second, along with those of
its inputs that are not available there.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heappush

import numpy as np

from fxckpt.solver.program import IntArray, Program, Ragged
from fxckpt.solver.schedule import Schedule, forward_ops, with_runs
from fxckpt.solver.simulate import Simulation

LONGEST = 64
"""Most ops recomputed for one copy."""
STALE = 1.01
"""Factor by which the queued price of a range may have grown before it is queued anew."""
NOT_HELD = -1
"""Position of a value that is not in memory."""


@dataclass(frozen=True)
class Evict:
    """Evict copies while the profile is above ``limit`` bytes."""

    limit: int
    seconds: Sequence[float] | None = None
    """Seconds of each op in place of the program's, as a perturbation."""
    most_seconds: float = math.inf
    """Most extra time; evictions end beyond it.

    Each makes those that follow dearer, so that they could go on to hundreds of forwards.
    """

    def __call__(self, program: Program, schedule: Schedule, simulation: Simulation) -> Schedule:
        """Return ``schedule`` with a lower peak, as far as evictions reach.

        ``simulation`` is that of ``schedule``. The profile kept here is an estimate: simulate the
        result.
        """
        evictions = _Evictions(program, schedule, simulation, self.limit)
        for span, remat in evictions.cheapest_first(
            program.tables.seconds.tolist() if self.seconds is None else self.seconds
        ):
            evictions.evict_range(span, remat)
            if evictions.extra_seconds > self.most_seconds:
                break
        return evictions.schedule()


@dataclass(frozen=True)
class _LiveRange:
    """Part of a copy's live interval between two accesses."""

    s: int
    """Storage."""
    begin: int
    """Position of the first access."""
    end: int
    """Position of the second access, a read."""


@dataclass(frozen=True)
class _Rematerialization:
    """Recomputes and longer live intervals that an eviction needs."""

    ops: tuple[int, ...]
    """Ops recomputed before the end of the evicted range, in this order."""
    extended: tuple[tuple[int, int], ...]
    """Storages held until the end of the evicted range, each with its last access before."""


class _Evictions:
    """Accesses of each storage along the profile, and the recomputes inserted so far.

    An access is an int: ``2 * position`` if the storage is recomputed there, ``2 * position + 1``
    if it is read there (or held from there on).
    """

    def __init__(
        self, program: Program, schedule: Schedule, simulation: Simulation, limit: int
    ) -> None:
        self.program = program
        self.runs = schedule.runs
        self.before = schedule.before
        self.at = [simulation.forward_ops + i + j for i, j in enumerate(schedule.before)]
        """Position of each recompute."""
        self.limit = limit
        self.profile = simulation.live.copy()
        self.taken: list[int] = simulation.taken.tolist()
        """Storage whose memory the op at each position takes, or -1."""
        self.first_backward = simulation.forward_ops
        self.producers = program.producers
        self.bytes: list[int] = program.tables.bytes.tolist()
        self.is_output: list[bool] = program.tables.is_output.tolist()
        self.is_savable: list[bool] = program.tables.is_savable.tolist()
        self.op_at, self.by_storage = self._access_table(schedule)
        self.accesses: dict[int, list[int]] = {}
        """Accesses of the storages seen so far, ascending."""
        self.inserted: dict[int, list[int]] = {}
        """Ops to recompute before each position."""
        self.extra_seconds = simulation.extra_seconds
        """Extra time, without what later evictions made dead."""

    def _access_table(self, schedule: Schedule) -> tuple[IntArray, Ragged]:
        """Return the op at each position of the profile, and the accesses of each storage.

        Ops are numbered through: the forward's, then the backward's.
        """
        program, tables, first = self.program, self.program.tables, self.first_backward
        length = len(program.backward)
        runs = np.asarray(schedule.runs, dtype=np.int64)
        before = np.asarray(schedule.before, dtype=np.int64)
        at = np.asarray(self.at, dtype=np.int64)
        at_backward = (
            first + np.arange(length) + np.searchsorted(before, np.arange(length), side="right")
        )
        op_at = np.empty(len(self.profile), dtype=np.int64)
        op_at[:first], op_at[at], op_at[at_backward] = (
            forward_ops(program, schedule.saved),
            runs,
            len(program.ops) + np.arange(length),
        )
        rows = (
            (tables.needs.rows(op_at[:first]), np.arange(first), 1),
            (tables.writes.rows(op_at[:first]), np.arange(first), 1),
            (tables.needs.rows(runs), at, 1),
            (tables.writes.rows(runs), at, 0),
            (tables.reads.rows(op_at[at_backward]), at_backward, 1),
        )
        storage = np.concatenate([items for (items, _), _, _ in rows])
        access = np.concatenate([2 * places[of] + kind for (_, of), places, kind in rows])
        order = np.lexsort((access, storage))
        return op_at, Ragged(
            access[order], np.searchsorted(storage[order], np.arange(len(program.storages) + 1))
        )

    def _accesses_of(self, s: int) -> list[int]:
        """Return the accesses of a storage, a list that evictions extend."""
        accesses = self.accesses.get(s)
        if accesses is None:
            starts = self.by_storage.starts
            accesses = self.accesses[s] = self.by_storage.items[starts[s] : starts[s + 1]].tolist()
        return accesses

    def cheapest_first(
        self, seconds: Sequence[float]
    ) -> Iterator[tuple[_LiveRange, _Rematerialization | None]]:
        """Yield live ranges by seconds per byte above the limit, the longest first among equals.

        The price of a range is that at its turn, after the evictions before it. With it comes what
        its eviction needs, where that was found at this turn.
        """
        queue: list[tuple[float, int, int, int, float, _LiveRange]] = []
        for span in self._ranges():
            cost = seconds[self.producers[span.s]]
            queue.append(
                (
                    cost / max(self._excess(span), 1),
                    span.begin - span.end,
                    span.s,
                    span.begin,
                    -1.0,
                    span,
                )
            )
        heapify(queue)
        while queue:
            price, length, s, begin, cost, span = heappop(queue)
            excess = self._excess(span)
            if excess <= 0:
                continue
            remat = None
            if cost < 0:  # the queued price has only the op's own seconds
                remat = self._rematerialization(span)
                if remat is None:
                    continue
                cost = sum([seconds[o] for o in remat.ops])
            if queue and cost / excess > queue[0][0] and cost / excess > price * STALE:
                heappush(queue, (cost / excess, length, s, begin, cost, span))
            else:
                yield span, remat
                if _peak(self.profile) <= self.limit:
                    return

    def _excess(self, span: _LiveRange) -> int:
        """Return the bytes of the range's copy that are above the limit at its peak."""
        return min(self.bytes[span.s], _peak(self.profile[span.begin + 1 : span.end]) - self.limit)

    def _ranges(self) -> Iterator[_LiveRange]:
        """Yield the live ranges over positions above the limit."""
        tables, accesses = self.program.tables, self.by_storage.items
        over = np.concatenate(([0], np.cumsum(self.profile > self.limit)))
        producer = tables.producer
        # Negative producers stand for the backward and for inputs: none of them is recomputable.
        may_run = np.append(tables.is_recomputable, False)[np.maximum(producer, -1)]
        is_evictable = may_run & ~tables.is_output & (tables.bytes > 0)
        storage = np.repeat(np.arange(len(producer)), np.diff(self.by_storage.starts))
        begin, end = accesses[:-1] // 2, accesses[1:] // 2
        is_range = (
            (storage[1:] == storage[:-1])
            & is_evictable[storage[1:]]
            & (accesses[1:] % 2 == 1)
            & (end >= self.first_backward)
        )
        chosen = np.flatnonzero(is_range)
        chosen = chosen[over[end[chosen]] > over[begin[chosen] + 1]]
        return map(
            _LiveRange, storage[chosen].tolist(), begin[chosen].tolist(), end[chosen].tolist()
        )

    def _rematerialization(self, span: _LiveRange) -> _Rematerialization | None:
        """Return the recomputes for the eviction of a range, or None if it is impossible."""
        all_ops, producers, end = self.program.ops, self.producers, span.end
        ops: set[int] = set()
        extended: list[tuple[int, int]] = []
        # Position over which no copy of so many bytes can be held until the end of the range.
        blocked: dict[int, int] = {}
        todo = [producers[span.s]]
        while todo:
            o = todo.pop()
            if o in ops:
                continue
            ops.add(o)
            op = all_ops[o]
            if len(ops) > LONGEST or op.no_recompute is not None:
                return None
            for u in op.needs:
                last = None if u == span.s or self.is_output[u] else self._last_access(u, end)
                if last is None:
                    continue
                if last != NOT_HELD and self._fits(u, last, end, blocked):
                    extended.append((u, last))
                elif producers[u] >= 0:
                    todo.append(producers[u])
                else:
                    return None
        return _Rematerialization(tuple(sorted(ops)), tuple(extended))

    def _last_access(self, s: int, at: int) -> int | None:
        """Return the last access before position ``at`` from which a copy may be held until there.

        It is ``NOT_HELD`` if there is none, and None if a copy is live at ``at`` anyway.
        """
        accesses = self._accesses_of(s)
        i = bisect_left(accesses, 2 * at)
        if i < len(accesses) and accesses[i] % 2:
            return None
        last = accesses[i - 1] // 2 if i else NOT_HELD
        return last if self.is_savable[s] or last >= self.first_backward else NOT_HELD

    def _fits(self, s: int, last: int, end: int, blocked: dict[int, int]) -> bool:
        """Return whether a copy held after its last access, until ``end``, fits the limit.

        ``blocked`` has, by bytes, a position before ``end`` over which none can be held.
        """
        nbytes, begin = self.bytes[s], self._held_from(s, last)
        if begin <= blocked.get(nbytes, NOT_HELD):
            return False
        window = self.profile[begin : end + 1]
        highest = int(window.argmax())
        if window.item(highest) + nbytes <= self.limit:
            return True
        blocked[nbytes] = begin + highest
        return False

    def _held_from(self, s: int, last: int) -> int:
        """Return the first position with more live bytes if a copy is held after an access."""
        return last if self.taken[last] == s else last + 1

    def evict_range(self, span: _LiveRange, remat: _Rematerialization | None) -> None:
        """Evict a range and recompute its op before the end, unless that only moves the peak.

        ``remat`` is what the eviction needs, None where it is not known.
        """
        accesses = self._accesses_of(span.s)
        i = bisect_left(accesses, 2 * span.end)
        if accesses[i] == 2 * span.end:
            return  # an earlier eviction recomputes it there
        # An earlier eviction may have read the copy later.
        span = _LiveRange(span.s, accesses[i - 1] // 2, span.end)
        window = self.profile[span.begin + 1 : span.end]
        before = _peak(window)
        if before <= self.limit:
            return
        remat = remat or self._rematerialization(span)
        if remat is None:
            return
        held = sum([self.bytes[s] for s, _ in remat.extended])
        end_peak = self._peak_at_end(span, remat) + held
        if end_peak > self.limit and end_peak >= before:
            return
        window -= self.bytes[span.s]
        for s, last in remat.extended:
            self.profile[self._held_from(s, last) : span.end] += self.bytes[s]
            if self.taken[last] == s:
                self.taken[last] = NOT_HELD
        self.profile[span.end] = max(int(self.profile[span.end]) + held, end_peak)
        written = {s for o in remat.ops for s in self.program.ops[o].writes}
        for s in {s for o in remat.ops for s in self.program.ops[o].needs} - written:
            self._insert_access(s, 2 * span.end + 1)
        for s in written:
            self._insert_access(s, 2 * span.end)
        present = self.inserted.get(span.end, ())
        more = set(remat.ops).difference(present)
        self.inserted[span.end] = sorted((*present, *more))
        self.extra_seconds += sum([self.program.ops[o].seconds for o in more])

    def _peak_at_end(self, span: _LiveRange, remat: _Rematerialization) -> int:
        """Return the peak from the first recomputed op to the end of the range.

        Storages held longer for the recomputes are not counted.
        """
        program, tables = self.program, self.program.tables
        dies: dict[int, int] = {}
        written: set[int] = set()
        for i, o in enumerate(remat.ops):
            written.update(program.ops[o].writes)
            dies.update((s, i) for s in (*program.ops[o].reads, *program.ops[o].writes))
        at_end = int(self.profile[span.end])
        live = at_end - int(tables.written_bytes[self.op_at[span.end]])
        most = at_end + self.bytes[span.s]
        for i, o in enumerate(remat.ops):
            live += int(tables.written_bytes[o])
            spared = next(
                (self.bytes[s] for s in program.ops[o].takes if s in written and dies[s] == i), 0
            )
            beside = int(tables.workspace_bytes[o] + tables.state_bytes[o]) - spared
            most = max(most, live + beside)
            live -= sum(
                self.bytes[s]
                for s in {*program.ops[o].reads, *program.ops[o].writes} & written
                if dies[s] == i
            )
        # The evicted copy is live at the end of the range too: it was counted twice.
        return most - self.bytes[span.s]

    def _insert_access(self, s: int, access: int) -> None:
        """Add an access of a storage, if it is new."""
        accesses = self._accesses_of(s)
        i = bisect_left(accesses, access)
        if accesses[i : i + 1] != [access]:
            accesses.insert(i, access)

    def schedule(self) -> Schedule:
        """Return the schedule with the inserted recomputes."""
        runs: list[int] = []
        before: list[int] = []
        done = 0
        for position in sorted(self.inserted):
            i = bisect_left(self.at, position)
            front = self.inserted[position]
            # The position has a backward op, or a recompute before one.
            j = (
                self.before[i]
                if i < len(self.at) and self.at[i] == position
                else position - self.first_backward - i
            )
            runs.extend((*self.runs[done:i], *front))
            before.extend((*self.before[done:i], *[j] * len(front)))
            done = i
        runs.extend(self.runs[done:])
        before.extend(self.before[done:])
        return with_runs(self.program, tuple(runs), tuple(before))


def _peak(window: IntArray) -> int:
    """Return the most bytes in a window, or 0 if it is empty.

    On short windows, which most are, ``argmax`` takes a quarter of the time of ``max``.
    """
    return int(window.item(window.argmax())) if len(window) else 0
