"""Trim: bring a schedule that is a little over the budget within it.

A cut flips all layers of the same shape at one price, so the fastest schedules of a price search often miss the budget by little. Here single
copies are given up where the profile is over the limit: a copy is dropped between two touches and its op runs again in front of the second, with
whatever of its inputs is not at hand by then; those first that cost the least seconds per byte.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from fxckpt.passes.program import Program
from fxckpt.passes.schedule import Schedule, forward_ops, with_runs
from fxckpt.passes.simulate import Simulation

FORWARD = -1


@dataclass(frozen=True)
class Trim:
    """Give up copies while the profile is above ``limit`` bytes."""

    limit: int
    longest: int = 64
    """At most so many ops run again for one copy."""

    def __call__(self, program: Program, schedule: Schedule, simulation: Simulation) -> Schedule:
        """Return a schedule of a lower peak, as far as the estimates go; the simulator is to judge it. ``simulation`` is that of ``schedule``."""
        gaps = _Gaps(program, schedule, simulation, self.limit, self.longest)
        for gap in gaps.cheapest_first():
            gaps.give_up(gap)
        return gaps.schedule()


@dataclass(frozen=True)
class Gap:
    """A copy of storage ``s`` that nobody touches after position ``begin`` and before position ``end``, where it is read."""

    s: int
    begin: int
    end: int


class _Gaps:
    def __init__(self, program: Program, schedule: Schedule, simulation: Simulation, limit: int, longest: int) -> None:
        self.program = program
        self.tables = program.tables
        self.runs = schedule.runs
        self.before = schedule.before
        self.limit = limit
        self.longest = longest
        self.profile = np.asarray(simulation.profile).copy()
        self.touches: dict[int, list[int]] = {}
        """Per storage: positions in the profile where it is touched, ascending. A run that makes it again is noted as -position - 1."""
        self.run_at: dict[int, int] = {}
        """Per position: the run there."""
        self.backward_at: dict[int, int] = {}
        """Per position: the backward op there."""
        self.inserted: dict[int, list[int]] = {}
        """Per position: ops to run in front of it."""
        self.first_backward = simulation.forward_ops
        self._read(schedule)

    def _read(self, schedule: Schedule) -> None:
        program, touches = self.program, self.touches
        ops = program.ops
        place = 0
        for o in forward_ops(program, schedule.saved):
            for s in (*ops[o].needs, *ops[o].writes):
                touches.setdefault(s, []).append(place)
            place += 1
        i = 0
        for j, reads in enumerate(program.forward_reads):
            while i < len(self.runs) and self.before[i] == j:
                op = ops[self.runs[i]]
                for s in op.needs:
                    touches.setdefault(s, []).append(place)
                for s in op.writes:
                    touches.setdefault(s, []).append(-place - 1)
                self.run_at[place] = i
                i, place = i + 1, place + 1
            for s in reads:
                touches.setdefault(s, []).append(place)
            self.backward_at[place] = j
            place += 1

    def gaps(self) -> Iterator[Gap]:
        """Yield the gaps that lie over positions beyond the limit."""
        over = np.concatenate(([0], np.cumsum(self.profile > self.limit)))
        for s, touches in self.touches.items():
            storage = self.program.storages[s]
            if storage.producer < 0 or storage.is_output or not storage.bytes or self.program.ops[storage.producer].pinned is not None:
                continue
            for a, b in zip(touches, touches[1:], strict=False):
                begin = a if a >= 0 else -a - 1
                if b > begin and b >= self.first_backward and over[b] > over[begin + 1]:
                    yield Gap(s, begin, b)

    def cheapest_first(self) -> list[Gap]:
        """Return the gaps by seconds per byte."""
        worth = []
        for gap in self.gaps():
            chain = self.chain(gap)
            if chain is not None:
                seconds = sum(self.tables.seconds[o] for o in chain[0])
                worth.append((seconds / self.program.storages[gap.s].bytes, -(gap.end - gap.begin), gap.s, gap.begin, gap))
        return [w[-1] for w in sorted(worth, key=lambda w: w[:-1])]

    def chain(self, gap: Gap) -> tuple[list[int], list[tuple[int, int]]] | None:
        """Return the ops to run again in front of the gap's end, in order, and the storages to hold longer, each with since when."""
        program = self.program
        ops: list[int] = []
        longer: list[tuple[int, int]] = []
        todo, done = [program.storages[gap.s].producer], set[int]()
        while todo:
            o = todo.pop()
            if o in done:
                continue
            done.add(o)
            ops.append(o)
            if len(ops) > self.longest or program.ops[o].pinned is not None:
                return None
            for u in program.ops[o].needs:
                storage = program.storages[u]
                since = self.at_hand(u, gap.end)
                if u == gap.s or storage.is_output or since is None:
                    continue
                if since >= 0 and self.fits(since, gap.end, storage.bytes):
                    longer.append((u, since))
                elif storage.producer < 0:
                    return None
                else:
                    todo.append(storage.producer)
        return sorted(ops), longer

    def at_hand(self, s: int, at: int) -> int | None:
        """Return None if a copy is held at ``at`` anyway, else since when the last one is not, or -1 if none may be held."""
        last = -1
        for touch in self.touches.get(s, ()):
            place = touch if touch >= 0 else -touch - 1
            if place < at:
                last = place
            else:
                return None if touch >= 0 else (last if self.program.storages[s].is_savable else -1)
        return last if self.program.storages[s].is_savable or last >= self.first_backward else -1

    def inside(self, at: int, chain: list[int]) -> int:
        """Return the most bytes live while ``chain`` runs in front of position ``at``, the gap's own copy twice."""
        program, tables = self.program, self.tables
        dies: dict[int, int] = {}
        for i, o in enumerate(chain):
            for s in (*program.ops[o].reads, *program.ops[o].writes):
                dies[s] = i
        made = {s for o in chain for s in program.ops[o].writes}
        live = int(self.profile[at]) - int(tables.written_bytes[self.op_at(at)])
        most = int(self.profile[at])
        for i, o in enumerate(chain):
            live += int(tables.written_bytes[o])
            most = max(most, live + int(tables.scratch_bytes[o] + tables.replay_bytes[o]))
            live -= sum(program.storages[s].bytes for s in {*program.ops[o].reads, *program.ops[o].writes} & made if dies[s] == i)
        return most

    def op_at(self, at: int) -> int:
        """Return the op that runs at a position of the backward, numbered through."""
        return self.runs[self.run_at[at]] if at in self.run_at else len(self.program.ops) + self.backward_at[at]

    def fits(self, begin: int, end: int, nbytes: int) -> bool:
        window = self.profile[begin + 1 : end + 1]
        return not len(window) or int(window.max()) + nbytes <= self.limit

    def give_up(self, gap: Gap) -> None:
        """Run the gap's op again in front of its end, if that still brings a position within the limit and puts none beyond."""
        touches = self.touches[gap.s]
        at = touches.index(gap.end)
        if not at or touches[at - 1] == -gap.end - 1:
            return  # it is made again there by now
        gap = Gap(gap.s, touches[at - 1] if touches[at - 1] >= 0 else -touches[at - 1] - 1, gap.end)
        window = self.profile[gap.begin + 1 : gap.end]
        if not len(window) or int(window.max()) <= self.limit:
            return
        found = self.chain(gap)
        if found is None:
            return
        chain, longer = found
        made = {s for o in chain for s in self.program.ops[o].writes if s != gap.s}
        held = sum(self.program.storages[s].bytes for s, _ in longer)
        inside = self.inside(gap.end, chain) - self.program.storages[gap.s].bytes + held
        if inside > self.limit and inside >= int(window.max()):
            return
        window -= self.program.storages[gap.s].bytes
        for s, since in longer:
            self.profile[since + 1 : gap.end] += self.program.storages[s].bytes
            self._touch(s, gap.end)
        for o in chain:
            for u in self.program.ops[o].needs:
                if u not in made and u != gap.s:
                    self._touch(u, gap.end)
        self.profile[gap.end] = max(int(self.profile[gap.end]) + held, inside)
        for s in (*made, gap.s):
            self._touch(s, gap.end, is_made=True)
        front = self.inserted.setdefault(gap.end, [])
        front.extend(o for o in chain if o not in front)
        front.sort()

    def _touch(self, s: int, at: int, *, is_made: bool = False) -> None:
        touches = self.touches.setdefault(s, [])
        place = bisect_left(touches, at, key=lambda t: t if t >= 0 else -t - 1)
        touch = -at - 1 if is_made else at
        if touch not in touches[place : place + 2]:
            # What is made in front of a position is made before it is read there.
            touches.insert(place if is_made else place + (touches[place : place + 1] == [-at - 1]), touch)

    def schedule(self) -> Schedule:
        """Return the schedule with the runs put in."""
        runs: list[int] = []
        before: list[int] = []
        place, i = self.first_backward, 0
        for j in range(len(self.program.backward)):
            while True:
                for o in self.inserted.get(place, ()):
                    runs.append(o)
                    before.append(j)
                is_run = i < len(self.runs) and self.before[i] == j
                if is_run:
                    runs.append(self.runs[i])
                    before.append(j)
                    i += 1
                place += 1
                if not is_run:
                    break
        return with_runs(self.program, tuple(runs), tuple(before))
