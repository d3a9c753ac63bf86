"""Retain: spend the bytes that a schedule leaves of the budget.

A cut flips all layers of the same shape at one price, so the best schedule of a search over prices
often stops short of the budget. Here single recomputes are removed, the most seconds per byte
first: their readers take the copy before, which is retained longer, or the value saved by the
forward. Recomputes that only served the removed one go with it. A recompute is removed only if the
profile has room for the longer live interval, and the limits on saved values for what the forward
saves more.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from fxckpt.solver.cuts.saved_limits import SavedRooms
from fxckpt.solver.positions import last_in_forward
from fxckpt.solver.program import FloatArray, IntArray, Program
from fxckpt.solver.schedule import Schedule, forward_ops, with_runs
from fxckpt.solver.simulate import Simulation

FORWARD = -1
"""Stands for the forward among the recomputes that write copies."""
NONE = -1
"""Stands for no storage."""


@dataclass(frozen=True)
class Retain:
    """Retain copies, and remove their recomputes, within ``limit`` bytes."""

    limit: int
    seconds: Sequence[float] | None = None
    """Seconds of each op in place of the program's, as a perturbation."""

    def __call__(self, program: Program, schedule: Schedule, simulation: Simulation) -> Schedule:
        """Return ``schedule`` without the recomputes that the limit makes unnecessary.

        ``simulation`` is that of ``schedule``, and within the limit.
        """
        copies = _Copies(
            program,
            schedule,
            simulation,
            program.tables.seconds.tolist() if self.seconds is None else self.seconds,
        )
        savings = copies.savings_per_byte()
        for i in np.argsort(-savings, kind="stable")[: np.count_nonzero(savings)].tolist():
            copies.retain_if_fits(i, self.limit)
        return copies.remaining()


class _Copies:
    """Copies of the recomputed values, and their readers.

    Copies are numbered by storage, then in the order in which they are written: that of the forward
    comes first, even if it is not saved.
    """

    def __init__(
        self, program: Program, schedule: Schedule, simulation: Simulation, seconds: Sequence[float]
    ) -> None:
        tables = program.tables
        self.program = program
        self.schedule = schedule
        self.seconds = [seconds[o] for o in schedule.runs]
        self.profile = simulation.live.copy()
        self.taken: list[int] = simulation.taken.tolist()
        """Storage whose memory the op at each position takes, or -1."""
        self.is_dropped = [False] * len(schedule.runs)
        runs = np.asarray(schedule.runs, dtype=np.int64)
        at = simulation.forward_ops + np.arange(len(runs)) + np.asarray(schedule.before, np.int64)
        in_forward = np.asarray(forward_ops(program, schedule.saved), dtype=np.int64)
        self.is_in_forward = np.isin(runs, in_forward).tolist()
        self.times: list[int] = np.bincount(
            np.concatenate((in_forward, runs)), minlength=len(program.ops)
        ).tolist()
        self.at = at.tolist()
        """Position of each recompute in the profile."""

        table = _CopyTable.of(program, schedule, simulation.forward_ops, at, len(self.profile))
        storage, run = table.storage, table.run
        last = np.where(
            run == FORWARD, last_in_forward(tables, in_forward)[storage], at[run] if len(at) else 0
        )
        np.maximum.at(last, table.read, table.read_at)
        self.run: list[int] = run.tolist()
        """Recompute that writes each copy, or FORWARD."""
        self.bytes: list[int] = tables.bytes[storage].tolist()
        self.is_savable: list[bool] = tables.is_savable[storage].tolist()
        self.is_output: list[bool] = tables.is_output[storage].tolist()
        self.storage: list[int] = storage.tolist()
        self.saved = set(schedule.saved)
        self.rooms = SavedRooms(program, schedule.saved)
        """Bytes that the program's limits on saved values leave."""
        self.readers: list[int] = np.bincount(table.read, minlength=len(run)).tolist()
        """Number of readers of each copy."""
        self.last: list[int] = last.tolist()
        """Position of the last access of each copy."""
        self.replacement = list(range(len(run)))
        """Each copy itself, or the earlier one that its readers take once it is dropped."""
        self.outputs: list[list[int]] = [[] for _ in self.at]
        """Copies that each recompute writes."""
        self.inputs: list[list[int]] = [[] for _ in self.at]
        """Recomputed copies that each recompute reads."""
        for c, i in enumerate(self.run):
            if i != FORWARD:
                self.outputs[i].append(c)
        read_by_runs = table.read[: len(table.reader)]
        for c, i in zip(read_by_runs.tolist(), table.reader.tolist(), strict=True):
            if self.run[c] != FORWARD:
                self.inputs[i].append(c)

    def savings_per_byte(self) -> FloatArray:
        """Return the seconds per byte that the removal of each recompute saves."""
        seconds = np.asarray(self.seconds) * [self._costs(i) for i in range(len(self.seconds))]
        for i, inputs in enumerate(self.inputs):
            if any(self.readers[c] == 1 for c in inputs):
                seconds[i] = sum([self.seconds[r] for r in self._dead_with(i) if self._costs(r)])
        nbytes = [
            sum([self.bytes[c] for c in outputs if self.readers[c]]) for outputs in self.outputs
        ]
        savings: FloatArray = seconds / np.maximum(nbytes, 1)
        return savings

    def _costs(self, i: int) -> bool:
        """Return whether recompute ``i`` takes extra time: its op runs elsewhere too."""
        return self.times[self.schedule.runs[i]] > 1

    def _dead_with(self, i: int) -> list[int]:
        """Return recompute ``i`` and those that are dead without it."""
        dead, fewer, readers = [i], dict[int, int](), self.readers
        for r in dead:
            for c in self.inputs[r]:
                c = self._present(c)
                producer = self.run[c]
                if producer == FORWARD:
                    continue
                fewer[c] = count = fewer.get(c, 0) + 1
                if count == readers[c] and all(
                    readers[other] == fewer.get(other, 0) for other in self.outputs[producer]
                ):
                    dead.append(producer)
        return dead

    def retain_if_fits(self, i: int, limit: int) -> None:
        """Remove recompute ``i`` if that saves time and the copies before it fit ``limit``."""
        if self.is_dropped[i]:
            return
        moves = [(c, self._before(c)) for c in self.outputs[i] if self.readers[c]]
        if not all(self._may_move(i, c, before) for c, before in moves):
            return
        spans = [
            (self._held_from(b), self.bytes[c])
            for c, b in moves
            if self.run[b] != FORWARD or not self.is_output[c]
        ]
        saved = {self.storage[c] for c, b in moves if self.run[b] == FORWARD} - self.saved
        if not self._has_room(spans, self.at[i], limit) or not self.rooms.has_room(saved):
            return
        dead = self._dead_with(i)
        if not any(self._costs(r) for r in dead):
            return
        for begin, nbytes in spans:
            self.profile[begin : self.at[i]] += nbytes
        for _, b in moves:
            if self._is_taken(b):
                self.taken[self.last[b]] = NONE
        self.saved |= saved
        self.rooms.take(saved)
        self._drop(moves, dead)

    def _is_taken(self, c: int) -> bool:
        """Return whether the last reader of a copy takes its memory."""
        return self.last[c] >= 0 and self.taken[self.last[c]] == self.storage[c]

    def _held_from(self, c: int) -> int:
        """Return the first position with more live bytes if a copy is held after its last use."""
        return self.last[c] if self._is_taken(c) else self.last[c] + 1

    def _before(self, c: int) -> int:
        """Return the copy of the same storage before copy ``c``."""
        c -= 1
        while self.run[c] != FORWARD and self.is_dropped[self.run[c]]:
            c -= 1
        return c

    def _may_move(self, i: int, c: int, before: int) -> bool:
        """Return whether readers of copy ``c``, written by recompute ``i``, may take ``before``."""
        return self.run[before] != FORWARD or (self.is_in_forward[i] and self.is_savable[c])

    def _has_room(self, spans: list[tuple[int, int]], end: int, limit: int) -> bool:
        """Return whether more bytes, from the begin of each span up to ``end``, fit ``limit``."""
        if len(spans) > 1:
            spans.sort()
        more = 0
        for k, (begin, nbytes) in enumerate(spans):
            more += nbytes
            window = self.profile[begin : spans[k + 1][0] if k + 1 < len(spans) else end]
            # On short windows, which most are, argmax takes a quarter of the time of max.
            if len(window) and window.item(window.argmax()) + more > limit:
                return False
        return True

    def _drop(self, moves: list[tuple[int, int]], dead: list[int]) -> None:
        """Let the readers of each moved copy take the one before, and drop dead recomputes."""
        for c, before in moves:
            self.readers[before] += self.readers[c]
            self.readers[c] = 0
            self.last[before] = self.last[c]
            self.replacement[c] = before
        for r in dead:
            self.is_dropped[r] = True
            self.times[self.schedule.runs[r]] -= 1
            for c in self.inputs[r]:
                self.readers[self._present(c)] -= 1

    def _present(self, c: int) -> int:
        """Return the copy that the readers of ``c`` take now."""
        while self.replacement[c] != c:
            c = self.replacement[c]
        return c

    def remaining(self) -> Schedule:
        """Return the schedule of the remaining recomputes."""
        left = [i for i, is_dropped in enumerate(self.is_dropped) if not is_dropped]
        runs, before = self.schedule.runs, self.schedule.before
        return with_runs(
            self.program, tuple([runs[i] for i in left]), tuple([before[i] for i in left])
        )


@dataclass(frozen=True)
class _CopyTable:
    """Copies of the recomputed values and their reads, as arrays."""

    storage: IntArray
    """Storage of each copy."""
    run: IntArray
    """Recompute that writes each copy, or FORWARD."""
    read: IntArray
    """Copy of each read, those by recomputes first."""
    read_at: IntArray
    """Position of each read."""
    reader: IntArray
    """Recompute of each read by recomputes."""

    @classmethod
    def of(
        cls, program: Program, schedule: Schedule, first: int, at: IntArray, positions: int
    ) -> _CopyTable:
        """Return the table of a schedule whose recomputes have the positions ``at``.

        ``first`` is the first position of the backward, ``positions`` the length of the profile.
        """
        tables, length = program.tables, len(program.backward)
        runs = np.asarray(schedule.runs, dtype=np.int64)
        before = np.asarray(schedule.before, dtype=np.int64)
        at_backward = (
            first + np.arange(length) + np.searchsorted(before, np.arange(length), side="right")
        )
        written, writer = tables.writes.rows(runs)
        is_written = np.zeros(len(tables.bytes), dtype=bool)
        is_written[written] = True
        in_order = np.flatnonzero(is_written)
        # Time of each write: 0 in the forward, else one after the position of the recompute.
        span = positions + 1
        key = np.concatenate((in_order * span, written * span + at[writer] + 1))
        by_storage = np.argsort(key)
        key = key[by_storage]
        run = np.concatenate((np.full(len(in_order), FORWARD), writer))[by_storage]
        read, reader = tables.needs.rows(runs)
        read, reader = read[is_written[read]], reader[is_written[read]]
        own_read, own_reader = tables.reads.rows(len(program.ops) + np.arange(length))
        own_read, own_reader = own_read[is_written[own_read]], own_reader[is_written[own_read]]
        read_at = np.concatenate((at[reader], at_backward[own_reader]))
        every_read = np.concatenate((read, own_read))
        # Outputs are read where the forward left them.
        since = np.where(tables.is_output[every_read], 1, read_at + 1)
        copy = np.searchsorted(key, every_read * span + since) - 1
        return cls(key // span, run, copy, read_at, reader)
