"""Offload: choose the saved values that are sent away, and when.

For one schedule of recomputes and a limit on the peak: values are chosen in the order in which the
forward computes them, until the bytes over the limit are covered at every op. Those are the first
on the link and the last that the backward reads. The memory of each is freed where it is needed, at
the latest, and the value is fetched as late as its copy allows without a wait, or later, if memory
is short. The simulator charges what waits are left.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from fxckpt.solver.link_use import Movable
from fxckpt.solver.program import IntArray, Program
from fxckpt.solver.schedule import Away, Schedule


def send_away(program: Program, schedule: Schedule, live: IntArray, limit: int) -> Schedule | None:
    """Return the schedule with values sent away so that its peak is within ``limit`` bytes.

    ``live`` are the live bytes of the schedule with nothing away. None if the values that may be
    away do not suffice, or do not fit the memory that they are sent to.
    """
    return _Windows(Movable.of(program, schedule), live, limit).schedule(schedule)


def send_between(program: Program, schedule: Schedule, live: IntArray, share: float) -> Schedule:
    """Return the schedule with a share of its bytes away from the end of the forward on.

    They are fetched after the backward began, so that they are away while other graphs run. The
    values computed first are sent, as many as the memory that they are sent to holds, and all that
    must be; the peak is no higher than that of ``live``.
    """
    windows = _Windows(
        Movable.of(program, schedule), live, int(live.max(initial=0)), is_between=True
    )
    return windows.between(schedule, share)


def fetch_early(program: Program, schedule: Schedule, live: IntArray, limit: int) -> Schedule:
    """Return the schedule with each value fetched as early as ``limit`` bytes allow.

    ``live`` are the live bytes of the schedule with nothing away. Values are fetched in the order
    in which they are read, so that a copy or an op that takes longer than planned delays no other.
    """
    movable = Movable.of(program, schedule)
    index = {s: i for i, s in enumerate(movable.storage.tolist())}
    read, nbytes = movable.read.tolist(), movable.bytes.tolist()
    room = limit - live
    for each in schedule.away:
        i = index[each.storage]
        room[each.first : read[i]] += nbytes[i]
    away: list[Away] = []
    position = movable.forward_ops
    for each in sorted(schedule.away, key=lambda each: (read[index[each.storage]], each.storage)):
        i = index[each.storage]
        is_full = np.flatnonzero(room[position : read[i]] < nbytes[i])
        position = min(position + (int(is_full[-1]) + 1 if len(is_full) else 0), each.last + 1)
        room[position : read[i]] -= nbytes[i]
        away.append(each._replace(last=max(position - 1, each.first)))
    return replace(schedule, away=tuple(sorted(away)))


def reachable_peak(program: Program, schedule: Schedule, live: IntArray) -> int:
    """Return the least peak of a schedule whose values are sent away at any price in time."""
    movable = Movable.of(program, schedule)
    return int((live - _covered(movable, len(live))).max(initial=0))


def _covered(movable: Movable, length: int) -> IntArray:
    """Return the most bytes that can be away at each position."""
    change = np.zeros(length + 1, dtype=np.int64)
    np.add.at(change, movable.used + 1, movable.bytes)
    np.add.at(change, movable.read, -movable.bytes)
    return np.cumsum(change)[:length]


class _Windows:
    """The positions at which the values of one schedule are away, within one limit."""

    def __init__(
        self, movable: Movable, live: IntArray, limit: int, *, is_between: bool = False
    ) -> None:
        self.movable = movable
        self.earliest = movable.forward_ops + is_between
        """First position of the backward at which a value may be fetched."""
        self.live = live
        self.limit = limit
        self.bytes, self.used = movable.bytes.tolist(), movable.used.tolist()
        self.read = movable.read.tolist()

    def schedule(self, schedule: Schedule) -> Schedule | None:
        """Return the schedule with its windows, or None where none fit."""
        chosen = self._chosen()
        return None if chosen is None else self._with(schedule, chosen)

    def between(self, schedule: Schedule, share: float) -> Schedule:
        """Return the schedule with a share of its bytes away between forward and backward."""
        link = self.movable.link
        required = [s in link.required for s in self.movable.storage.tolist()]
        may_go = [i for i in range(len(self.bytes)) if self.read[i] > self.earliest]
        most = min(link.limit_bytes, share * sum(self.bytes[i] for i in may_go))
        chosen: list[int] = []
        for i in sorted(may_go, key=lambda i: not required[i]):
            if required[i] or self.bytes[i] <= most:
                chosen.append(i)
                most -= self.bytes[i]
        return self._with(schedule, sorted(chosen))

    def _with(self, schedule: Schedule, chosen: list[int]) -> Schedule:
        """Return the schedule with the windows of the values chosen."""
        first, end = self._first(chosen)
        last = self._last(chosen, end)
        storage = self.movable.storage.tolist()
        # A value whose memory was not needed before it is fetched stays.
        away = sorted(Away(storage[i], first[i], last[i]) for i in chosen if first[i] <= last[i])
        return replace(schedule, away=tuple(away))

    def _chosen(self) -> list[int] | None:
        """Return the values to send, in the order in which they are computed."""
        over = self.live - self.limit
        required = self.movable.link.required
        chosen = [
            i
            for i, storage in enumerate(self.movable.storage.tolist())
            if storage in required and self.used[i] + 1 < self.read[i]
        ]
        bound = set(chosen)
        for i in chosen:
            over[self.used[i] + 1 : self.read[i]] -= self.bytes[i]
        for i in range(len(self.bytes)):
            if over.max(initial=0) <= 0:
                break
            if i in bound:
                continue
            window = over[self.used[i] + 1 : self.read[i]]
            if (window > 0).any():
                window -= self.bytes[i]
                chosen.append(i)
        if over.max(initial=0) > 0:
            return None
        for i in sorted(set(chosen) - bound, key=lambda i: (-self.bytes[i], i)):
            window = over[self.used[i] + 1 : self.read[i]]
            if (window + self.bytes[i] <= 0).all():
                window += self.bytes[i]
                chosen.remove(i)
        if sum(self.bytes[i] for i in chosen) > self.movable.link.limit_bytes:
            return None
        return sorted(chosen)

    def _first(self, chosen: list[int]) -> tuple[dict[int, int], float]:
        """Return the first position at which each value is away, and the time at the forward's end.

        A value stays until its memory is needed; of those that are not used again, the one whose
        copy ends first goes first.
        """
        movable, starts = self.movable, self.movable.starts.tolist()
        rate = movable.link.out_bytes_per_second
        made: dict[int, list[int]] = {}
        for i in chosen:
            made.setdefault(int(movable.made[i]), []).append(i)
        first: dict[int, int] = {}
        waiting: list[int] = []
        done: dict[int, float] = {}
        free = stalled = 0.0
        away = 0
        live = self.live.tolist()
        for position in range(movable.forward_ops):
            while live[position] - away > self.limit:
                i = next(i for i in waiting if self.used[i] < position)
                waiting.remove(i)
                stalled = max(stalled, done[i] - starts[position])
                first[i] = position
                away += self.bytes[i]
            for i in made.get(position, ()):
                free = max(starts[position + 1] + stalled, free) + self.bytes[i] / rate
                done[i] = free
                waiting.append(i)
        first |= dict.fromkeys(waiting, movable.forward_ops)
        end = starts[movable.forward_ops]
        return first, max([end + stalled, *(done[i] for i in waiting)]) - end

    def _last(self, chosen: list[int], stalled: float) -> dict[int, int]:
        """Return the last position at which each value is away.

        ``stalled`` are the seconds that the forward waited.
        """
        movable, starts = self.movable, self.movable.starts.tolist()
        rate = movable.link.in_bytes_per_second
        queue = sorted(chosen, key=lambda i: (self.read[i], i))
        # The latest start of each fetch without a wait, by the backward's time without waits.
        latest: dict[int, float] = {}
        end = float("inf")
        for i in reversed(queue):
            end = latest[i] = min(starts[self.read[i]], end) - self.bytes[i] / rate
        # Bytes that are free at each position while every value is away until it is read.
        room = self.limit - self.live
        for i in queue:
            room[movable.forward_ops : self.read[i]] += self.bytes[i]
        last: dict[int, int] = {}
        free, now = 0.0, starts[movable.forward_ops] + stalled
        done: dict[int, float] = {}
        at = reading = 0
        for position in range(movable.forward_ops, len(self.live)):
            ends = now + starts[position + 1] - starts[position]
            while at < len(queue):
                i = queue[at]
                until_read = room[position : self.read[i]]
                if self.read[i] > position and (
                    position < self.earliest
                    or latest[i] + stalled >= ends
                    or (until_read < self.bytes[i]).any()
                ):
                    break
                until_read -= self.bytes[i]
                free = done[i] = max(now, free) + self.bytes[i] / rate
                last[i] = position - 1
                at += 1
            while reading < len(queue) and self.read[queue[reading]] == position:
                waited = max(0.0, done[queue[reading]] - now)
                now, ends, stalled = now + waited, ends + waited, stalled + waited
                reading += 1
            now = ends
        return last
