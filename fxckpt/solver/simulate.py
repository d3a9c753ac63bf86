"""Simulator: exact liveness of the storages of a scheduled step, which gives every plan's peak.

The storages that an op reads and writes are live together while it runs; after it, storages without
a later reader are free. Forward outputs live to the end, for the user holds them, and the backward
reads them there: a copy of one that a recompute writes beside other results is dead at once.
Incoming gradients live from the start of the backward to their last read; parameters and inputs are
not counted. A recomputed value is a new version of its storage, live from its recompute to its last
read. What an eager region's recorder or its Python holds lives longer in the forward
(:attr:`~fxckpt.solver.program.Storage.held_to`).

An op that may take an operand's memory (:attr:`~fxckpt.solver.program.Op.takes`) runs in place
where that operand dies, and its result needs no bytes of its own beside it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from fxckpt.solver.link_use import Movable, stall_seconds
from fxckpt.solver.positions import backward_order, last_accesses, last_in_forward
from fxckpt.solver.program import IN_BACKWARD, BoolArray, IntArray, Program, Tables
from fxckpt.solver.schedule import Schedule, forward_ops


@dataclass(frozen=True, eq=False)
class Simulation:
    """Memory and time of a schedule."""

    live: IntArray
    """Live bytes during each op, beyond those allocated when the step began.

    The forward's ops come first, then recomputes and backward ops as they run.
    """
    forward_ops: int
    """Number of leading entries of ``live`` that belong to the forward."""
    taken: IntArray
    """Storage whose memory each op writes its result into, or -1."""
    saved_bytes: int
    extra_seconds: float
    """Seconds beyond those of the uncheckpointed step, with the waits for copies."""
    extra_flops: int
    """FLOPs beyond those of the uncheckpointed step."""
    stall_seconds: float = 0.0
    """Seconds of waits for copies off the device and back."""
    away_bytes: int = 0
    """Bytes that are sent away, all of which are away at the end of the forward."""

    @cached_property
    def peak_bytes(self) -> int:
        """Most bytes live at once."""
        return int(self.live.max(initial=0))

    @property
    def profile(self) -> tuple[int, ...]:
        """:attr:`live` as ints."""
        return tuple(self.live.tolist())


def simulate(program: Program, schedule: Schedule) -> Simulation:
    """Return the live bytes and the extra time of a schedule."""
    tables = program.tables
    order = np.asarray(forward_ops(program, schedule.saved), dtype=np.int64)
    saved = np.asarray(schedule.saved, dtype=np.int64)
    held = tables.is_output.copy()
    held[saved] = True
    runs = np.asarray(schedule.runs, dtype=np.int64)
    before = np.asarray(schedule.before, dtype=np.int64)
    forward, taken_forward, live = _forward_profile(tables, order, held)
    held[list(program.tangents)] = True
    backward, taken_backward = _backward_profile(
        tables, held, runs, before, len(program.backward), live + program.tangent_bytes
    )
    times = np.bincount(np.concatenate((order, runs)), minlength=len(program.ops))
    repeats = np.maximum(times - 1, 0)
    extra = np.flatnonzero(repeats)
    found = Simulation(
        np.concatenate((forward, backward)),
        len(forward),
        np.concatenate((taken_forward, taken_backward)),
        int(tables.bytes[saved].sum()),
        float((repeats[extra] * tables.seconds[extra]).sum()),
        int((repeats[extra] * tables.flops[extra]).sum()),
    )
    return _without_what_is_away(found, program, schedule) if schedule.away else found


def _without_what_is_away(found: Simulation, program: Program, schedule: Schedule) -> Simulation:
    """Return a simulation less the bytes that are away, with the waits for their copies."""
    tables, live = program.tables, found.live.copy()
    for storage, first, last in schedule.away:
        live[first : last + 1] -= tables.bytes[storage]
    movable = Movable.of(program, schedule)
    index = {s: i for i, s in enumerate(movable.storage.tolist())}
    stalled = stall_seconds(
        movable,
        {index[away.storage]: away.first for away in schedule.away},
        {index[away.storage]: away.last for away in schedule.away},
    )
    return replace(
        found,
        live=live,
        extra_seconds=found.extra_seconds + stalled,
        stall_seconds=stalled,
        away_bytes=int(tables.bytes[[away.storage for away in schedule.away]].sum()),
    )


def _forward_profile(
    tables: Tables, order: IntArray, held: BoolArray
) -> tuple[IntArray, IntArray, int]:
    """Return the live bytes during each op of ``order``, what each takes, and the bytes left."""
    last = last_in_forward(tables, order)
    state = tables.rng_state[order]
    has_state = (state >= 0) & np.append(held | (tables.held_to >= 0), False)[state]
    born = tables.written_bytes[order] + np.where(has_state, tables.state_bytes[order], 0)
    dying = np.flatnonzero((last >= 0) & ~held)
    died = _sum_at(last[dying], tables.bytes[dying], len(order))
    after = np.cumsum(born - died)
    wanted, at = tables.takes.rows(order)
    dies = (last[wanted] == at) & ~held[wanted] & (tables.held_to[wanted] < order[at])
    taken = _taken(wanted, at, dies, len(order))
    live = after + died + tables.workspace_bytes[order] - _bytes_taken(tables, taken)
    return live, taken, int(after[-1]) if len(after) else 0


def _taken(wanted: IntArray, at: IntArray, dies: BoolArray, length: int) -> IntArray:
    """Return the first of the storages wanted at each position that dies there, or -1."""
    taken = np.full(length, -1)
    taken[at[dies][::-1]] = wanted[dies][::-1]
    return taken


def _bytes_taken(tables: Tables, taken: IntArray) -> IntArray:
    """Return the bytes that each op spares."""
    return np.append(tables.bytes, 0)[taken]


def _backward_profile(
    tables: Tables, held: BoolArray, runs: IntArray, before: IntArray, length: int, live: int
) -> tuple[IntArray, IntArray]:
    """Return the live bytes during each recompute and backward op, and what each takes."""
    total = len(runs) + length
    op, run_at, _ = backward_order(tables, runs, before, length)
    reads, read_at = tables.reads.rows(op)
    # Outputs are read where the forward left them, whatever copies there are.
    is_own = ~tables.is_output[reads]
    reads, read_at = reads[is_own], read_at[is_own]
    writes, written_at = tables.writes.rows(op)
    stateful = np.flatnonzero(tables.rng_state[runs] >= 0)
    initial = np.flatnonzero(held)
    # One row per access. Time counts in halves, so that an op reads before it writes; storages that
    # are held at the start come first.
    storage = np.concatenate((initial, reads, tables.rng_state[runs[stateful]], writes))
    time = np.concatenate(
        (np.full(len(initial), -1), 2 * read_at, 2 * run_at[stateful], 2 * written_at + 1)
    )
    order = np.argsort(storage * (2 * total + 2) + time + 1, kind="stable")
    storage, time = storage[order], time[order]
    # A version of a storage begins at the start or with a write, and ends with its last access.
    begins = np.concatenate(([True], (storage[1:] != storage[:-1]) | (time[1:] % 2 == 1)))[
        : len(storage)
    ]
    ends = np.append(begins[1:], True)[: len(storage)]
    dies = np.where(time < 0, -1, time // 2)[ends]
    version = storage[ends]
    wanted, at = tables.takes.rows(op)
    own = time[begins] >= 0
    dying = version[own] * (total + 1) + dies[own]  # ascending
    key = wanted * (total + 1) + at
    place = np.minimum(np.searchsorted(dying, key), max(len(dying) - 1, 0))
    taken = _taken(wanted, at, dying[place] == key if len(dying) else key < 0, total)
    stays = tables.is_output[version] & (time[begins] < 0)
    dies, version = dies[~stays], version[~stays]
    unread = dies < 0
    live -= int(tables.bytes[version[unread]].sum())
    died = _sum_at(dies[~unread], tables.bytes[version[~unread]], total)
    born = tables.written_bytes[op]
    workspace = tables.workspace_bytes[op]
    # The recompute of a random op puts the current generator state aside, and restores it after.
    workspace[run_at] += tables.state_bytes[runs]
    profile = live + np.cumsum(born - died) + died + workspace - _bytes_taken(tables, taken)
    return profile, taken


def _sum_at(position: IntArray, nbytes: IntArray, length: int) -> IntArray:
    """Return the sum of the bytes at each position."""
    return np.bincount(position, weights=nbytes, minlength=length).astype(np.int64)


def backward_own_profile(program: Program) -> tuple[list[int], list[int]]:
    """Return the bytes of gradients live before and during each backward op, under any plan.

    A result that is written into a gradient is counted once. One that may be written into a forward
    value is counted in full: whether it is depends on the plan (:func:`may_take_forward`).
    """
    tables = program.tables
    order, last, wanted, at = _own_accesses(program)
    own = np.unique(
        np.append(tables.writes.rows(order)[0], np.asarray(program.tangents, dtype=np.int64))
    )
    died = _sum_at(last[own], tables.bytes[own], len(order))
    written = tables.written_bytes[order]
    during = program.tangent_bytes + np.cumsum(written - died) + died
    dies = (last[wanted] == at) & (tables.producer[wanted] == IN_BACKWARD)
    spared = _bytes_taken(tables, _taken(wanted, at, dies, len(order)))
    return (during - written).tolist(), (during - spared).tolist()


def may_take_forward(program: Program) -> list[int]:
    """Return the bytes that each backward op spares at most by writing into a forward value.

    They are 0 where it writes into a gradient under any plan.
    """
    tables = program.tables
    order, last, wanted, at = _own_accesses(program)
    is_own = tables.producer[wanted] == IN_BACKWARD
    spared = np.zeros(len(order), dtype=np.int64)
    spared[at[~is_own]] = tables.bytes[wanted[~is_own]]
    spared[at[is_own & (last[wanted] == at)]] = 0
    return spared.tolist()


def _own_accesses(program: Program) -> tuple[IntArray, IntArray, IntArray, IntArray]:
    """Return the backward ops, last accesses among them, and what may be taken at which."""
    order = len(program.ops) + np.arange(len(program.backward))
    return (order, last_accesses(program.tables, order), *program.tables.takes.rows(order))
