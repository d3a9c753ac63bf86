"""Oracle: a shortest path through all states, a state being a position and the live values.

It shares no code with the solver, and has neither stages nor an order of recomputes.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from fxckpt.solver.program import IN_BACKWARD, Program
from fxckpt.solver.schedule import Schedule, forward_ops
from fxckpt.solver.simulate import backward_own_profile, simulate


@dataclass(frozen=True, order=True)
class _State:
    """State before backward op ``position``: live values, and ops that ran at least once."""

    position: int
    live: frozenset[int]
    saved: frozenset[int]
    """Live values whose copy is that of the forward, and stays untouched."""
    ran: frozenset[int]


def exhaustive(program: Program, limit: int) -> float | None:
    """Return the least extra time within ``limit`` bytes, or None if nothing fits.

    It is practical for up to about eight forward ops.
    """
    tables, (before, during) = program.tables, backward_own_profile(program)
    outputs = int(tables.bytes[tables.is_output].sum())
    steps = itertools.count()
    queue: list[tuple[float, int, _State]] = [
        (0.0, next(steps), state) for state in _starts(program, limit)
    ]
    done: set[_State] = set()
    heapq.heapify(queue)

    in_full = [
        n + sum(program.storages[s].bytes for s in op.writes)
        for n, op in zip(before, program.backward, strict=True)
    ]

    def held(live: frozenset[int]) -> int:
        return outputs + int(tables.bytes[list(live)].sum())

    while queue:
        spent, _, state = heapq.heappop(queue)
        if state in done:
            continue
        done.add(state)
        j, live, saved, ran = state.position, state.live, state.saved, state.ran
        if j == len(program.backward):
            return spent
        after: list[tuple[float, _State]] = [
            (spent, _State(j, live - {s}, saved - {s}, ran)) for s in live
        ]
        if all(s in live or tables.is_output[s] for s in program.forward_reads[j]):
            own = program.backward[j]
            for taken in (None, *(own.takes if during[j] == in_full[j] else ())):
                if taken is not None and taken not in live - saved:
                    continue
                spared = 0 if taken is None else program.storages[taken].bytes
                needed = held(live) + during[j] + own.workspace_bytes - spared
                if needed <= limit:
                    after.append((spent, _State(j + 1, live - {taken}, saved, ran)))
        for i, op in enumerate(program.ops):
            if op.no_recompute is not None or not all(
                s in live or tables.is_output[s] for s in op.needs
            ):
                continue
            written = {s for s in op.writes if not tables.is_output[s]}
            beside = before[j] + int(tables.workspace_bytes[i] + tables.state_bytes[i])
            beside += sum(program.storages[s].bytes for s in {*op.writes} - written)
            seconds = spent + (op.seconds if i in ran else 0.0)
            for taken in (None, *op.takes):
                if taken is not None and taken not in live - saved:
                    continue
                spared = 0 if taken is None else program.storages[taken].bytes
                if held(live | written) + beside - spared <= limit:
                    left = (live | written) - {taken}
                    after.append((seconds, _State(j, left, saved - written, ran | {i})))
        for seconds, state in after:
            heapq.heappush(queue, (seconds, next(steps), state))
    return None


def _starts(program: Program, limit: int) -> Iterator[_State]:
    """Yield the states that may follow the forward within ``limit`` bytes."""
    tables = program.tables
    savable = [
        s
        for s, storage in enumerate(program.storages)
        if storage.producer != IN_BACKWARD and storage.is_savable and not storage.is_output
    ]
    for n in range(len(savable) + 1):
        for saved in itertools.combinations(savable, n):
            if any(
                sum(program.storages[s].bytes for s in {*saved} & {*each.storages}) > each.bytes
                for each in program.limits
            ):
                continue
            simulation = simulate(program, Schedule(saved, (), ()))
            if max(simulation.profile[: simulation.forward_ops], default=0) <= limit:
                ran = frozenset(i for i in forward_ops(program, saved) if not tables.is_forward[i])
                held = frozenset(saved)
                ran |= frozenset(np.flatnonzero(tables.is_forward).tolist())
                yield _State(0, held, held, ran)
