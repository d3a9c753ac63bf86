"""The mixed-integer program: the least extra time within a budget, exactly, for small programs.

It has the form of Checkmate (Jain et al., MLSys 2020, section 4). R[t, i] says whether op i is
recomputed in stage t, a stage being one backward op; within a stage ops run in topological order.
In place of Checkmate's S[t, i] (kept into stage t) and its products for when a value is freed,
there is one variable for the presence of each value at each point of the stage; if R is integral,
its least solution is too. The forward runs once, in order, as in any plan here; Checkmate may
recompute in the forward too. Ops run in place as in :mod:`~fxckpt.solver.dynamic_program`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from scipy.sparse import csr_array

from fxckpt.solver.program import IN_BACKWARD, Program, Side
from fxckpt.solver.schedule import Schedule, with_runs
from fxckpt.solver.simulate import backward_own_profile

MOST_NODES = 2**31 - 1
"""Greatest limit on the nodes of the search tree: practically none."""


@dataclass(frozen=True)
class Optimum:
    """Solution of the integer program."""

    limit: int
    """Budget in bytes."""
    seconds: float | None
    """Extra time of ``schedule``, or None if no schedule was found."""
    bound_seconds: float
    """Lower bound on the extra time of any schedule."""
    schedule: Schedule | None = None
    """Best schedule found, or None if none fits or none was found in time."""

    @property
    def is_proven(self) -> bool:
        """Whether the solver closed its gap."""
        return self.seconds is None or self.seconds <= self.bound_seconds * (1 + 1e-6) + 1e-12


def in_forward(program: Program) -> Program:
    """Return ``program`` with all ops that read no tangent in the forward, for the MILP."""
    return replace(program, ops=tuple(replace(op, side=Side.FORWARD) for op in program.ops))


def optimum(
    program: Program, limit: int, *, seconds: float = 60.0, nodes: int = MOST_NODES
) -> Optimum:
    """Return the schedule of least extra time within ``limit`` bytes.

    The solver stops after ``seconds``, and after ``nodes`` of its search tree. Raises
    :class:`ValueError` if an op may run on either side (see :func:`in_forward`).
    """
    if any(op.side is not Side.FORWARD for op in program.ops):
        raise ValueError("an op may run on either side: plan in_forward(program) instead")
    return _Model(program, limit).solve(seconds, nodes)


class _Model:
    """The program in matrix form, ``low <= a @ x <= high``.

    Columns are the recomputes R[j, i] and the presences P[point, s].
    """

    def __init__(self, program: Program, limit: int) -> None:
        self.program = program
        self.limit = limit
        self.ops = [i for i, op in enumerate(program.ops) if op.no_recompute is None]
        self.storages = [
            s
            for s, storage in enumerate(program.storages)
            if storage.producer != IN_BACKWARD and not storage.is_output
        ]
        self.points = [(j, i) for j in range(len(program.backward)) for i in (*self.ops, None)]
        self.column: dict[tuple[str, int, int], int] = {}
        self.rows: list[tuple[dict[int, float], float, float]] = []

    def run(self, j: int, i: int) -> int:
        """Return the column of the recompute of op ``i`` in front of backward op ``j``."""
        return self.column.setdefault(("run", j, i), len(self.column))

    def present(self, point: int, s: int) -> int:
        """Return the column of the presence of storage ``s`` at a point; at -1 it is saved."""
        return self.column.setdefault(("present", point, s), len(self.column))

    def solve(self, seconds: float, nodes: int) -> Optimum:
        """Build and solve the program."""
        # scipy.optimize is slow to import, and few programs are small enough for this.
        from scipy.optimize import Bounds, LinearConstraint, milp

        self.present(-1, 0)  # at least one column
        self._constrain_forward()
        self._constrain_backward()
        self._constrain_saved()
        tables, size = self.program.tables, len(self.column)
        cost, integral, upper = np.zeros(size), np.zeros(size, dtype=np.int64), np.ones(size)
        for (kind, a, b), at in self.column.items():
            if kind == "run":
                cost[at], integral[at] = tables.seconds[b], 1
            elif a == -1 and not tables.is_savable[b]:
                upper[at] = 0
        scale = cost.max(initial=0.0) or 1.0
        answer = milp(
            cost / scale,
            integrality=integral,
            bounds=Bounds(0, upper),
            constraints=LinearConstraint(*self._constraint(size)),
            options={"time_limit": seconds, "mip_rel_gap": 0, "node_limit": nodes},
        )
        if answer.status == 2:
            return Optimum(self.limit, None, 0.0)
        bound = float(answer.mip_dual_bound or 0.0) * scale
        if answer.x is None:
            return Optimum(self.limit, None, bound)
        runs = sorted(
            (j, i)
            for (kind, j, i), at in self.column.items()
            if kind == "run" and answer.x[at] > 0.5
        )
        schedule = with_runs(self.program, tuple(i for _, i in runs), tuple(j for j, _ in runs))
        return Optimum(self.limit, float(answer.fun) * scale, bound, schedule)

    def _constraint(self, size: int) -> tuple[csr_array, list[float], list[float]]:
        """Return the rows over ``size`` columns as a matrix, with their lower and upper limits."""
        entries = [(r, c, v) for r, (row, _, _) in enumerate(self.rows) for c, v in row.items()]
        matrix = csr_array(
            ([v for *_, v in entries], ([r for r, *_ in entries], [c for _, c, _ in entries])),
            shape=(len(self.rows), size),
        )
        return matrix, [row[1] for row in self.rows], [row[2] for row in self.rows]

    def _constrain_backward(self) -> None:
        """Add the memory, the reads and the presences at every point of the backward."""
        program, tables = self.program, self.program.tables
        before, during = backward_own_profile(program)
        outputs = int(tables.bytes[tables.is_output].sum())
        for t, (j, i) in enumerate(self.points):
            memory = {self.present(t, s): float(tables.bytes[s]) for s in self.storages}
            room = self.limit - outputs - (during if i is None else before)[j]
            if i is None:
                room -= int(tables.workspace_bytes[len(program.ops) + j])
                for s in program.forward_reads[j]:
                    if not tables.is_output[s]:
                        self.rows.append(({self.present(t, s): 1.0}, 1.0, 1.0))
            else:
                # A second copy of an output is live during the recompute alone.
                copied = sum(tables.bytes[s] for s in program.ops[i].writes if tables.is_output[s])
                memory[self.run(j, i)] = float(
                    tables.workspace_bytes[i] + tables.state_bytes[i] + copied
                )
                for s in {*program.ops[i].needs, *program.ops[i].writes}:
                    if not tables.is_output[s]:
                        self.rows.append(
                            ({self.present(t, s): 1.0, self.run(j, i): -1.0}, 0.0, np.inf)
                        )
            self.rows.append((memory, -np.inf, float(room)))
            for s in self.storages:
                since = {self.present(t, s): 1.0, self.present(t - 1, s): -1.0}
                if i is not None and program.storages[s].producer == i:
                    since[self.run(j, i)] = -1.0
                self.rows.append((since, -np.inf, 0.0))

    def _constrain_forward(self) -> None:
        """Add the memory of every forward op: its live values, and those saved before."""
        program, tables = self.program, self.program.tables
        last = {s: k for k, op in enumerate(program.ops) for s in (*op.reads, *op.writes)}
        held_to = tables.held_to.tolist()
        for k in range(len(program.ops)):
            saved = {}
            live = int(tables.workspace_bytes[k])
            for s in {
                s
                for o in program.ops[: k + 1]
                for s in (*o.writes, *(() if o.rng_state is None else (o.rng_state,)))
            }:
                if tables.is_output[s] or max(last.get(s, -1), held_to[s]) >= k:
                    live += int(tables.bytes[s])
                else:
                    saved[self.present(-1, s)] = float(tables.bytes[s])
            free = (
                s
                for s in program.ops[k].takes
                if last[s] == k and held_to[s] < k and not tables.is_output[s]
            )
            if (taken := next(free, None)) is not None:
                # The result has the memory of the operand, unless that is saved.
                live -= int(tables.bytes[taken])
                saved[self.present(-1, taken)] = float(tables.bytes[taken])
            self.rows.append((saved, -np.inf, float(self.limit - live)))

    def _constrain_saved(self) -> None:
        """Add the limits on the bytes of what is saved."""
        for limit in self.program.limits:
            saved = {
                self.present(-1, s): float(self.program.storages[s].bytes) for s in limit.storages
            }
            self.rows.append((saved, -np.inf, float(limit.bytes)))
