"""Simulator: exact liveness of the storages of a scheduled step, which gives every plan's peak.

The storages that an op reads and writes are live together while it runs; after it, storages without
a later reader are free. Forward outputs live to the end, for the user holds them; incoming
gradients live from the start of the backward to their last read; parameters and inputs are not
counted. A recomputed value is a new version of its storage, live from its recompute to its last
read.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from fxckpt.solver.link_use import Movable, stall_seconds
from fxckpt.solver.positions import backward_order, last_accesses
from fxckpt.solver.program import BoolArray, IntArray, Program, Tables
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

    @property
    def peak_position(self) -> int:
        """First position of the profile at which the peak is reached."""
        return int(self.live.argmax()) if len(self.live) else 0


def simulate(program: Program, schedule: Schedule) -> Simulation:
    """Return the live bytes and the extra time of a schedule."""
    tables = program.tables
    order = np.asarray(forward_ops(program, schedule.saved), dtype=np.int64)
    saved = np.asarray(schedule.saved, dtype=np.int64)
    held = tables.is_output.copy()
    held[saved] = True
    runs = np.asarray(schedule.runs, dtype=np.int64)
    before = np.asarray(schedule.before, dtype=np.int64)
    forward, live = _forward_profile(tables, order, held)
    held[list(program.tangents)] = True
    backward = _backward_profile(
        tables, held, runs, before, len(program.backward), live + program.tangent_bytes
    )
    times = np.bincount(np.concatenate((order, runs)), minlength=len(program.ops))
    repeats = np.maximum(times - 1, 0)
    extra = np.flatnonzero(repeats)
    found = Simulation(
        np.concatenate((forward, backward)),
        len(forward),
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


def _forward_profile(tables: Tables, order: IntArray, held: BoolArray) -> tuple[IntArray, int]:
    """Return the live bytes during each op of ``order``, and the live bytes at the end."""
    last = last_accesses(tables, order)
    state = tables.rng_state[order]
    saves_state = (state >= 0) & np.append(held, False)[state]
    born = tables.written_bytes[order] + np.where(saves_state, tables.state_bytes[order], 0)
    dying = np.flatnonzero((last >= 0) & ~held)
    died = _sum_at(last[dying], tables.bytes[dying], len(order))
    after = np.cumsum(born - died)
    return after + died + tables.workspace_bytes[order], int(after[-1]) if len(after) else 0


def _backward_profile(
    tables: Tables, held: BoolArray, runs: IntArray, before: IntArray, length: int, live: int
) -> IntArray:
    """Return the live bytes during each recompute and each backward op, in order."""
    total = len(runs) + length
    op, run_at, _ = backward_order(tables, runs, before, length)
    reads, read_at = tables.reads.rows(op)
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
    stays = tables.is_output[version] & (time[begins] < 0)
    dies, version = dies[~stays], version[~stays]
    unread = dies < 0
    live -= int(tables.bytes[version[unread]].sum())
    died = _sum_at(dies[~unread], tables.bytes[version[~unread]], total)
    born = tables.written_bytes[op]
    workspace = tables.workspace_bytes[op]
    # The recompute of a random op puts the current generator state aside, and restores it after.
    workspace[run_at] += tables.state_bytes[runs]
    return live + np.cumsum(born - died) + died + workspace


def _sum_at(position: IntArray, nbytes: IntArray, length: int) -> IntArray:
    """Return the sum of the bytes at each position."""
    return np.bincount(position, weights=nbytes, minlength=length).astype(np.int64)


def backward_own_profile(program: Program) -> list[int]:
    """Return the bytes of gradients that are live during each backward op under any plan."""
    tables, length = program.tables, len(program.backward)
    order = len(program.ops) + np.arange(length)
    last = last_accesses(tables, order)
    own = np.unique(
        np.append(tables.writes.rows(order)[0], np.asarray(program.tangents, dtype=np.int64))
    )
    died = _sum_at(last[own], tables.bytes[own], length)
    return list(
        (program.tangent_bytes + np.cumsum(tables.written_bytes[order] - died) + died).tolist()
    )
