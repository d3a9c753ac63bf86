"""Trim: bring a schedule that is over the budget within it.

A cut flips all layers of the same shape at one price, so the fastest schedules of a price search often miss the budget by little. Here single
copies are given up where the profile is over the limit: a copy is dropped between two touches and its op runs again in front of the second, with
whatever of its inputs is not at hand by then; those first that cost the least seconds per byte.
"""

from __future__ import annotations

import itertools
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heappush

import numpy as np

from fxckpt.passes.program import Program
from fxckpt.passes.schedule import Schedule, forward_ops, with_runs
from fxckpt.passes.simulate import Simulation

LONGEST = 64
"""At most so many ops run again for one copy."""
STALE = 1.01
"""A price that grew by less since it was last looked at counts as unchanged."""
NOT_HELD = -1


@dataclass(frozen=True)
class Trim:
    """Give up copies while the profile is above ``limit`` bytes."""

    limit: int
    seconds: Sequence[float] | None = None
    """Per op: what to go by instead of the program's own."""

    def __call__(self, program: Program, schedule: Schedule, simulation: Simulation) -> Schedule:
        """Return a schedule of a lower peak, as far as it goes; the simulator is to judge it. ``simulation`` is that of ``schedule``."""
        copies = _Copies(program, schedule, simulation, self.limit)
        for gap in copies.cheapest_first(program.tables.seconds.tolist() if self.seconds is None else self.seconds):
            copies.give_up(gap)
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

    def __init__(self, program: Program, schedule: Schedule, simulation: Simulation, limit: int) -> None:
        self.program = program
        self.runs = schedule.runs
        self.before = schedule.before
        self.limit = limit
        self.profile = simulation.live.copy()
        self.first_backward = simulation.forward_ops
        self.touches: dict[int, list[int]] = {}
        """Per storage, ascending."""
        self.op_at: dict[int, int] = {}
        """Per position of the backward: the op there, numbered through."""
        self.inserted: dict[int, list[int]] = {}
        """Per position: ops to run in front of it."""
        self._read(schedule)

    def _read(self, schedule: Schedule) -> None:
        ops, touches, place = self.program.ops, self.touches, 0
        for o in forward_ops(self.program, schedule.saved):
            for s in (*ops[o].needs, *ops[o].writes):
                touches.setdefault(s, []).append(2 * place + 1)
            place += 1
        i = 0
        for j, reads in enumerate(self.program.forward_reads):
            while i < len(self.runs) and self.before[i] == j:
                for s in ops[self.runs[i]].needs:
                    touches.setdefault(s, []).append(2 * place + 1)
                for s in ops[self.runs[i]].writes:
                    touches.setdefault(s, []).append(2 * place)
                self.op_at[place] = self.runs[i]
                i, place = i + 1, place + 1
            for s in reads:
                touches.setdefault(s, []).append(2 * place + 1)
            self.op_at[place] = len(ops) + j
            place += 1

    def cheapest_first(self, seconds: Sequence[float]) -> Iterator[_Gap]:
        """Yield the gaps by seconds per byte that is over the limit when their turn comes, the longest first among equals."""
        queue: list[tuple[float, int, int, int, float, _Gap]] = []
        for gap in self._gaps():
            cost = seconds[self.program.storages[gap.s].producer]
            queue.append((cost / max(self._useful(gap), 1), gap.begin - gap.end, gap.s, gap.begin, -1.0, gap))
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

    def _useful(self, gap: _Gap) -> int:
        """Return how many of the copy's bytes are over the limit somewhere in the gap."""
        window = self.profile[gap.begin + 1 : gap.end]
        return min(self.program.storages[gap.s].bytes, (int(window.max()) if len(window) else 0) - self.limit)

    def _gaps(self) -> Iterator[_Gap]:
        """Yield the gaps that lie over positions beyond the limit."""
        over = np.concatenate(([0], np.cumsum(self.profile > self.limit))).tolist()
        for s, touches in self.touches.items():
            storage = self.program.storages[s]
            if storage.producer < 0 or storage.is_output or not storage.bytes or self.program.ops[storage.producer].pinned is not None:
                continue
            for a, b in itertools.pairwise(touches):
                begin, end = a // 2, b // 2
                if b % 2 and end >= self.first_backward and over[end] > over[begin + 1]:
                    yield _Gap(s, begin, end)

    def _chain(self, gap: _Gap) -> _Chain | None:
        """Return what giving up the gap's copy takes; None if it cannot be done."""
        program = self.program
        ops: set[int] = set()
        longer: list[tuple[int, int]] = []
        todo = [program.storages[gap.s].producer]
        while todo:
            o = todo.pop()
            if o in ops:
                continue
            ops.add(o)
            if len(ops) > LONGEST or program.ops[o].pinned is not None:
                return None
            for u in program.ops[o].needs:
                storage = program.storages[u]
                last = None if u == gap.s or storage.is_output else self._last_touch(u, gap.end)
                if last is None:
                    continue
                if last != NOT_HELD and self._fits(last, gap.end, storage.bytes):
                    longer.append((u, last))
                elif storage.producer >= 0:
                    todo.append(storage.producer)
                else:
                    return None
        return _Chain(tuple(sorted(ops)), tuple(longer))

    def _last_touch(self, s: int, at: int) -> int | None:
        """Return None if a copy is there at position ``at`` anyway, else the last touch before, or NOT_HELD if it must not be held from there."""
        touches = self.touches.get(s, [])
        i = bisect_left(touches, 2 * at)
        if i < len(touches) and touches[i] % 2:
            return None
        last = touches[i - 1] // 2 if i else NOT_HELD
        return last if self.program.storages[s].is_savable or last >= self.first_backward else NOT_HELD

    def _fits(self, begin: int, end: int, nbytes: int) -> bool:
        window = self.profile[begin + 1 : end + 1]
        return not len(window) or int(window.max()) + nbytes <= self.limit

    def give_up(self, gap: _Gap) -> None:
        """Run the gap's op again in front of its end, unless that would take as many bytes there as it frees before."""
        touches = self.touches[gap.s]
        i = bisect_left(touches, 2 * gap.end)
        if touches[i] == 2 * gap.end:
            return  # by now it is made again there
        gap = _Gap(gap.s, touches[i - 1] // 2, gap.end)  # by now it may be read later than it was
        window = self.profile[gap.begin + 1 : gap.end]
        if not len(window) or int(window.max()) <= self.limit:
            return
        chain = self._chain(gap)
        if chain is None:
            return
        storages = self.program.storages
        held = sum(storages[s].bytes for s, _ in chain.longer)
        inside = self._inside(gap, chain) + held
        if inside > self.limit and inside >= int(window.max()):
            return
        window -= storages[gap.s].bytes
        for s, last in chain.longer:
            self.profile[last + 1 : gap.end] += storages[s].bytes
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
        most = at_end + program.storages[gap.s].bytes
        for i, o in enumerate(chain.ops):
            live += int(tables.written_bytes[o])
            most = max(most, live + int(tables.scratch_bytes[o] + tables.replay_bytes[o]))
            live -= sum(program.storages[s].bytes for s in {*program.ops[o].reads, *program.ops[o].writes} & made if dies[s] == i)
        # The gap's own copy was counted twice: it is among what is live at the gap's end.
        return most - program.storages[gap.s].bytes

    def _touch(self, s: int, touch: int) -> None:
        touches = self.touches.setdefault(s, [])
        i = bisect_left(touches, touch)
        if touches[i : i + 1] != [touch]:
            touches.insert(i, touch)

    def schedule(self) -> Schedule:
        """Return the schedule with the runs put in."""
        runs: list[int] = []
        before: list[int] = []
        place, i = self.first_backward, 0
        for j in range(len(self.program.backward)):
            while True:
                front = self.inserted.get(place, [])
                runs.extend(front)
                before.extend([j] * len(front))
                place += 1
                if i == len(self.runs) or self.before[i] != j:
                    break
                runs.append(self.runs[i])
                before.append(j)
                i += 1
        return with_runs(self.program, tuple(runs), tuple(before))
