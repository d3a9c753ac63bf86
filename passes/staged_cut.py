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
from fxckpt.passes.facts import Op, Program, Side
from fxckpt.passes.flow import CutProblem, Solver, Unbounded, solve_scipy
from fxckpt.passes.schedule import Decisions, stage_ranges


@dataclass(frozen=True)
class StagedCut:
    """Decide, for given stages and prices, what each stage keeps and runs again."""

    sweeps: int = 2
    solver: Solver = solve_scipy

    def __call__(self, program: Program, starts: tuple[int, ...], prices: Sequence[float], solver: Solver | None = None) -> Decisions:
        """Return the decisions. ``prices`` are seconds per byte, one a stage; ``solver`` stands in for the field of that name."""
        sweep = _Descent(program, starts, tuple(prices), solver or self.solver)
        stages = range(len(starts))
        for n in range(self.sweeps):
            for k in reversed(stages) if n % 2 == 0 else stages:
                sweep.decide(k, first=n == 0)
        return Decisions(starts, tuple(sweep.kept), tuple(sweep.runs))


class _Descent:
    """The state of one descent: the present decision of every stage."""

    def __init__(self, program: Program, starts: tuple[int, ...], prices: tuple[float, ...], solver: Solver) -> None:
        self.program = program
        self.prices = prices
        self.solver = solver
        self.kept: list[frozenset[int]] = [frozenset() for _ in starts]
        self.runs: list[frozenset[int]] = [frozenset() for _ in starts]
        self.needs = [
            tuple(dict.fromkeys(s for j in positions for s in program.forward_reads(j))) for positions in stage_ranges(program, starts)
        ]
        self.price_before = [0.0]
        for p in prices:
            self.price_before.append(self.price_before[-1] + p)
        # Where each storage is kept and each op is run again: stage numbers, kept in step with the decisions.
        self.kept_in: dict[int, set[int]] = {}
        self.run_in: dict[int, set[int]] = {}

    def decide(self, k: int, *, first: bool) -> None:
        """Solve stage ``k`` with the other stages as they are."""
        problem, values, ops = self._problem(k)
        try:
            cut = self.solver(problem)
        except Unbounded as error:
            name = self.program.storages[values[error.value]].name
            path = " -> ".join(_path(self.program, values[error.value]))
            raise FxckptError(
                f"cannot plan: {name!r} is needed in the backward, but it may be neither saved nor recomputed. Path: {path}. "
                "Allow one of the two in the policy, or drop the region's MUST."
            ) from error
        for s in self.kept[k]:
            self.kept_in[s].discard(k)
        for o in self.runs[k]:
            self.run_in[o].discard(k)
        self.kept[k] = frozenset(values[v] for v in cut.kept)
        self.runs[k] = frozenset(ops[o] for o in cut.runs)
        for s in self.kept[k]:
            self.kept_in.setdefault(s, set()).add(k)
        for o in self.runs[k]:
            self.run_in.setdefault(o, set()).add(k)

    def _keep_price(self, s: int, k: int, *, is_needed: bool) -> float:
        storage = self.program.storages[s]
        if storage.is_output:
            return 0.0
        run_in = self.run_in.get(storage.producer, ()) if storage.producer >= 0 else ()
        kept_in = self.kept_in.get(s, ())
        made = max((j for j in run_in if j < k), default=-1)
        if made < 0 and not storage.is_savable:
            return math.inf
        if not is_needed:
            next_run = min((j for j in run_in if j > k), default=len(self.prices))
            if any(k < j < next_run for j in kept_in):
                return 0.0
        at_hand = max((j for j in kept_in if j < k), default=-1)
        since = max(made, at_hand)
        return storage.bytes * (self.price_before[k + 1] - self.price_before[since + 1])

    def _run_price(self, index: int, op: Op, k: int) -> float:
        if op.pinned is not None:
            return math.inf
        held = sum(self.program.storages[s].bytes for s in op.writes) * self.prices[k]
        others = self.run_in.get(index, ())
        is_first = op.side is Side.EITHER and not any(j != k for j in others)
        return held + (0.0 if is_first else op.seconds)

    def _problem(self, k: int) -> tuple[CutProblem, list[int], list[int]]:
        storages, all_ops = self.program.storages, self.program.ops
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
            keep = self._keep_price(s, k, is_needed=s in needed)
            keep_price.append(keep)
            index = storages[s].producer
            if index < 0 or index in ops:
                continue
            op = all_ops[index]
            run = self._run_price(index, op, k)
            if keep <= run and len(op.writes) == 1:
                continue  # keeping is never worse, whatever the inputs cost
            ops[index] = len(run_price)
            run_price.append(run)
            reads = op.reads if op.rng_state is None else (*op.reads, op.rng_state)
            op_reads.append(reads)
            if not math.isinf(run):
                stack.extend(reversed(reads))
        reads_here = tuple(tuple(values[s] for s in reads if s in values) for reads in op_reads)
        producer = tuple(ops.get(storages[s].producer, -1) for s in values)
        problem = CutProblem(tuple(run_price), reads_here, tuple(keep_price), producer, tuple(values[s] for s in self.needs[k]))
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
