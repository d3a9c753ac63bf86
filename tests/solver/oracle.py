"""Oracle: a shortest path through all states, a state being a position and the live values.

It shares no code with the solver, and has neither stages nor an order of recomputes.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

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
    moves = _Moves(program, limit)
    steps = itertools.count()
    queue: list[tuple[float, int, _State]] = [
        (0.0, next(steps), state) for state in _starts(program, limit)
    ]
    done: set[_State] = set()
    heapq.heapify(queue)
    while queue:
        spent, _, state = heapq.heappop(queue)
        if state in done:
            continue
        done.add(state)
        if state.position == len(program.backward):
            return spent
        for seconds, after in (
            *moves.frees(state),
            *moves.backward_op(state),
            *moves.recomputes(state),
        ):
            heapq.heappush(queue, (spent + seconds, next(steps), after))
    return None


class _Moves:
    """Moves from state to state that stay within a limit in bytes, each with its extra seconds."""

    def __init__(self, program: Program, limit: int) -> None:
        self.program, self.tables, self.limit = program, program.tables, limit
        self.before, self.during = backward_own_profile(program)
        self.in_full = [
            n + sum(program.storages[s].bytes for s in op.writes)
            for n, op in zip(self.before, program.backward, strict=True)
        ]
        self.outputs = int(self.tables.bytes[self.tables.is_output].sum())

    def held(self, live: frozenset[int]) -> int:
        """Return the bytes of live values and of the forward's outputs."""
        return self.outputs + int(self.tables.bytes[list(live)].sum())

    def reads_are_live(self, reads: Iterable[int], state: _State) -> bool:
        """Return whether values are in memory."""
        return all(s in state.live or self.tables.is_output[s] for s in reads)

    def taken_of(self, takes: Iterable[int], state: _State) -> Iterator[tuple[int | None, int]]:
        """Yield the operands that an op may overwrite, None first, with the bytes it spares."""
        yield None, 0
        for taken in takes:
            if taken in state.live - state.saved:
                yield taken, self.program.storages[taken].bytes

    def frees(self, state: _State) -> Iterator[tuple[float, _State]]:
        """Yield the moves that free one value."""
        for s in state.live:
            yield 0.0, replace(state, live=state.live - {s}, saved=state.saved - {s})

    def backward_op(self, state: _State) -> Iterator[tuple[float, _State]]:
        """Yield the moves that run the next backward op."""
        j = state.position
        if not self.reads_are_live(self.program.forward_reads[j], state):
            return
        own = self.program.backward[j]
        takes = own.takes if self.during[j] == self.in_full[j] else ()
        for taken, spared in self.taken_of(takes, state):
            needed = self.held(state.live) + self.during[j] + own.workspace_bytes - spared
            if needed <= self.limit:
                yield 0.0, replace(state, position=j + 1, live=state.live - {taken})

    def recomputes(self, state: _State) -> Iterator[tuple[float, _State]]:
        """Yield the moves that recompute one op; its first run is the forward's."""
        tables, storages = self.tables, self.program.storages
        for i, op in enumerate(self.program.ops):
            if op.no_recompute is not None or not self.reads_are_live(op.needs, state):
                continue
            written = {s for s in op.writes if not tables.is_output[s]}
            beside = self.before[state.position]
            beside += int(tables.workspace_bytes[i] + tables.state_bytes[i])
            beside += sum(storages[s].bytes for s in {*op.writes} - written)
            live = state.live | written
            for taken, spared in self.taken_of(op.takes, state):
                if self.held(live) + beside - spared <= self.limit:
                    yield (
                        op.seconds if i in state.ran else 0.0,
                        _State(
                            state.position,
                            live - {taken},
                            state.saved - written,
                            state.ran | {i},
                        ),
                    )


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
