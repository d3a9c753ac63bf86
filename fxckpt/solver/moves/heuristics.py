"""Heuristics: plans by rule. They are among the candidates, so that no plan is worse than they are.

The plan that saves everything is :func:`~fxckpt.solver.schedule.save_all`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from fxckpt.solver.cuts.staged_cut import Layout, StagedCut
from fxckpt.solver.cuts.stages import StageBoundaries, deepest, persistence, split_long
from fxckpt.solver.program import BoolArray, IntArray, Program
from fxckpt.solver.schedule import Schedule, StageAssignment, emit
from fxckpt.utils.intervals import live_bytes


@dataclass(frozen=True)
class Heuristics:
    """Heuristic plans of one program."""

    program: Program
    boundaries: StageBoundaries

    def __call__(self) -> Iterator[Schedule]:
        """Yield all heuristic plans."""
        yield self.save_least()
        yield self.recompute_light_ops()
        for count in (8, 16, 32):
            yield self.block_boundaries(count)

    def save_least(self) -> Schedule:
        """Return the plan that saves the fewest bytes and recomputes everything else, once."""
        return self._one_cut(self.program.tables.is_recomputable)

    def recompute_light_ops(self) -> Schedule:
        """Return the plan that saves the fewest bytes without recomputing FLOPs or random ops.

        It resembles the plan of torch's default partitioner.
        """
        tables = self.program.tables
        is_light = (tables.flops[: len(self.program.ops)] == 0) & (tables.rng_state < 0)
        storages = self.program.storages
        must = np.array(
            [not all(storages[s].is_savable for s in op.writes) for op in self.program.ops],
            dtype=bool,
        )
        return self._one_cut(tables.is_recomputable & (is_light | must))

    @cached_property
    def _whole(self) -> Layout:
        """The backward as one stage."""
        return StagedCut(sweeps=1, reach=math.inf).lay_out(self.program, (0,))

    def _one_cut(self, may_run: BoolArray) -> Schedule:
        """Return the plan of fewest saved bytes that recomputes only the ops ``may_run``."""
        # Bytes are the objective; time costs nothing.
        layout = replace(
            self._whole,
            seconds=np.where(may_run[self._whole.op], 0.0, math.inf),
            written_bytes=np.zeros(len(self._whole.op)),
        )
        ((assignment,),) = StagedCut(sweeps=1)(layout, [(1.0, 0.0)])
        return emit(self.program, assignment)

    def block_boundaries(self, count: int) -> Schedule:
        """Return the plan that saves the values across about ``count`` block boundaries.

        Each block is recomputed when its backward begins: Chen et al. 2016, algorithm 1. Blocks are
        found like stages.
        """
        storage, written, read = self._crossing
        boundaries = np.asarray(deepest(self._forward_depth, count), dtype=np.int64)
        crosses = np.searchsorted(boundaries, written, side="right") < np.searchsorted(
            boundaries, read, side="right"
        )
        saved = frozenset(storage[crosses].tolist())
        starts = self.boundaries.stages(count)
        runs = frozenset(np.flatnonzero(self.program.tables.is_recomputable).tolist())
        return emit(
            self.program, StageAssignment(starts, (saved,) * len(starts), (runs,) * len(starts))
        )

    def block_starts(self, count: int) -> tuple[int, ...]:
        """Return the first forward op of each of at most about ``count`` blocks but the first.

        Where so few are narrower than their surroundings that blocks are long, as in a chain of
        equal values, blocks are split.
        """
        boundaries = deepest(self._forward_depth, count)
        step = max(1, math.ceil(len(boundaries) / (1.5 * count)))
        boundaries = boundaries[step - 1 :: step]
        if len(boundaries) < count // 2:
            boundaries = split_long((0, *boundaries), count, self._forward_width)[1:]
        return boundaries

    @cached_property
    def _crossing(self) -> tuple[IntArray, IntArray, IntArray]:
        """Values that later forward ops read: the storage, its writer and its last reader."""
        last: dict[int, int] = {}
        for i in self.program.always_forward:
            last.update((s, i) for s in self.program.ops[i].reads)
        rows = [
            (s, i, last[s])
            for i, op in enumerate(self.program.ops)
            for s in op.writes
            if last.get(s, i) > i
        ]
        storage, written, read = np.asarray(rows, dtype=np.int64).reshape(-1, 3).T
        return storage, written, read

    @cached_property
    def _forward_width(self) -> IntArray:
        """:attr:`StageBoundaries.width` of the forward."""
        storage, written, read = self._crossing
        nbytes = self.program.tables.bytes[storage]
        intervals = zip((written + 1).tolist(), read.tolist(), nbytes.tolist(), strict=True)
        return live_bytes(intervals, len(self.program.ops))

    @cached_property
    def _forward_depth(self) -> dict[int, int]:
        """:attr:`StageBoundaries.depth` of the forward."""
        return persistence(self._forward_width)
