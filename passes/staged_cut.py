"""The staged priced cut: one min-cut a stage, by coordinate descent on the whole step's price.

Stage k has a memory price p_k in seconds per byte. A value the stage needs is taken from where it was last at hand (saved from the forward, or
made in an earlier stage), or is made again here:

    keep, last at hand in stage j < k (forward: -1):   m(v) * (p_{j+1} + ... + p_k)
    recompute in stage k:                              t(v) + m(v) * p_k
    held through k for a later stage anyway:           0

The joint problem is not submodular (keeping and recomputing are substitutes), so the stages are swept from last to first, the
longest-lived decisions first, then forth and back. Compare Checkmate's integer program (Jain et al., MLSys 2020), which decides every
(value, stage) pair at once.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from fxckpt.errors import FxckptError
from fxckpt.passes.facts import Program, Side
from fxckpt.passes.flow import CutProblem, Solver, Unbounded, solve_scipy
from fxckpt.passes.schedule import Decisions, stage_ranges


@dataclass(frozen=True)
class Tables:
    """A program laid out for the descent, once for all prices. Lists are by storage or by op index."""

    program: Program
    bytes: list[int]
    producer: list[int]
    is_output: list[bool]
    is_savable: list[bool]
    needs: list[tuple[int, ...]]
    """Per op: what a second run reads, the generator state included."""
    written_bytes: list[int]
    seconds: list[float]
    """Per op; infinite for an op that must not run again."""
    is_either: list[bool]
    writes_one: list[bool]

    @classmethod
    def of(cls, program: Program) -> Tables:
        """Lay out ``program``."""
        storages, ops = program.storages, program.ops
        return cls(
            program,
            [s.bytes for s in storages],
            [s.producer for s in storages],
            [s.is_output for s in storages],
            [s.is_savable for s in storages],
            [op.reads if op.rng_state is None else (*op.reads, op.rng_state) for op in ops],
            [sum(storages[s].bytes for s in op.writes) for op in ops],
            [op.seconds if op.pinned is None else math.inf for op in ops],
            [op.side is Side.EITHER for op in ops],
            [len(op.writes) == 1 for op in ops],
        )

    def stage_needs(self, starts: tuple[int, ...]) -> list[tuple[int, ...]]:
        """Return, per stage, the forward values its ops read, in order."""
        program = self.program
        return [tuple(dict.fromkeys(s for j in positions for s in program.forward_reads(j))) for positions in stage_ranges(program, starts)]


@dataclass(frozen=True)
class StagedCut:
    """Decide, for given stages and prices, what each stage keeps and runs again."""

    sweeps: int = 2
    solver: Solver = solve_scipy

    def __call__(
        self, tables: Tables, starts: tuple[int, ...], needs: Sequence[tuple[int, ...]], prices: Sequence[float], solver: Solver
    ) -> Decisions:
        """Return the decisions. ``needs`` are those of ``starts``, ``prices`` seconds per byte, one a stage."""
        descent = _Descent(tables, needs, tuple(prices), solver)
        stages = range(len(starts))
        for n in range(self.sweeps):
            for k in reversed(stages) if n % 2 == 0 else stages:
                descent.decide(k)
        return Decisions(starts, tuple(descent.kept), tuple(descent.runs))


class _Descent:
    """The state of one descent: the present decision of every stage."""

    def __init__(self, tables: Tables, needs: Sequence[tuple[int, ...]], prices: tuple[float, ...], solver: Solver) -> None:
        self.tables = tables
        self.needs = needs
        self.prices = prices
        self.solver = solver
        self.kept: list[frozenset[int]] = [frozenset() for _ in needs]
        self.runs: list[frozenset[int]] = [frozenset() for _ in needs]
        self.price_before = [0.0]
        for p in prices:
            self.price_before.append(self.price_before[-1] + p)
        # Where each storage is kept and each op is run again: stage numbers, in step with the decisions.
        self.kept_in: dict[int, set[int]] = {}
        self.run_in: dict[int, set[int]] = {}

    def decide(self, k: int) -> None:
        """Solve stage ``k`` with the other stages as they are."""
        problem, values, ops = self._problem(k)
        try:
            cut = self.solver(problem)
        except Unbounded as error:
            program = self.tables.program
            name = program.storages[values[error.value]].name
            path = " -> ".join(_path(program, values[error.value]))
            raise FxckptError(
                f"cannot plan: {name!r} is needed in the backward, but it may be neither saved nor recomputed. Path: {path}. "
                "Allow one of the two in the policy, or drop the region's MUST."
            ) from error
        for s in self.kept[k]:
            self.kept_in[s].discard(k)
        for o in self.runs[k]:
            self.run_in[o].discard(k)
        self.kept[k] = frozenset([values[v] for v in cut.kept])
        self.runs[k] = frozenset([ops[o] for o in cut.runs])
        for s in self.kept[k]:
            self.kept_in.setdefault(s, set()).add(k)
        for o in self.runs[k]:
            self.run_in.setdefault(o, set()).add(k)

    def _keep_price(self, s: int, k: int, is_needed: bool) -> float:
        tables = self.tables
        if tables.is_output[s]:
            return 0.0
        run_in = self.run_in.get(tables.producer[s])
        kept_in = self.kept_in.get(s)
        made = max([j for j in run_in if j < k], default=-1) if run_in else -1
        if made < 0 and not tables.is_savable[s]:
            return math.inf
        since = made
        if kept_in:
            if not is_needed:
                next_run = min([j for j in run_in if j > k], default=len(self.prices)) if run_in else len(self.prices)
                if any(k < j < next_run for j in kept_in):
                    return 0.0
            since = max([made, *(j for j in kept_in if j < k)])
        return tables.bytes[s] * (self.price_before[k + 1] - self.price_before[since + 1])

    def _run_price(self, index: int, k: int) -> float:
        tables = self.tables
        seconds = tables.seconds[index]
        if tables.is_either[index] and seconds < math.inf and not (self.run_in.get(index, set()) - {k}):
            seconds = 0.0  # its first run is part of the uncheckpointed step
        return seconds + tables.written_bytes[index] * self.prices[k]

    def _problem(self, k: int) -> tuple[CutProblem, list[int], list[int]]:
        """Return the cut of stage ``k`` over what its needs depend on, and the storages and ops its positions stand for."""
        tables = self.tables
        needed = set(self.needs[k])
        values: dict[int, int] = {}
        ops: dict[int, int] = {}
        keep_price: list[float] = []
        run_price: list[float] = []
        op_reads: list[tuple[int, ...]] = []
        stack = list(reversed(self.needs[k]))
        while stack:
            s = stack.pop()
            if s in values:
                continue
            values[s] = len(keep_price)
            keep = self._keep_price(s, k, s in needed)
            keep_price.append(keep)
            index = tables.producer[s]
            if index < 0 or index in ops:
                continue
            run = self._run_price(index, k)
            if keep <= run and tables.writes_one[index] and keep < math.inf:
                continue  # keeping is never worse, whatever the inputs cost
            ops[index] = len(run_price)
            run_price.append(run)
            op_reads.append(tables.needs[index])
            if run < math.inf:
                stack.extend(reversed(tables.needs[index]))
        problem = CutProblem(
            tuple(run_price),
            tuple([tuple([values[s] for s in reads if s in values]) for reads in op_reads]),
            tuple(keep_price),
            tuple([ops.get(tables.producer[s], -1) for s in values]),
            tuple([values[s] for s in self.needs[k]]),
        )
        return problem, list(values), list(ops)


def _path(program: Program, s: int) -> list[str]:
    """Return a chain of names from a value back to where its recomputation stops."""
    path: list[str] = []
    while s >= 0 and len(path) < 8:
        path.append(program.storages[s].name)
        producer = program.storages[s].producer
        if producer < 0 or program.ops[producer].pinned is not None or not program.ops[producer].reads:
            break
        s = program.ops[producer].reads[0]
    return list(reversed(path))
