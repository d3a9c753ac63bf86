"""Evict: bring a schedule that is over the budget within it.

A cut flips all layers of the same shape at one price, so the fastest schedules of a price search often miss the budget by little. Here single
copies are given up where the profile is over the limit: a copy is dropped between two touches and its op runs again in front of the second, with
whatever of its inputs is not at hand by then; those first that cost the least seconds per byte.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heappush

import numpy as np

from fxckpt.solver.program import IntArray, Program, Ragged
from fxckpt.solver.schedule import Schedule, forward_ops, with_runs
from fxckpt.solver.simulate import Simulation

LONGEST = 64
"""At most so many ops run again for one copy."""
STALE = 1.01
"""A price that grew by less since it was last looked at counts as unchanged."""
NOT_HELD = -1


@dataclass(frozen=True)
class Evict:
    """Give up copies while the profile is above ``limit`` bytes."""

    limit: int
    seconds: Sequence[float] | None = None
    """Per op: what to go by instead of the program's own."""

    def __call__(self, program: Program, schedule: Schedule, simulation: Simulation) -> Schedule:
        """Return a schedule of a lower peak, as far as it goes; the simulator is to judge it. ``simulation`` is that of ``schedule``."""
        copies = _Copies(program, schedule, simulation, self.limit)
        for gap in copies.cheapest_first(
            program.tables.seconds.tolist() if self.seconds is None else self.seconds
        ):
            copies.evict_range(gap)
        return copies.schedule()


@dataclass(frozen=True)
class _Gap:
    """A copy of storage ``s`` that is there after position ``begin``, and read at position ``end`` and not before."""

    s: int
    begin: int
    end: int


@dataclass(frozen=True)
class _Chain:
    """What giving up a copy takes."""

    ops: tuple[int, ...]
    """Run again in front of the gap's end, in this order."""
    longer: tuple[tuple[int, int], ...]
    """Storages held longer, up to the gap's end, each with its last touch before."""


class _Copies:
    """Where each storage is made and read along the profile, and the runs put in so far.

    A touch is an int: ``2 * position`` if the storage is made there, ``2 * position + 1`` if it is read there (or held from there on).
    """

    def __init__(
        self, program: Program, schedule: Schedule, simulation: Simulation, limit: int
    ) -> None:
        self.program = program
        self.runs = schedule.runs
        self.before = schedule.before
        self.at = [simulation.forward_ops + i + j for i, j in enumerate(schedule.before)]
        """Per run: its position."""
        self.limit = limit
        self.profile = simulation.live.copy()
        self.first_backward = simulation.forward_ops
        self.producers = program.producers
        self.bytes: list[int] = program.tables.bytes.tolist()
        self.is_output: list[bool] = program.tables.is_output.tolist()
        self.is_savable: list[bool] = program.tables.is_savable.tolist()
        self.op_at, self.by_storage = self._accesses(schedule)
        self.touches: dict[int, list[int]] = {}
        """Per storage that was looked at, ascending."""
        self.inserted: dict[int, list[int]] = {}
        """Per position: ops to run in front of it."""

    def _accesses(self, schedule: Schedule) -> tuple[IntArray, Ragged]:
        """Return the op at each position of the backward, numbered through, and the touches of each storage."""
        program, tables, first = self.program, self.program.tables, self.first_backward
        length = len(program.backward)
        runs, before = (
            np.asarray(schedule.runs, dtype=np.int64),
            np.asarray(schedule.before, dtype=np.int64),
        )
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
        touch = np.concatenate([2 * places[of] + kind for (_, of), places, kind in rows])
        order = np.lexsort((touch, storage))
        return op_at, Ragged(
            touch[order], np.searchsorted(storage[order], np.arange(len(program.storages) + 1))
        )

    def _touches(self, s: int) -> list[int]:
        touches = self.touches.get(s)
        if touches is None:
            starts = self.by_storage.starts
            touches = self.touches[s] = self.by_storage.items[starts[s] : starts[s + 1]].tolist()
        return touches

    def cheapest_first(self, seconds: Sequence[float]) -> Iterator[_Gap]:
        """Yield the gaps by seconds per byte that is over the limit when their turn comes, the longest first among equals."""
        queue: list[tuple[float, int, int, int, float, _Gap]] = []
        for gap in self._gaps():
            cost = seconds[self.producers[gap.s]]
            queue.append(
                (cost / max(self._useful(gap), 1), gap.begin - gap.end, gap.s, gap.begin, -1.0, gap)
            )
        heapify(queue)
        while queue:
            price, length, s, begin, cost, gap = heappop(queue)
            useful = self._useful(gap)
            if useful <= 0:
                continue
            if cost < 0:  # so far only the op's own seconds were looked at
                chain = self._chain(gap)
                if chain is None:
                    continue
                cost = sum([seconds[o] for o in chain.ops])
            if queue and cost / useful > queue[0][0] and cost / useful > price * STALE:
                heappush(queue, (cost / useful, length, s, begin, cost, gap))
            else:
                yield gap
                if _most(self.profile) <= self.limit:
                    return

    def _useful(self, gap: _Gap) -> int:
        """Return how many of the copy's bytes are over the limit somewhere in the gap."""
        return min(self.bytes[gap.s], _most(self.profile[gap.begin + 1 : gap.end]) - self.limit)

    def _gaps(self) -> Iterator[_Gap]:
        """Yield the gaps that lie over positions beyond the limit."""
        tables, touches = self.program.tables, self.by_storage.items
        over = np.concatenate(([0], np.cumsum(self.profile > self.limit)))
        producer = tables.producer
        may_run = (producer >= 0) & np.append(tables.is_rerunnable, False)[producer]
        may_go = may_run & ~tables.is_output & (tables.bytes > 0)
        storage = np.repeat(np.arange(len(producer)), np.diff(self.by_storage.starts))
        begin, end = touches[:-1] // 2, touches[1:] // 2
        is_gap = (
            (storage[1:] == storage[:-1])
            & may_go[storage[1:]]
            & (touches[1:] % 2 == 1)
            & (end >= self.first_backward)
        )
        chosen = np.flatnonzero(is_gap)
        chosen = chosen[over[end[chosen]] > over[begin[chosen] + 1]]
        return map(_Gap, storage[chosen].tolist(), begin[chosen].tolist(), end[chosen].tolist())

    def _chain(self, gap: _Gap) -> _Chain | None:
        """Return what giving up the gap's copy takes; None if it cannot be done."""
        all_ops, producers = self.program.ops, self.producers
        ops: set[int] = set()
        longer: list[tuple[int, int]] = []
        todo = [producers[gap.s]]
        while todo:
            o = todo.pop()
            if o in ops:
                continue
            ops.add(o)
            op = all_ops[o]
            if len(ops) > LONGEST or op.no_recompute is not None:
                return None
            for u in op.needs:
                last = None if u == gap.s or self.is_output[u] else self._last_touch(u, gap.end)
                if last is None:
                    continue
                if last != NOT_HELD and self._fits(last, gap.end, self.bytes[u]):
                    longer.append((u, last))
                elif producers[u] >= 0:
                    todo.append(producers[u])
                else:
                    return None
        return _Chain(tuple(sorted(ops)), tuple(longer))

    def _last_touch(self, s: int, at: int) -> int | None:
        """Return None if a copy is there at position ``at`` anyway, else the last touch before, or NOT_HELD if it must not be held from there."""
        touches = self._touches(s)
        i = bisect_left(touches, 2 * at)
        if i < len(touches) and touches[i] % 2:
            return None
        last = touches[i - 1] // 2 if i else NOT_HELD
        return last if self.is_savable[s] or last >= self.first_backward else NOT_HELD

    def _fits(self, begin: int, end: int, nbytes: int) -> bool:
        return _most(self.profile[begin + 1 : end + 1]) + nbytes <= self.limit

    def evict_range(self, gap: _Gap) -> None:
        """Run the gap's op again in front of its end, unless that would take as many bytes there as it frees before."""
        touches = self._touches(gap.s)
        i = bisect_left(touches, 2 * gap.end)
        if touches[i] == 2 * gap.end:
            return  # by now it is made again there
        gap = _Gap(gap.s, touches[i - 1] // 2, gap.end)  # by now it may be read later than it was
        window = self.profile[gap.begin + 1 : gap.end]
        before = _most(window)
        if before <= self.limit:
            return
        chain = self._chain(gap)
        if chain is None:
            return
        held = sum([self.bytes[s] for s, _ in chain.longer])
        inside = self._inside(gap, chain) + held
        if inside > self.limit and inside >= before:
            return
        window -= self.bytes[gap.s]
        for s, last in chain.longer:
            self.profile[last + 1 : gap.end] += self.bytes[s]
        self.profile[gap.end] = max(int(self.profile[gap.end]) + held, inside)
        made = {s for o in chain.ops for s in self.program.ops[o].writes}
        for s in {s for o in chain.ops for s in self.program.ops[o].needs} - made:
            self._touch(s, 2 * gap.end + 1)
        for s in made:
            self._touch(s, 2 * gap.end)
        self.inserted[gap.end] = sorted({*self.inserted.get(gap.end, ()), *chain.ops})

    def _inside(self, gap: _Gap, chain: _Chain) -> int:
        """Return the most bytes live from the chain's first op to the gap's end, but for what is held longer for it."""
        program, tables = self.program, self.program.tables
        dies: dict[int, int] = {}
        made: set[int] = set()
        for i, o in enumerate(chain.ops):
            made.update(program.ops[o].writes)
            dies.update((s, i) for s in (*program.ops[o].reads, *program.ops[o].writes))
        at_end = int(self.profile[gap.end])
        live = at_end - int(tables.written_bytes[self.op_at[gap.end]])
        most = at_end + self.bytes[gap.s]
        for i, o in enumerate(chain.ops):
            live += int(tables.written_bytes[o])
            most = max(most, live + int(tables.workspace_bytes[o] + tables.replay_bytes[o]))
            live -= sum(
                self.bytes[s]
                for s in {*program.ops[o].reads, *program.ops[o].writes} & made
                if dies[s] == i
            )
        # The gap's own copy was counted twice: it is among what is live at the gap's end.
        return most - self.bytes[gap.s]

    def _touch(self, s: int, touch: int) -> None:
        touches = self._touches(s)
        i = bisect_left(touches, touch)
        if touches[i : i + 1] != [touch]:
            touches.insert(i, touch)

    def schedule(self) -> Schedule:
        """Return the schedule with the runs put in."""
        runs: list[int] = []
        before: list[int] = []
        done = 0
        for place in sorted(self.inserted):
            i = bisect_left(self.at, place)
            front = self.inserted[place]
            # At a place is one of the backward's own ops, or else a run in front of one.
            j = (
                self.before[i]
                if i < len(self.at) and self.at[i] == place
                else place - self.first_backward - i
            )
            runs.extend((*self.runs[done:i], *front))
            before.extend((*self.before[done:i], *[j] * len(front)))
            done = i
        runs.extend(self.runs[done:])
        before.extend(self.before[done:])
        return with_runs(self.program, tuple(runs), tuple(before))


def _most(window: IntArray) -> int:
    """Return the most bytes in a window, 0 if it is empty. Not ``max``: on the short windows that most are it takes four times as long."""
    return int(window.item(window.argmax())) if len(window) else 0
