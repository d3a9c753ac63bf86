"""Link use: the seconds that a scheduled step waits for copies off the device and back.

Each way of the link copies one value after another. A value is sent as soon as it is computed, and
the forward waits for its copy where the schedule lets go of it. It is fetched where the schedule
takes memory for it, and the backward waits before the op that reads it.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from fxckpt.solver.positions import backward_order, last_in_forward
from fxckpt.solver.program import FloatArray, IntArray, Link, Program
from fxckpt.solver.schedule import Schedule, forward_ops


@dataclass(frozen=True, eq=False)
class Movable:
    """Saved values that may be sent away, in the order in which the forward computes them.

    Positions are those of :class:`~fxckpt.solver.schedule.Away`.
    """

    link: Link
    storage: IntArray
    bytes: IntArray
    made: IntArray
    """Position of the op that computes each value."""
    used: IntArray
    """Last position of the forward that accesses each value."""
    read: IntArray
    """First position of the backward that reads each value."""
    seconds: FloatArray
    """Seconds of the op at each position."""
    forward_ops: int
    """Number of leading positions that belong to the forward."""

    @classmethod
    def of(cls, program: Program, schedule: Schedule) -> Movable:
        """Return the values of a schedule that may be sent away; the program has a link."""
        link = program.link
        assert link is not None
        tables = program.tables
        order = np.asarray(forward_ops(program, schedule.saved), dtype=np.int64)
        runs = np.asarray(schedule.runs, dtype=np.int64)
        before = np.asarray(schedule.before, dtype=np.int64)
        backward, _, _ = backward_order(tables, runs, before, len(program.backward))
        position = np.full(len(program.ops) + 1, -1)
        position[order] = np.arange(len(order))
        read = _first(*tables.reads.rows(backward), len(program.storages))
        written = _first(*tables.writes.rows(backward), len(program.storages))
        used = last_in_forward(tables, order)
        saved = np.asarray([s for s in schedule.saved if s in link.storages], dtype=np.int64)
        made = position[tables.producer[saved]]
        # A recompute that came first would make the saved value one that nothing reads.
        kept = (made >= 0) & (read[saved] >= 0) & (tables.bytes[saved] > 0)
        kept &= (written[saved] < 0) | (written[saved] >= read[saved])
        saved, made = saved[kept], made[kept]
        ranked = np.argsort(made, kind="stable")
        saved, made = saved[ranked], made[ranked]
        return cls(
            link,
            saved,
            tables.bytes[saved],
            made,
            used[saved],
            read[saved] + len(order),
            tables.seconds[np.concatenate((order, backward))],
            len(order),
        )

    @cached_property
    def starts(self) -> FloatArray:
        """Seconds from the start of the step to that of each position, and to the end."""
        return np.concatenate(([0.0], np.cumsum(self.seconds)))


def _first(storages: IntArray, positions: IntArray, count: int) -> IntArray:
    """Return the first position of each storage, or -1."""
    first = np.full(count, -1)
    first[storages[::-1]] = positions[::-1]
    return first


def stall_seconds(movable: Movable, first: dict[int, int], last: dict[int, int]) -> float:
    """Return the seconds that a step waits for its copies.

    ``first`` and ``last`` are the positions at which values are away, by their index in
    ``movable``.
    """
    link, starts = movable.link, movable.starts
    nbytes, made, read = movable.bytes.tolist(), movable.made.tolist(), movable.read.tolist()
    # What happens at a position, before its op: 0 a value's send begins, 1 its memory is freed,
    # 2 its fetch begins, those that are read first before others, 3 it is read.
    events: dict[int, list[tuple[int, int, int]]] = defaultdict(list)
    for i in first:
        events[made[i] + 1].append((0, i, i))
        events[first[i]].append((1, i, i))
        events[last[i] + 1].append((2, read[i], i))
        events[read[i]].append((3, i, i))
    stalled = out_free = in_free = 0.0
    done: dict[int, float] = {}
    for position in sorted(events):
        now = float(starts[position]) + stalled
        for kind, _, i in sorted(events[position]):
            if kind == 0:
                out_free = max(now, out_free) + nbytes[i] / link.out_bytes_per_second
                done[i] = out_free
            elif kind == 2:
                in_free = max(now, in_free) + nbytes[i] / link.in_bytes_per_second
                done[i] = in_free
            elif done[i] > now:
                stalled += done[i] - now
                now = done[i]
    return stalled
