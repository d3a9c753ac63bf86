"""Oracles: the least time within a budget, exactly, for small programs. The planner is judged by them; it does not use them.

``optimum`` is an integer program in the form of Checkmate (Jain et al., MLSys 2020, section 4): R[t, i] says whether op i runs again in stage t,
a stage being one backward op, and within a stage ops run in topological order. Checkmate's S[t, i] (kept into stage t) and its
products for when a value may be freed are here one variable per value and point of the stage, whether it is there; with R integral its
least solution is too. As in any plan of ours the forward runs once, in order; Checkmate's may recompute there too.

``exhaustive`` is a shortest path through all states (place in the backward, values at hand); it knows no stages, no order and no solver.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import csr_array

from fxckpt.passes.program import Program, Side
from fxckpt.passes.schedule import Schedule, forward_ops
from fxckpt.passes.simulate import backward_own_profile, simulate


@dataclass(frozen=True)
class Optimum:
    """What the integer program found. ``seconds`` is None if nothing fits ``limit``; no plan takes less than ``bound_seconds``."""

    limit: int
    seconds: float | None
    bound_seconds: float

    @property
    def is_proven(self) -> bool:
        """Whether the solver closed its gap."""
        return self.seconds is None or self.seconds <= self.bound_seconds * (1 + 1e-6) + 1e-12


def in_forward(program: Program) -> Program:
    """Return ``program`` with all that reads no tangent run by the forward: what the integer program takes."""
    return replace(program, ops=tuple(replace(op, side=Side.FORWARD) for op in program.ops))


def optimum(program: Program, limit: int, *, seconds: float = 60.0) -> Optimum:
    """Return the least extra time within ``limit`` bytes, after at most ``seconds`` of solving.

    Raises :class:`ValueError` if an op may run on either side (see :func:`in_forward`).
    """
    if any(op.side is not Side.FORWARD for op in program.ops):
        raise ValueError("an op may run on either side: plan in_forward(program) instead")
    return _Model(program, limit).solve(seconds)


class _Model:
    """Columns: runs R[j, i], then presences P[point, s]; rows are ``low <= a @ x <= high``."""

    def __init__(self, program: Program, limit: int) -> None:
        self.program = program
        self.limit = limit
        self.ops = [i for i, op in enumerate(program.ops) if op.pinned is None]
        self.storages = [s for s, storage in enumerate(program.storages) if storage.producer != -2 and not storage.is_output]
        self.points = [(j, i) for j in range(len(program.backward)) for i in (*self.ops, None)]
        self.column: dict[tuple[str, int, int], int] = {}
        self.rows: list[tuple[dict[int, float], float, float]] = []

    def run(self, j: int, i: int) -> int:
        return self.column.setdefault(("run", j, i), len(self.column))

    def there(self, point: int, s: int) -> int:
        """Column of whether storage ``s`` is there at a point; at point -1: saved."""
        return self.column.setdefault(("there", point, s), len(self.column))

    def solve(self, seconds: float) -> Optimum:
        self.there(-1, 0)  # never no column at all
        self._build()
        tables, size = self.program.tables, len(self.column)
        cost, integral, upper = np.zeros(size), np.zeros(size, dtype=np.int64), np.ones(size)
        for (kind, a, b), at in self.column.items():
            if kind == "run":
                cost[at], integral[at] = tables.seconds[b], 1
            elif a == -1 and not tables.is_savable[b]:
                upper[at] = 0
        scale = cost.max(initial=0.0) or 1.0
        entries = [(r, c, v) for r, (row, _, _) in enumerate(self.rows) for c, v in row.items()]
        matrix = csr_array(([v for *_, v in entries], ([r for r, *_ in entries], [c for _, c, _ in entries])), shape=(len(self.rows), size))
        constraint = LinearConstraint(matrix, [row[1] for row in self.rows], [row[2] for row in self.rows])
        answer = milp(
            cost / scale,
            integrality=integral,
            bounds=Bounds(0, upper),
            constraints=constraint,
            options={"time_limit": seconds, "mip_rel_gap": 0},
        )
        if answer.status == 2:
            return Optimum(self.limit, None, 0.0)
        bound = float(answer.mip_dual_bound or 0.0) * scale
        return Optimum(self.limit, None if answer.x is None else float(answer.fun) * scale, bound)

    def _build(self) -> None:
        program, tables = self.program, self.program.tables
        own = backward_own_profile(program)
        outputs = int(tables.bytes[tables.is_output].sum())
        self._forward()
        for t, (j, i) in enumerate(self.points):
            memory = {self.there(t, s): float(tables.bytes[s]) for s in self.storages}
            room = self.limit - outputs - own[j]
            if i is None:
                room -= int(tables.scratch_bytes[len(program.ops) + j])
                for s in program.forward_reads[j]:
                    if not tables.is_output[s]:
                        self.rows.append(({self.there(t, s): 1.0}, 1.0, 1.0))
            else:
                room += int(tables.written_bytes[len(program.ops) + j])
                memory[self.run(j, i)] = float(tables.scratch_bytes[i] + tables.replay_bytes[i])
                for s in {*program.ops[i].needs, *program.ops[i].writes}:
                    if not tables.is_output[s]:
                        self.rows.append(({self.there(t, s): 1.0, self.run(j, i): -1.0}, 0.0, np.inf))
            self.rows.append((memory, -np.inf, float(room)))
            for s in self.storages:
                since = {self.there(t, s): 1.0, self.there(t - 1, s): -1.0}
                if i is not None and program.storages[s].producer == i:
                    since[self.run(j, i)] = -1.0
                self.rows.append((since, -np.inf, 0.0))

    def _forward(self) -> None:
        """While the forward runs: what it needs itself, and what was saved before."""
        program, tables = self.program, self.program.tables
        last = {s: k for k, op in enumerate(program.ops) for s in (*op.reads, *op.writes)}
        for k in range(len(program.ops)):
            saved = {}
            live = int(tables.scratch_bytes[k])
            for s in {s for o in program.ops[: k + 1] for s in (*o.writes, *(() if o.rng_state is None else (o.rng_state,)))}:
                if tables.is_output[s] or last.get(s, -1) >= k:
                    live += int(tables.bytes[s])
                else:
                    saved[self.there(-1, s)] = float(tables.bytes[s])
            self.rows.append((saved, -np.inf, float(self.limit - live)))


@dataclass(frozen=True, order=True)
class _State:
    """Before backward op ``position``, these are at hand, and these ops have run at least once."""

    position: int
    there: frozenset[int]
    ran: frozenset[int]


def exhaustive(program: Program, limit: int) -> float | None:
    """Return the least extra time within ``limit`` bytes, or None if nothing fits. For up to about eight forward ops."""
    tables, own = program.tables, backward_own_profile(program)
    outputs = int(tables.bytes[tables.is_output].sum())
    steps = itertools.count()
    queue: list[tuple[float, int, _State]] = [(0.0, next(steps), state) for state in _starts(program, limit)]
    done: set[_State] = set()
    heapq.heapify(queue)

    def held(there: frozenset[int]) -> int:
        return outputs + int(tables.bytes[list(there)].sum())

    while queue:
        spent, _, state = heapq.heappop(queue)
        if state in done:
            continue
        done.add(state)
        j, there, ran = state.position, state.there, state.ran
        if j == len(program.backward):
            return spent
        after: list[tuple[float, _State]] = [(spent, _State(j, there - {s}, ran)) for s in there]
        if all(s in there or tables.is_output[s] for s in program.forward_reads[j]):
            if held(there) + own[j] + int(tables.scratch_bytes[len(program.ops) + j]) <= limit:
                after.append((spent, _State(j + 1, there, ran)))
        for i, op in enumerate(program.ops):
            if op.pinned is not None or not all(s in there or tables.is_output[s] for s in op.needs):
                continue
            more = there | {s for s in op.writes if not tables.is_output[s]}
            before_op = own[j] - int(tables.written_bytes[len(program.ops) + j])
            if held(more) + before_op + int(tables.scratch_bytes[i] + tables.replay_bytes[i]) <= limit:
                after.append((spent + (op.seconds if i in ran else 0.0), _State(j, more, ran | {i})))
        for seconds, state in after:
            heapq.heappush(queue, (seconds, next(steps), state))
    return None


def _starts(program: Program, limit: int) -> Iterator[_State]:
    """Yield what may be at hand after the forward, within ``limit``."""
    tables = program.tables
    savable = [s for s, storage in enumerate(program.storages) if storage.producer != -2 and storage.is_savable and not storage.is_output]
    for n in range(len(savable) + 1):
        for saved in itertools.combinations(savable, n):
            simulation = simulate(program, Schedule(saved, (), ()))
            if max(simulation.profile[: simulation.forward_ops], default=0) <= limit:
                ran = frozenset(i for i in forward_ops(program, saved) if not tables.is_forward[i])
                yield _State(0, frozenset(saved), ran | frozenset(np.flatnonzero(tables.is_forward).tolist()))
