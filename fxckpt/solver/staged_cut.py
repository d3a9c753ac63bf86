"""The staged priced cut: min-cuts of all stages, by coordinate descent on the whole step's price.

Stage k has a memory price p_k in seconds per byte, and p_0 is that of the forward's end, where only saved values are live. A value that stage
k = 1, 2, ... needs is taken from where it was last at hand (saved from the forward, or made in an earlier stage), or is made again here:

    keep, last at hand in stage j < k:          m(v) * (p_{j+1} + ... + p_k)
    keep, saved from the forward:               m(v) * (p_0 + ... + p_k)
    recompute in stage k:                       t(v) + m(v) * p_k
    held through k for a later stage anyway:    0

The joint problem is not submodular (keeping and recomputing are substitutes), so it is a descent: every ``colors``-th stage is decided in one
cut with the others as they are, the latest stages first, the longest-lived decisions. Compare Checkmate's integer program (Jain et al.,
MLSys 2020), which decides every (value, stage) pair at once.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np
import numpy.typing as npt

from fxckpt.errors import FxckptError
from fxckpt.solver.min_cut import CutProblem, Network, Unbounded
from fxckpt.solver.program import BoolArray, FloatArray, IntArray, Program
from fxckpt.solver.schedule import StageAssignment, stage_ranges

LEAST_REACH = 96
"""Ops a stage may always look at; small programs are looked at whole."""


@dataclass(frozen=True)
class StagedCut:
    """Decide, for given stages and prices, what each stage keeps and runs again."""

    sweeps: int = 2
    colors: int = 4
    """Stages that are ``colors`` apart are decided together."""
    reach: float = 4.0
    """A stage looks at this many times its share of the forward ops, nearest first; what is farther is kept."""

    def lay_out(self, program: Program, starts: tuple[int, ...]) -> Layout:
        """Lay ``program`` out for these stages, once for all prices."""
        return Layout.of(program, starts, self.colors, self.reach)

    def __call__(
        self, layout: Layout, prices: Sequence[Sequence[float]]
    ) -> list[list[StageAssignment]]:
        """Return, for each of several choices of prices, the decisions after each sweep that changes them; often the first has the least peak.

        Prices are seconds per byte: of the forward's end, then one a stage. Raises :class:`FxckptError` if a value has no way.
        """
        # One network for all choices: a solve of a small network is mostly overhead.
        price, count = np.asarray(prices, dtype=np.float64), len(prices)
        networks = {group: group.network.copies(count) for group in layout.groups}
        kept = np.zeros((count, len(layout.storage)), dtype=bool)
        runs = np.zeros((count, len(layout.op)), dtype=bool)
        decided: list[list[StageAssignment]] = [[] for _ in prices]
        for sweep in range(self.sweeps):
            before = kept.copy(), runs.copy()
            for group in layout.groups if sweep % 2 == 0 else tuple(reversed(layout.groups)):
                recompute_cost, keep_cost = (
                    layout.recompute_costs(group, price, runs),
                    layout.keep_costs(group, price, kept, runs),
                )
                try:
                    keeps, again = networks[group].solve(recompute_cost.ravel(), keep_cost.ravel())
                except Unbounded as error:
                    value = group.values.start + error.value % keep_cost.shape[1]
                    raise no_way(layout.program, int(layout.storage[value])) from error
                kept[:, group.values], runs[:, group.ops] = (
                    keeps.reshape(keep_cost.shape),
                    again.reshape(recompute_cost.shape),
                )
            changed = (before[0] != kept).any(axis=1) | (before[1] != runs).any(axis=1)
            for i in range(count) if sweep == 0 else np.flatnonzero(changed).tolist():
                decided[i].append(layout.decisions(kept[i], runs[i]))
        return decided


@dataclass(frozen=True, eq=False)
class Group:
    """Stages decided in one cut, and where their vertices lie among the layout's."""

    network: Network
    ops: slice
    values: slice


@dataclass(frozen=True, eq=False)
class Layout:
    """A program cut into stages, as arrays. A vertex is an (op, stage) or a (storage, stage) that some stage may care about."""

    program: Program
    starts: tuple[int, ...]
    groups: tuple[Group, ...]
    op: IntArray
    """Per op vertex: the op."""
    op_stage: IntArray
    storage: IntArray
    """Per value vertex: the storage."""
    stage: IntArray
    producer: IntArray
    """Per value vertex: the op vertex that fills it, or -1 where the stage does not look that far."""
    is_needed: BoolArray
    """Per value vertex: ops of the stage's own backward read it."""
    seconds: FloatArray
    """Per op vertex; infinite for an op that must not run again."""
    written_bytes: FloatArray
    is_either: BoolArray
    bytes: FloatArray
    is_output: BoolArray
    is_savable: BoolArray
    by_storage: IntArray
    """Value vertices by storage, then stage."""
    place: IntArray
    """Per value vertex: its place in ``by_storage``."""
    first: IntArray
    """Per value vertex: the first place of the same storage."""
    last: IntArray
    producer_by_storage: IntArray
    is_needed_by_storage: BoolArray

    @classmethod
    def of(cls, program: Program, starts: tuple[int, ...], colors: int, reach: float) -> Layout:
        """Lay ``program`` out for the stages that begin at ``starts``."""
        ranges = stage_ranges(program, starts)
        count = len(ranges)
        share = max(LEAST_REACH, math.ceil(min(reach, count) * len(program.ops) / count))
        groups: list[Group] = []
        op: list[int] = []
        op_stage: list[int] = []
        storage: list[int] = []
        stage: list[int] = []
        needed: list[int] = []
        producers = []
        for color in range(min(colors, count)):
            first_op, first_value = len(op), len(storage)
            problems = []
            for k in range(count - 1 - color, -1, -colors):
                problem, ops, values = stage_cut(program, ranges[k], share)
                needed.extend(len(storage) + v for v in problem.needed)
                op.extend(ops)
                op_stage.extend([k] * len(ops))
                storage.extend(values)
                stage.extend([k] * len(values))
                problems.append(problem)
            network = Network.disjoint_union(problems)
            producers.append(np.where(network.producer >= 0, network.producer + first_op, -1))
            groups.append(
                Group(network, slice(first_op, len(op)), slice(first_value, len(storage)))
            )
        tables = program.tables
        is_needed = np.zeros(len(storage), dtype=bool)
        is_needed[needed] = True
        of_storage, in_stage = (
            np.asarray(storage, dtype=np.int64),
            np.asarray(stage, dtype=np.int64),
        )
        by_storage = np.lexsort((in_stage, of_storage))
        place = np.empty_like(by_storage)
        place[by_storage] = np.arange(len(by_storage))
        ordered = of_storage[by_storage]
        producer = np.concatenate(producers)
        of_op = np.asarray(op, dtype=np.int64)
        return cls(
            program,
            starts,
            tuple(groups),
            of_op,
            np.asarray(op_stage, dtype=np.int64),
            of_storage,
            in_stage,
            producer,
            is_needed,
            np.where(tables.is_rerunnable[of_op], tables.seconds[of_op], math.inf),
            tables.written_bytes[of_op].astype(np.float64),
            tables.is_either[of_op],
            tables.bytes[of_storage].astype(np.float64),
            tables.is_output[of_storage],
            tables.is_savable[of_storage],
            by_storage,
            place,
            np.searchsorted(ordered, of_storage, side="left"),
            np.searchsorted(ordered, of_storage, side="right") - 1,
            producer[by_storage],
            is_needed[by_storage],
        )

    def recompute_costs(self, group: Group, price: FloatArray, runs: BoolArray) -> FloatArray:
        """Return, per op vertex of a group, the price of running it again; a row for each choice of prices.

        The first run of what only the backward needs is part of any step.
        """
        of, count, n_ops = group.ops, len(price), len(self.program.ops)
        choice, vertex = np.nonzero(runs)
        times = np.bincount(choice * n_ops + self.op[vertex], minlength=count * n_ops).reshape(
            count, n_ops
        )
        is_first = (
            self.is_either[of]
            & (times[:, self.op[of]] == runs[:, of])
            & np.isfinite(self.seconds[of])
        )
        return (
            np.where(is_first, 0.0, self.seconds[of])
            + self.written_bytes[of] * price[:, self.op_stage[of] + 1]
        )

    def keep_costs(
        self, group: Group, price: FloatArray, kept: BoolArray, runs: BoolArray
    ) -> FloatArray:
        """Return, per value vertex of a group, the price of having it from before its stage; a row for each choice of prices."""
        of, end = group.values, len(self.place)
        held, made = kept[:, self.by_storage], _with_last(runs, False)[:, self.producer_by_storage]
        had = made | (held & self.is_needed_by_storage)
        since = self._stage_before(had, of)
        before = np.concatenate((np.zeros((len(price), 1)), np.cumsum(price, axis=1)), axis=1)
        paid = np.take_along_axis(before, np.where(since >= 0, since + 2, 0), axis=1)
        result: FloatArray = self.bytes[of] * (before[:, self.stage[of] + 2] - paid)
        following = np.minimum.accumulate(
            np.where(made | held, np.arange(end), end)[:, ::-1], axis=1
        )[:, ::-1]
        following = _with_last(following, end)[:, self.place[of] + 1]
        passes = (following <= self.last[of]) & np.take_along_axis(
            _with_last(held & ~made, False), following, axis=1
        )
        result[(passes & ~self.is_needed[of]) | self.is_output[of]] = 0.0
        if not self.is_savable.all():
            result[
                ~self.is_savable[of] & (self._stage_before(made, of) < 0) & ~self.is_output[of]
            ] = math.inf
        return result

    def _stage_before(self, happens: BoolArray, of: slice) -> IntArray:
        """Return, for some value vertices, the last earlier stage in which something happens to the storage, or -1.

        ``happens`` is in the order of ``by_storage``.
        """
        latest = np.maximum.accumulate(np.where(happens, np.arange(len(self.place)), -1), axis=1)
        before = _with_last(latest, -1)[
            :, self.place[of] - 1
        ]  # before the first place is what was put last
        return np.where(before >= self.first[of], self.stage[self.by_storage[before]], -1)

    def decisions(self, kept: BoolArray, runs: BoolArray) -> StageAssignment:
        """Return the decisions that two masks over the vertices say."""
        count = len(self.starts)
        values: list[list[int]] = [[] for _ in range(count)]
        ops: list[list[int]] = [[] for _ in range(count)]
        for s, k in zip(self.storage[kept].tolist(), self.stage[kept].tolist(), strict=True):
            values[k].append(s)
        for o, k in zip(self.op[runs].tolist(), self.op_stage[runs].tolist(), strict=True):
            ops[k].append(o)
        return StageAssignment(
            self.starts, tuple(map(frozenset, values)), tuple(map(frozenset, ops))
        )


def _with_last(rows: npt.NDArray[Any], item: int) -> npt.NDArray[Any]:
    """Return ``rows``, each with one item more."""
    return np.concatenate((rows, np.full((len(rows), 1), item, dtype=rows.dtype)), axis=1)


def stage_cut(
    program: Program, positions: range, reach: int
) -> tuple[CutProblem, list[int], list[int]]:
    """Return the cut of one stage without its prices, and the ops and storages its positions stand for.

    Looks breadth first at what the stage's needs depend on, at most ``reach`` ops, but always past values that must not be saved.
    """
    producers, storages, all_ops = program.producers, program.storages, program.ops
    needs = list(
        dict.fromkeys(chain.from_iterable(program.forward_reads[positions.start : positions.stop]))
    )
    values: dict[int, int] = {s: i for i, s in enumerate(needs)}
    ops: dict[int, int] = {}
    reads: list[tuple[int, ...]] = []
    queue = needs.copy()
    for s in queue:
        o = producers[s]
        if o < 0 or o in ops or (len(ops) >= reach and storages[s].is_savable):
            continue
        ops[o] = len(ops)
        op = all_ops[o]
        needed = op.needs if op.no_recompute is None else ()
        for u in (*needed, *op.writes):
            if u not in values:
                values[u] = len(values)
                queue.append(u)
        reads.append(tuple([values[u] for u in needed]))
    producer = tuple([ops.get(producers[s], -1) for s in values])
    unpriced = CutProblem((), tuple(reads), (), producer, tuple(range(len(needs))))
    return unpriced, list(ops), list(values)


def no_way(program: Program, s: int) -> FxckptError:
    """Return the error for a storage that may be neither saved nor recomputed, with the path to it."""
    name, path = program.storages[s].name, " -> ".join(_path(program, s))
    return FxckptError(
        f"cannot plan: {name!r} is needed in the backward, but it may be neither saved nor recomputed. Path: {path}. "
        "Allow one of the two in the policy, or drop the region's MUST."
    )


def _path(program: Program, s: int) -> list[str]:
    """Return a chain of names from a value back to where its recomputation stops."""
    path: list[str] = []
    while s >= 0 and len(path) < 8:
        path.append(program.storages[s].name)
        producer = program.storages[s].producer
        if (
            producer < 0
            or program.ops[producer].no_recompute is not None
            or not program.ops[producer].reads
        ):
            break
        s = program.ops[producer].reads[0]
    return list(reversed(path))
