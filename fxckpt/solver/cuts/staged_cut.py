"""The staged cut: min-cuts of all stages, by coordinate descent on the cost of the whole step.

Stage k has a memory price p_k in seconds per byte (a Lagrange multiplier); p_0 is the price at the
end of the forward, where only saved values are live. A value that stage k = 1, 2, ... needs is kept
from where it was last available (saved from the forward, or recomputed in an earlier stage) or is
recomputed in the stage:

    keep, last available in stage j < k:        m(v) * (p_{j+1} + ... + p_k)
    keep, saved from the forward:               m(v) * (p_0 + ... + p_k)
    recompute in stage k:                       t(v) + m(v) * p_k
    held through k for a later stage anyway:    0

The joint problem is not submodular, for keeping and recomputing are substitutes. Hence a descent:
every ``colors``-th stage is decided in one cut while the others are fixed, the latest stages first,
whose values live longest. Compare Checkmate's integer program (Jain et al., MLSys 2020), which
decides every (value, stage) pair at once.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import numpy as np
import numpy.typing as npt

from fxckpt.errors import FxckptError
from fxckpt.solver.cuts.min_cut import CutProblem, InfeasibleCut, Network
from fxckpt.solver.program import BoolArray, FloatArray, IntArray, Program
from fxckpt.solver.schedule import StageAssignment, stage_ranges

LEAST_REACH = 96
"""Least number of forward ops within a stage's reach; covers small programs completely."""


@dataclass(frozen=True)
class StagedCut:
    """Coordinate descent over the stages: which values each stage keeps and which it recomputes."""

    sweeps: int = 2
    """Number of passes over all stages."""
    colors: int = 4
    """Distance of the stages that one cut decides together."""
    reach: float = 4.0
    """Forward ops that a stage may recompute, in multiples of its share, nearest first.

    Values beyond the reach are kept.
    """

    def lay_out(self, program: Program, starts: tuple[int, ...]) -> Layout:
        """Return the layout of ``program`` for these stages, for use at all prices."""
        return Layout.of(program, starts, self.colors, self.reach)

    def __call__(
        self, layout: Layout, prices: Sequence[Sequence[float]]
    ) -> list[list[StageAssignment]]:
        """Return, for each row of prices, the assignment after every sweep that changes it.

        The first sweep often has the least peak. A row of prices, in seconds per byte, begins with
        the forward's end and has one more per stage. Raises :class:`FxckptError` if a value can be
        neither saved nor recomputed.
        """
        # One network for all rows: a solve of a small network is mostly overhead.
        price, count = np.asarray(prices, dtype=np.float64), len(prices)
        networks = {group: group.network.disjoint_copies(count) for group in layout.groups}
        kept = np.zeros((count, len(layout.storage)), dtype=bool)
        runs = np.zeros((count, len(layout.op)), dtype=bool)
        decided: list[list[StageAssignment]] = [[] for _ in prices]
        for sweep in range(self.sweeps):
            before = kept.copy(), runs.copy()
            for group in layout.groups if sweep % 2 == 0 else tuple(reversed(layout.groups)):
                recompute_cost = layout.recompute_costs(group, price, runs)
                keep_cost = layout.keep_costs(group, price, kept, runs)
                try:
                    keeps, recomputes = networks[group].solve(
                        recompute_cost.ravel(), keep_cost.ravel()
                    )
                except InfeasibleCut as error:
                    value = group.values.start + error.value % keep_cost.shape[1]
                    raise no_finite_cut(layout.program, int(layout.storage[value])) from error
                kept[:, group.values] = keeps.reshape(keep_cost.shape)
                runs[:, group.ops] = recomputes.reshape(recompute_cost.shape)
            changed = (before[0] != kept).any(axis=1) | (before[1] != runs).any(axis=1)
            for i in range(count) if sweep == 0 else np.flatnonzero(changed).tolist():
                decided[i].append(layout.assignment(kept[i], runs[i]))
        return decided


@dataclass(frozen=True, eq=False)
class Group:
    """Stages decided in one cut."""

    network: Network
    ops: slice
    """Op vertices of the group in the layout."""
    values: slice
    """Value vertices of the group in the layout."""


@dataclass(frozen=True, eq=False)
class Layout:
    """A program cut into stages, as arrays.

    An op vertex is an (op, stage) pair and a value vertex a (storage, stage) pair.
    """

    program: Program
    starts: tuple[int, ...]
    """First backward op of each stage."""
    groups: tuple[Group, ...]
    op: IntArray
    """Op of each op vertex."""
    op_stage: IntArray
    """Stage of each op vertex."""
    storage: IntArray
    """Storage of each value vertex."""
    stage: IntArray
    """Stage of each value vertex."""
    producer: IntArray
    """Op vertex that writes each value vertex, or -1 beyond the stage's reach."""
    is_needed: BoolArray
    """Whether backward ops of the stage read each value vertex."""
    seconds: FloatArray
    """Seconds of each op vertex; infinite if it must not be recomputed."""
    written_bytes: FloatArray
    """Bytes that each op vertex writes."""
    is_either: BoolArray
    """Whether either half may run each op vertex."""
    bytes: FloatArray
    """Bytes of each value vertex."""
    is_output: BoolArray
    """Whether a forward output holds each value vertex."""
    is_savable: BoolArray
    """Whether a plan may save each value vertex."""
    by_storage: IntArray
    """Value vertices sorted by storage, then stage."""
    rank: IntArray
    """Position of each value vertex in ``by_storage``."""
    first: IntArray
    """First position in ``by_storage`` of each value vertex's storage."""
    last: IntArray
    """Last position in ``by_storage`` of each value vertex's storage."""
    producer_by_storage: IntArray
    """``producer`` in the order of ``by_storage``."""
    is_needed_by_storage: BoolArray
    """``is_needed`` in the order of ``by_storage``."""

    @classmethod
    def of(cls, program: Program, starts: tuple[int, ...], colors: int, reach: float) -> Layout:
        """Return the layout of ``program`` for the stages that begin at ``starts``."""
        vertices = _Vertices.of(program, starts, colors, reach)
        tables = program.tables
        op, storage = np.asarray(vertices.op, np.int64), np.asarray(vertices.storage, np.int64)
        stage = np.asarray(vertices.stage, np.int64)
        producer = np.concatenate(vertices.producers)
        is_needed = np.zeros(len(storage), dtype=bool)
        is_needed[vertices.needed] = True
        by_storage = np.lexsort((stage, storage))
        rank = np.empty_like(by_storage)
        rank[by_storage] = np.arange(len(by_storage))
        ordered = storage[by_storage]
        return cls(
            program=program,
            starts=starts,
            groups=tuple(vertices.groups),
            op=op,
            op_stage=np.asarray(vertices.op_stage, np.int64),
            storage=storage,
            stage=stage,
            producer=producer,
            is_needed=is_needed,
            seconds=np.where(tables.is_recomputable[op], tables.seconds[op], math.inf),
            written_bytes=tables.written_bytes[op].astype(np.float64),
            is_either=tables.is_either[op],
            bytes=tables.bytes[storage].astype(np.float64),
            is_output=tables.is_output[storage],
            is_savable=tables.is_savable[storage],
            by_storage=by_storage,
            rank=rank,
            first=np.searchsorted(ordered, storage, side="left"),
            last=np.searchsorted(ordered, storage, side="right") - 1,
            producer_by_storage=producer[by_storage],
            is_needed_by_storage=is_needed[by_storage],
        )

    def recompute_costs(self, group: Group, price: FloatArray, runs: BoolArray) -> FloatArray:
        """Return the cost of recomputing each op vertex of a group, one row per row of prices.

        The first run of an op that only the backward depends on is part of any step.
        """
        of, count, n_ops = group.ops, len(price), len(self.program.ops)
        row, vertex = np.nonzero(runs)
        times = np.bincount(row * n_ops + self.op[vertex], minlength=count * n_ops).reshape(
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
        """Return the cost of keeping each value vertex of a group from before its stage.

        There is one row per row of prices.
        """
        of, end = group.values, len(self.rank)
        held, recomputed = (
            kept[:, self.by_storage],
            _appended(runs, False)[:, self.producer_by_storage],
        )
        available = recomputed | (held & self.is_needed_by_storage)
        since = self._stage_before(available, of)
        before = np.concatenate((np.zeros((len(price), 1)), np.cumsum(price, axis=1)), axis=1)
        paid = np.take_along_axis(before, np.where(since >= 0, since + 2, 0), axis=1)
        result: FloatArray = self.bytes[of] * (before[:, self.stage[of] + 2] - paid)
        following = np.minimum.accumulate(
            np.where(recomputed | held, np.arange(end), end)[:, ::-1], axis=1
        )[:, ::-1]
        following = _appended(following, end)[:, self.rank[of] + 1]
        passes = (following <= self.last[of]) & np.take_along_axis(
            _appended(held & ~recomputed, False), following, axis=1
        )
        result[(passes & ~self.is_needed[of]) | self.is_output[of]] = 0.0
        if not self.is_savable.all():
            result[
                ~self.is_savable[of]
                & (self._stage_before(recomputed, of) < 0)
                & ~self.is_output[of]
            ] = math.inf
        return result

    def _stage_before(self, happens: BoolArray, of: slice) -> IntArray:
        """Return the last earlier stage in which ``happens`` holds for the storage, or -1.

        The result is for the value vertices ``of``; ``happens`` is in the order of ``by_storage``.
        """
        latest = np.maximum.accumulate(np.where(happens, np.arange(len(self.rank)), -1), axis=1)
        # Position -1, before the first, is the one appended.
        before = _appended(latest, -1)[:, self.rank[of] - 1]
        return np.where(before >= self.first[of], self.stage[self.by_storage[before]], -1)

    def assignment(self, kept: BoolArray, runs: BoolArray) -> StageAssignment:
        """Return the assignment given by two masks over the vertices."""
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


@dataclass
class _Vertices:
    """The vertices of all stages, group by group, while they are collected."""

    op: list[int] = field(default_factory=list)
    op_stage: list[int] = field(default_factory=list)
    storage: list[int] = field(default_factory=list)
    stage: list[int] = field(default_factory=list)
    needed: list[int] = field(default_factory=list)
    producers: list[IntArray] = field(default_factory=list)
    """Op vertex that writes each value vertex, or -1, group by group."""
    groups: list[Group] = field(default_factory=list)

    @classmethod
    def of(cls, program: Program, starts: tuple[int, ...], colors: int, reach: float) -> _Vertices:
        """Collect the vertices of every ``colors``-th stage into one group, the latest first."""
        ranges = stage_ranges(program, starts)
        count = len(ranges)
        share = max(LEAST_REACH, math.ceil(min(reach, count) * len(program.ops) / count))
        found = cls()
        for color in range(min(colors, count)):
            first_op, first_value = len(found.op), len(found.storage)
            problems = [
                found.add(k, *stage_cut(program, ranges[k], share))
                for k in range(count - 1 - color, -1, -colors)
            ]
            network = Network.disjoint_union(problems)
            found.producers.append(np.where(network.producer >= 0, network.producer + first_op, -1))
            ops, values = slice(first_op, len(found.op)), slice(first_value, len(found.storage))
            found.groups.append(Group(network, ops, values))
        return found

    def add(self, k: int, problem: CutProblem, ops: list[int], storages: list[int]) -> CutProblem:
        """Add the vertices of stage ``k``, and return its cut problem."""
        self.needed.extend(len(self.storage) + v for v in problem.needed)
        self.op.extend(ops)
        self.op_stage.extend([k] * len(ops))
        self.storage.extend(storages)
        self.stage.extend([k] * len(storages))
        return problem


def _appended(rows: npt.NDArray[Any], item: int) -> npt.NDArray[Any]:
    """Return ``rows`` with ``item`` appended to each."""
    return np.concatenate((rows, np.full((len(rows), 1), item, dtype=rows.dtype)), axis=1)


def stage_cut(
    program: Program, positions: range, reach: int
) -> tuple[CutProblem, list[int], list[int]]:
    """Return the cut problem of one stage without its costs, and its ops and storages by position.

    The problem has the nearest ``reach`` ops, breadth first, that the values read by the stage
    depend on, and always those of values that must not be saved.
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


def stage_cuts(
    program: Program, stages: Iterable[range], reach: int
) -> tuple[Network, IntArray, IntArray]:
    """Return the cut problems of several stages, side by side in one network.

    With it come the op and the storage of each vertex; ``reach`` is as for :func:`stage_cut`.
    """
    cuts = [stage_cut(program, positions, reach) for positions in stages]
    return (
        Network.disjoint_union([problem for problem, _, _ in cuts]),
        np.fromiter(chain.from_iterable(ops for _, ops, _ in cuts), np.int64),
        np.fromiter(chain.from_iterable(values for _, _, values in cuts), np.int64),
    )


def no_finite_cut(program: Program, s: int) -> FxckptError:
    """Return the error for a storage that may be neither saved nor recomputed, with its path."""
    name, path = program.storages[s].name, " -> ".join(_path(program, s))
    return FxckptError(
        f"cannot plan: {name!r} is needed in the backward, but it may be neither saved nor "
        f"recomputed. Path: {path}. Allow one of the two in the policy, or drop the region's MUST."
    )


def _path(program: Program, s: int) -> list[str]:
    """Return the names of the ancestors of a value at which its recompute ends, then its own."""
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
