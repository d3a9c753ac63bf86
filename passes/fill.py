"""Fill: spend what a schedule leaves of the budget.

A cut flips all layers of the same shape at one price, so the best schedule of a price search often stops short of the budget. Here single runs are
dropped, those first that cost the most seconds per byte: their readers take the copy before it, which lives on, or the value saved by the
forward; what was run for the dropped run alone goes with it. A run is dropped only where the profile leaves room for the longer life.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from fxckpt.passes.program import Program
from fxckpt.passes.schedule import Schedule, forward_ops, with_runs
from fxckpt.passes.simulate import Simulation

FORWARD = -1


@dataclass(frozen=True)
class Fill:
    """Drop runs while ``limit`` bytes allow it."""

    limit: int
    seconds: Sequence[float] | None = None
    """Per op: what to go by instead of the program's own."""

    def __call__(self, program: Program, schedule: Schedule, simulation: Simulation) -> Schedule:
        """Return a schedule of no more time. ``simulation`` is that of ``schedule``, and within the limit."""
        copies = _Copies(program, schedule, simulation, program.tables.seconds.tolist() if self.seconds is None else self.seconds)
        worth = [(copies.worth(i), i) for i in range(len(schedule.runs))]
        for _, i in sorted((-w, i) for w, i in worth if w > 0):
            copies.drop_if_fits(i, self.limit)
        return copies.schedule()


class _Copies:
    """Who reads which copy of a value. A copy is (storage, run that made it), or (storage, FORWARD)."""

    def __init__(self, program: Program, schedule: Schedule, simulation: Simulation, seconds: Sequence[float]) -> None:
        self.program = program
        self.runs = schedule.runs
        self.run_before = schedule.before
        self.seconds = [seconds[o] for o in schedule.runs]
        self.profile = np.asarray(simulation.profile)
        self.is_dropped = [False] * len(schedule.runs)
        self.in_forward = forward_ops(program, schedule.saved)
        self.times = [0] * len(program.ops)
        for o in (*self.in_forward, *schedule.runs):
            self.times[o] += 1
        self.readers: dict[tuple[int, int], int] = {}
        self.last: dict[tuple[int, int], int] = {}
        """Where in the profile a copy is last touched."""
        self.inputs: list[list[tuple[int, int]]] = []
        """Per run: the copies it reads."""
        self.at: list[int] = []
        """Per run: its place in the profile."""
        self.before: list[int] = []
        """Per run: the run of the same op before it, or FORWARD."""
        self._read(len(self.in_forward))

    def _read(self, place: int) -> None:
        program = self.program
        for at, o in enumerate(self.in_forward):
            for s in (*program.ops[o].reads, *program.ops[o].writes):
                self.last[s, FORWARD] = at
        latest: dict[int, int] = {}
        i = 0
        for j, reads in enumerate(program.forward_reads):
            while i < len(self.runs) and self.run_before[i] == j:
                op = self.runs[i]
                self.inputs.append([self._touch(s, latest, place) for s in program.ops[op].needs])
                self.before.append(latest.get(op, FORWARD))
                latest[op] = i
                self.at.append(place)
                for s in program.ops[op].writes:
                    self.last[s, i] = place
                i, place = i + 1, place + 1
            for s in reads:
                self._touch(s, latest, place)
            place += 1

    def _touch(self, s: int, latest: dict[int, int], place: int) -> tuple[int, int]:
        copy = s, latest.get(self.program.storages[s].producer, FORWARD)
        self.readers[copy] = self.readers.get(copy, 0) + 1
        self.last[copy] = place
        return copy

    def worth(self, i: int) -> float:
        """Return the seconds per byte of dropping run ``i``."""
        seconds = sum([self.seconds[r] for r in self._gone_with(i) if self._costs(r)])
        if not seconds:
            return 0.0
        nbytes = sum(self.program.storages[s].bytes for s in self._read_outputs(i))
        return seconds / max(nbytes, 1)

    def _costs(self, i: int) -> bool:
        return self.times[self.runs[i]] > 1

    def _read_outputs(self, i: int) -> list[int]:
        return [s for s in self.program.ops[self.runs[i]].writes if self.readers.get((s, i), 0)]

    def _gone_with(self, i: int) -> list[int]:
        """Return run ``i`` and the runs nobody but it (and them) needs."""
        gone, fewer, readers = [i], dict[tuple[int, int], int](), self.readers
        for r in gone:
            for copy in self.inputs[r]:
                if copy[1] != FORWARD and copy not in readers:
                    copy = self._present(copy)
                maker = copy[1]
                if maker == FORWARD:
                    continue
                fewer[copy] = count = fewer.get(copy, 0) + 1
                if count == readers[copy] and all(
                    readers.get((s, maker), 0) == fewer.get((s, maker), 0) for s in self.program.ops[self.runs[maker]].writes
                ):
                    gone.append(maker)
        return gone

    def drop_if_fits(self, i: int, limit: int) -> None:
        """Drop run ``i`` if that takes time off and the longer life of the copies before it stays within ``limit``."""
        if self.is_dropped[i]:
            return
        previous = self.before[i]
        while previous != FORWARD and self.is_dropped[previous]:
            previous = self.before[previous]
        outputs = self._read_outputs(i)
        if previous == FORWARD and not self._may_save(i, outputs):
            return
        spans = [(s, self.last[s, previous] + 1) for s in outputs if previous != FORWARD or not self.program.storages[s].is_output]
        more = np.zeros(self.at[i] - min((begin for _, begin in spans), default=self.at[i]), dtype=np.int64)
        for s, begin in spans:
            more[len(more) - (self.at[i] - begin) :] += self.program.storages[s].bytes
        window = self.profile[self.at[i] - len(more) : self.at[i]]
        if len(more) and int((window + more).max()) > limit:
            return
        gone = self._gone_with(i)
        if not any(self._costs(r) for r in gone):
            return
        window += more
        self._drop(i, previous, outputs, gone)

    def _may_save(self, i: int, outputs: list[int]) -> bool:
        op = self.program.ops[self.runs[i]]
        runs_in_forward = all((s, FORWARD) in self.last for s in op.writes)
        return runs_in_forward and all(self.program.storages[s].is_savable for s in outputs)

    def _drop(self, i: int, previous: int, outputs: list[int], gone: list[int]) -> None:
        for s in outputs:
            self.readers[s, previous] = self.readers.get((s, previous), 0) + self.readers.pop((s, i))
            self.last[s, previous] = self.last[s, i]
        for r in gone:
            self.is_dropped[r] = True
            self.times[self.runs[r]] -= 1
            for copy in self.inputs[r]:
                self.readers[self._present(copy)] -= 1

    def _present(self, copy: tuple[int, int]) -> tuple[int, int]:
        """Return the copy that stands for ``copy`` after what was dropped."""
        s, maker = copy
        while (s, maker) not in self.readers and maker != FORWARD:
            maker = self.before[maker]
        return s, maker

    def schedule(self) -> Schedule:
        """Return what is left."""
        left = [i for i, is_dropped in enumerate(self.is_dropped) if not is_dropped]
        return with_runs(self.program, tuple([self.runs[i] for i in left]), tuple([self.run_before[i] for i in left]))
