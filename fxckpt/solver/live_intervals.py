"""Live intervals: each version of a storage with the positions of the profile at which it is live.

The liveness is that of :mod:`~fxckpt.solver.simulate`, value by value: the intervals add up to the
profile, byte for byte. It serves reports, not the search: one pass over the ops in plain Python.
"""

from __future__ import annotations

import enum
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from fxckpt.solver.program import Op, Program
from fxckpt.solver.schedule import Schedule, forward_ops
from fxckpt.solver.simulate import simulate
from fxckpt.utils.intervals import live_bytes

NO_STORAGE = -1
"""Storage of an interval of a kernel's workspace, which has none."""


class Holder(enum.StrEnum):
    """The reason why bytes are live."""

    SAVED = "saved"
    """A forward value saved for the backward."""
    OUTPUT = "output"
    """A forward output, which the user holds."""
    RECOMPUTED = "recomputed"
    """A forward value recomputed in the backward."""
    GRADIENT = "gradients"
    """A value of the backward, or an incoming gradient."""
    TEMPORARY = "temporaries"
    """A forward value that is not saved, or the workspace of a kernel."""


class LiveInterval(NamedTuple):
    """Bytes live at the positions ``first`` to ``last`` of the profile, both included."""

    storage: int
    """Index of the storage; ``NO_STORAGE`` for the workspace of a kernel."""
    holder: Holder
    first: int
    last: int
    bytes: int


class OpRun(NamedTuple):
    """One position of the profile: an op that runs."""

    op: Op
    is_forward: bool
    """Whether the forward runs the op."""
    is_recompute: bool
    """Whether the op is a forward op that the backward runs."""


def op_runs(program: Program, schedule: Schedule) -> list[OpRun]:
    """Return the ops of a schedule in the order of its profile."""
    found = [OpRun(program.ops[o], True, False) for o in forward_ops(program, schedule.saved)]
    runs = list(zip(schedule.runs, schedule.before, strict=True))
    at = 0
    for j, op in enumerate(program.backward):
        while at < len(runs) and runs[at][1] == j:
            found.append(OpRun(program.ops[runs[at][0]], False, True))
            at += 1
        found.append(OpRun(op, False, False))
    return found


def live_intervals(program: Program, schedule: Schedule) -> list[LiveInterval]:
    """Return the live intervals of a schedule, by their first position.

    They add up to the profile of :func:`~fxckpt.solver.simulate.simulate`.
    """
    order = op_runs(program, schedule)
    backward_at = sum(moment.is_forward for moment in order)
    written, temporary = _written_intervals(program, schedule, order, backward_at)
    away = {storage: (first, end) for storage, first, end in schedule.away}
    forward = forward_ops(program, schedule.saved)
    held_to = [bisect_right(forward, storage.held_to) - 1 for storage in program.storages]
    extended = [
        part
        for interval in written
        for part in _on_device(_extended(interval, held_to, backward_at - 1, len(order) - 1), away)
    ]
    return sorted([*extended, *temporary], key=lambda i: (i.first, i.storage, i.last))


def _written_intervals(
    program: Program, schedule: Schedule, order: Sequence[OpRun], backward_at: int
) -> tuple[list[LiveInterval], list[LiveInterval]]:
    """Return the intervals from each write of a storage to its last read, and those of workspace.

    ``backward_at`` is the position of the backward's first op.
    """
    taken_by, saved = simulate(program, schedule).taken, set(schedule.saved)
    open_ = {
        s: LiveInterval(s, Holder.GRADIENT, backward_at, backward_at, program.storages[s].bytes)
        for s in program.tangents
    }
    closed: list[LiveInterval] = []
    temporary: list[LiveInterval] = []
    for at, (op, is_forward, is_recompute) in enumerate(order):
        reads = op.needs if is_recompute else op.reads
        for s in reads:
            if s in open_ and not (program.storages[s].is_output and at >= backward_at):
                open_[s] = open_[s]._replace(last=at)
        written = list(op.writes)
        state = op.rng_state if is_forward else None
        if state is not None and (state in saved or program.storages[state].held_to >= 0):
            written.append(state)
        if (taken := int(taken_by[at])) >= 0:
            # Its bytes count as the result's from here on.
            closed.append(open_.pop(taken)._replace(last=at - 1))
        for s in written:
            if s in open_:
                closed.append(open_[s])
            open_[s] = LiveInterval(
                s,
                _holder(program, s, saved, is_forward, is_recompute),
                at,
                at,
                program.storages[s].bytes,
            )
        if workspace := op.workspace_bytes + (_state_bytes(program, op) if is_recompute else 0):
            temporary.append(LiveInterval(NO_STORAGE, Holder.TEMPORARY, at, at, workspace))
    closed.extend(open_.values())
    return closed, temporary


def _on_device(interval: LiveInterval, away: dict[int, tuple[int, int]]) -> Iterator[LiveInterval]:
    """Yield the parts of an interval at which its storage is not away."""
    first, last = away.get(interval.storage, (0, -1))
    if not interval.first < first <= last < interval.last:
        yield interval
        return
    yield interval._replace(last=first - 1)
    yield interval._replace(first=last + 1)


def _extended(
    interval: LiveInterval, held_to: Sequence[int], end_of_forward: int, last: int
) -> LiveInterval:
    """Extend an output to the end of the step, and a value of the forward to where it is held.

    A saved value is held to the backward at least. ``held_to`` has a position for each storage.
    """
    if interval.holder is Holder.OUTPUT:
        return interval._replace(last=last)
    if interval.holder is Holder.SAVED:
        return interval._replace(last=max(interval.last, end_of_forward))
    if interval.first > end_of_forward:
        return interval
    return interval._replace(last=max(interval.last, held_to[interval.storage]))


def _holder(
    program: Program, storage: int, saved: set[int], is_forward: bool, is_recompute: bool
) -> Holder:
    """Return the reason why a version of a storage is live."""
    if is_recompute:
        return Holder.RECOMPUTED
    if not is_forward:
        return Holder.GRADIENT
    if program.storages[storage].is_output:
        return Holder.OUTPUT
    return Holder.SAVED if storage in saved else Holder.TEMPORARY


def _state_bytes(program: Program, op: Op) -> int:
    """Return the bytes of the current generator state, which a recompute puts aside."""
    return 0 if op.rng_state is None else program.storages[op.rng_state].bytes


def stacked(intervals: Iterable[LiveInterval], length: int) -> dict[Holder, list[int]]:
    """Return the live bytes at each of ``length`` positions, by holder."""
    found: dict[Holder, list[tuple[int, int, int]]] = {holder: [] for holder in Holder}
    for interval in intervals:
        found[interval.holder].append((interval.first, interval.last, interval.bytes))
    return {holder: live_bytes(of, length).tolist() for holder, of in found.items()}


def aligned(order: Sequence[OpRun], other: Sequence[OpRun], profile: Sequence[int]) -> list[int]:
    """Return the profile of the op_runs ``other`` at the op_runs ``order``.

    Each op in common has the most bytes since the one before, each other op those of the next in
    common.
    """
    common = {(m.op.name, m.is_recompute) for m in order} & {
        (m.op.name, m.is_recompute) for m in other if not m.is_recompute
    }
    bytes_at: dict[str, int] = {}
    most = 0
    for moment, live in zip(other, profile, strict=True):
        most = max(most, live)
        if (moment.op.name, moment.is_recompute) in common:
            bytes_at[moment.op.name], most = most, 0
    return list(reversed(list(_filled(reversed(order), bytes_at))))


def _filled(order: Iterable[OpRun], bytes_at: dict[str, int]) -> Iterator[int]:
    """Yield the bytes at each moment, or those of the latest op that has any."""
    latest = 0
    for moment in order:
        if not moment.is_recompute:
            latest = bytes_at.get(moment.op.name, latest)
        yield latest
