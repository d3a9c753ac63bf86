"""Lifetimes: what holds each byte of a step, and when.

The same liveness as :mod:`~fxckpt.solver.simulate`, kept apart by value: every version of a storage is one interval of the profile's positions.
Added up they are the profile, byte for byte. Made for looking, not for searching: one pass in plain Python over the ops.
"""

from __future__ import annotations

import enum
import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from fxckpt.solver.program import Op, Program
from fxckpt.solver.schedule import Schedule, forward_ops

NO_STORAGE = -1


class Holder(enum.StrEnum):
    """Why bytes are live."""

    SAVED = "saved"
    """A forward value kept for the backward, from when it is made."""
    OUTPUT = "output"
    """A forward output: the user holds it."""
    RECOMPUTED = "recomputed"
    """A forward value made again in the backward."""
    GRADIENT = "gradients"
    """What the backward makes for the first time, and the incoming gradients."""
    TEMPORARY = "temporaries"
    """A forward value that nobody keeps, and the workspace of kernels."""


class LiveInterval(NamedTuple):
    """``bytes`` are live during the positions ``first`` to ``last`` of the profile, both included."""

    storage: int
    """Index into the program; ``NO_STORAGE`` for the workspace of kernels."""
    holder: Holder
    first: int
    last: int
    bytes: int


class Moment(NamedTuple):
    """One position of the profile: an op that runs."""

    op: Op
    is_forward: bool
    is_again: bool
    """A forward op that the backward runs."""


def moments(program: Program, schedule: Schedule) -> list[Moment]:
    """Return the ops of a schedule in the order of its profile."""
    found = [Moment(program.ops[o], True, False) for o in forward_ops(program, schedule.saved)]
    runs = list(zip(schedule.runs, schedule.before, strict=True))
    at = 0
    for j, op in enumerate(program.backward):
        while at < len(runs) and runs[at][1] == j:
            found.append(Moment(program.ops[runs[at][0]], False, True))
            at += 1
        found.append(Moment(op, False, False))
    return found


def lifetimes(program: Program, schedule: Schedule) -> list[LiveInterval]:
    """Return every interval in which a schedule holds bytes; their sum is the profile of :func:`~fxckpt.solver.simulate.simulate`."""
    order = moments(program, schedule)
    saved = set(schedule.saved)
    backward_at = sum(moment.is_forward for moment in order)
    last = len(order) - 1
    open_ = {
        s: LiveInterval(s, Holder.GRADIENT, backward_at, backward_at, program.storages[s].bytes)
        for s in program.tangents
    }
    closed: list[LiveInterval] = []
    temporary: list[LiveInterval] = []
    for at, (op, is_forward, is_again) in enumerate(order):
        reads = op.needs if is_again else op.reads
        for s in reads:
            if s in open_:
                open_[s] = open_[s]._replace(last=at)
        made = list(op.writes)
        if is_forward and op.rng_state in saved:
            made.append(op.rng_state)
        for s in made:
            if s in open_:
                closed.append(open_[s])
            open_[s] = LiveInterval(
                s,
                _holder(program, s, saved, is_forward, is_again),
                at,
                at,
                program.storages[s].bytes,
            )
        if workspace := op.workspace_bytes + (_replay_bytes(program, op) if is_again else 0):
            temporary.append(LiveInterval(NO_STORAGE, Holder.TEMPORARY, at, at, workspace))
    closed.extend(open_.values())
    stay = (_stay(interval, backward_at - 1, last) for interval in closed)
    return sorted([*stay, *temporary], key=lambda i: (i.first, i.storage, i.last))


def _stay(interval: LiveInterval, end_of_forward: int, last: int) -> LiveInterval:
    """Extend what the forward made by how it is held: outputs to the end, what is saved at least to the backward."""
    if interval.holder is Holder.OUTPUT:
        return interval._replace(last=last)
    if interval.holder is Holder.SAVED:
        return interval._replace(last=max(interval.last, end_of_forward))
    return interval


def _holder(
    program: Program, storage: int, saved: set[int], is_forward: bool, is_again: bool
) -> Holder:
    if is_again:
        return Holder.RECOMPUTED
    if not is_forward:
        return Holder.GRADIENT
    if program.storages[storage].is_output:
        return Holder.OUTPUT
    return Holder.SAVED if storage in saved else Holder.TEMPORARY


def _replay_bytes(program: Program, op: Op) -> int:
    """Return what the replay of a random op sets aside: the generator's present state."""
    return 0 if op.rng_state is None else program.storages[op.rng_state].bytes


def stacked(intervals: Iterable[LiveInterval], length: int) -> dict[Holder, list[int]]:
    """Return live bytes at each of ``length`` positions, by holder."""
    change = {holder: [0] * (length + 1) for holder in Holder}
    for interval in intervals:
        change[interval.holder][interval.first] += interval.bytes
        change[interval.holder][interval.last + 1] -= interval.bytes
    return {holder: list(itertools.accumulate(steps[:-1])) for holder, steps in change.items()}


def aligned(order: Sequence[Moment], other: Sequence[Moment], profile: Sequence[int]) -> list[int]:
    """Return ``profile``, which is over ``other``, over ``order``: at each op its own bytes, in between those of the next op in common."""
    common = {(m.op.name, m.is_again) for m in order} & {
        (m.op.name, m.is_again) for m in other if not m.is_again
    }
    bytes_at: dict[str, int] = {}
    most = 0
    for moment, live in zip(other, profile, strict=True):
        most = max(most, live)
        if (moment.op.name, moment.is_again) in common:
            bytes_at[moment.op.name], most = most, 0
    return list(reversed(list(_filled(reversed(order), bytes_at))))


def _filled(order: Iterable[Moment], bytes_at: dict[str, int]) -> Iterator[int]:
    latest = 0
    for moment in order:
        if not moment.is_again:
            latest = bytes_at.get(moment.op.name, latest)
        yield latest
