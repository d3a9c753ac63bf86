"""Retain: spend what a schedule leaves of the budget.

A cut flips all layers of the same shape at one price, so the best schedule of a price search often stops short of the budget. Here single runs are
dropped, those first that cost the most seconds per byte: their readers take the copy before it, which lives on, or the value saved by the
forward; what was run for the dropped run alone goes with it. A run is dropped only where the profile leaves room for the longer life.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from fxckpt.solver.program import FloatArray, Program
from fxckpt.solver.schedule import Schedule, forward_ops, with_runs
from fxckpt.solver.simulate import Simulation, last_touches

FORWARD = -1


@dataclass(frozen=True)
class Retain:
    """Drop runs while ``limit`` bytes allow it."""

    limit: int
    seconds: Sequence[float] | None = None
    """Per op: what to go by instead of the program's own."""

    def __call__(self, program: Program, schedule: Schedule, simulation: Simulation) -> Schedule:
        """Return a schedule of no more time. ``simulation`` is that of ``schedule``, and within the limit."""
        copies = _Copies(
            program,
            schedule,
            simulation,
            program.tables.seconds.tolist() if self.seconds is None else self.seconds,
        )
        worth = copies.worth()
        for i in np.argsort(-worth, kind="stable")[: np.count_nonzero(worth)].tolist():
            copies.retain_if_fits(i, self.limit)
        return copies.left()


class _Copies:
    """Who reads which copy of a value, for the values that some run makes.

    Copies are numbered by storage, and then in the order in which they are made: that of the forward comes first, also where it is not saved.
    """

    def __init__(
        self, program: Program, schedule: Schedule, simulation: Simulation, seconds: Sequence[float]
    ) -> None:
        tables, first, length = program.tables, simulation.forward_ops, len(program.backward)
        self.program = program
        self.schedule = schedule
        self.seconds = [seconds[o] for o in schedule.runs]
        self.profile = simulation.live.copy()
        self.is_dropped = [False] * len(schedule.runs)
        runs, before = (
            np.asarray(schedule.runs, dtype=np.int64),
            np.asarray(schedule.before, dtype=np.int64),
        )
        at = first + np.arange(len(runs)) + before
        at_backward = (
            first + np.arange(length) + np.searchsorted(before, np.arange(length), side="right")
        )
        in_forward = np.asarray(forward_ops(program, schedule.saved), dtype=np.int64)
        self.is_in_forward = np.isin(runs, in_forward).tolist()
        self.times: list[int] = np.bincount(
            np.concatenate((in_forward, runs)), minlength=len(program.ops)
        ).tolist()
        self.at = at.tolist()
        """Per run: its place in the profile."""

        written, writer = tables.writes.rows(runs)
        is_written = np.zeros(len(tables.bytes), dtype=bool)
        is_written[written] = True
        in_order = np.flatnonzero(is_written)
        # A copy is made after place - 1, so to say: the forward's at 0, a run's at the place after its own.
        span = len(self.profile) + 1
        made = np.concatenate((in_order * span, written * span + at[writer] + 1))
        by_storage = np.argsort(made)
        made = made[by_storage]
        storage = made // span
        run = np.concatenate((np.full(len(in_order), FORWARD), writer))[by_storage]
        read, reader = tables.needs.rows(runs)
        read, reader = read[is_written[read]], reader[is_written[read]]
        read_last, reader_last = tables.reads.rows(len(program.ops) + np.arange(length))
        read_last, reader_last = (
            read_last[is_written[read_last]],
            reader_last[is_written[read_last]],
        )
        place = np.concatenate((at[reader], at_backward[reader_last]))
        copy = np.searchsorted(made, np.concatenate((read, read_last)) * span + place + 1) - 1
        last = np.where(
            run == FORWARD, last_touches(tables, in_forward)[storage], at[run] if len(at) else 0
        )
        np.maximum.at(last, copy, place)

        self.run: list[int] = run.tolist()
        """Per copy: the run that makes it, or FORWARD."""
        self.bytes: list[int] = tables.bytes[storage].tolist()
        self.is_savable: list[bool] = tables.is_savable[storage].tolist()
        self.is_output: list[bool] = tables.is_output[storage].tolist()
        self.readers: list[int] = np.bincount(copy, minlength=len(made)).tolist()
        self.last: list[int] = last.tolist()
        """Per copy: where in the profile it is last touched."""
        self.stand_in = list(range(len(made)))
        """Per copy: itself, or once it is dropped the earlier one that its readers take."""
        self.outputs: list[list[int]] = [[] for _ in self.at]
        """Per run: the copies it makes."""
        self.inputs: list[list[int]] = [[] for _ in self.at]
        """Per run: the copies made by runs that it reads."""
        for c, i in enumerate(self.run):
            if i != FORWARD:
                self.outputs[i].append(c)
        for c, i in zip(copy[: len(reader)].tolist(), reader.tolist(), strict=True):
            if self.run[c] != FORWARD:
                self.inputs[i].append(c)

    def worth(self) -> FloatArray:
        """Return, per run, the seconds per byte of dropping it."""
        seconds = np.asarray(self.seconds) * [self._costs(i) for i in range(len(self.seconds))]
        for i, inputs in enumerate(self.inputs):
            if any(self.readers[c] == 1 for c in inputs):
                seconds[i] = sum([self.seconds[r] for r in self._gone_with(i) if self._costs(r)])
        nbytes = [
            sum([self.bytes[c] for c in outputs if self.readers[c]]) for outputs in self.outputs
        ]
        worth: FloatArray = seconds / np.maximum(nbytes, 1)
        return worth

    def _costs(self, i: int) -> bool:
        return self.times[self.schedule.runs[i]] > 1

    def _gone_with(self, i: int) -> list[int]:
        """Return run ``i`` and the runs nobody but it (and them) needs."""
        gone, fewer, readers = [i], dict[int, int](), self.readers
        for r in gone:
            for c in self.inputs[r]:
                c = self._present(c)
                maker = self.run[c]
                if maker == FORWARD:
                    continue
                fewer[c] = count = fewer.get(c, 0) + 1
                if count == readers[c] and all(
                    readers[other] == fewer.get(other, 0) for other in self.outputs[maker]
                ):
                    gone.append(maker)
        return gone

    def retain_if_fits(self, i: int, limit: int) -> None:
        """Drop run ``i`` if that takes time off and the longer life of the copies before it stays within ``limit``."""
        if self.is_dropped[i]:
            return
        moves = [(c, self._before(c)) for c in self.outputs[i] if self.readers[c]]
        if not all(self._may_move(i, c, before) for c, before in moves):
            return
        spans = [
            (self.last[b] + 1, self.bytes[c])
            for c, b in moves
            if self.run[b] != FORWARD or not self.is_output[c]
        ]
        if not self._has_room(spans, self.at[i], limit):
            return
        gone = self._gone_with(i)
        if not any(self._costs(r) for r in gone):
            return
        for begin, nbytes in spans:
            self.profile[begin : self.at[i]] += nbytes
        self._drop(moves, gone)

    def _before(self, c: int) -> int:
        """Return the copy of the same storage that is there before ``c`` is made."""
        c -= 1
        while self.run[c] != FORWARD and self.is_dropped[self.run[c]]:
            c -= 1
        return c

    def _may_move(self, i: int, c: int, before: int) -> bool:
        """Return whether the readers of copy ``c``, made by run ``i``, may take the one before it."""
        return self.run[before] != FORWARD or (self.is_in_forward[i] and self.is_savable[c])

    def _has_room(self, spans: list[tuple[int, int]], end: int, limit: int) -> bool:
        """Return whether so many bytes more from each of some places up to ``end`` stay within the limit."""
        if len(spans) > 1:
            spans.sort()
        more = 0
        for k, (begin, nbytes) in enumerate(spans):
            more += nbytes
            window = self.profile[begin : spans[k + 1][0] if k + 1 < len(spans) else end]
            # Not max: on the short windows that most are it takes four times as long.
            if len(window) and window.item(window.argmax()) + more > limit:
                return False
        return True

    def _drop(self, moves: list[tuple[int, int]], gone: list[int]) -> None:
        for c, before in moves:
            self.readers[before] += self.readers[c]
            self.readers[c] = 0
            self.last[before] = self.last[c]
            self.stand_in[c] = before
        for r in gone:
            self.is_dropped[r] = True
            self.times[self.schedule.runs[r]] -= 1
            for c in self.inputs[r]:
                self.readers[self._present(c)] -= 1

    def _present(self, c: int) -> int:
        """Return the copy that stands for ``c`` after what was dropped."""
        while self.stand_in[c] != c:
            c = self.stand_in[c]
        return c

    def left(self) -> Schedule:
        """Return what is left of the schedule."""
        left = [i for i, is_dropped in enumerate(self.is_dropped) if not is_dropped]
        runs, before = self.schedule.runs, self.schedule.before
        return with_runs(
            self.program, tuple([runs[i] for i in left]), tuple([before[i] for i in left])
        )
