"""References: the plans people make by rule. They are among the planner's candidates, so it is never worse than any of them.

The plan that saves all is :func:`~fxckpt.passes.schedule.save_all`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from fxckpt.passes.program import BoolArray, Program
from fxckpt.passes.schedule import Decisions, Schedule, emit
from fxckpt.passes.staged_cut import StagedCut
from fxckpt.passes.stages import NarrowPlaces, deepest, persistence


@dataclass(frozen=True)
class References:
    """The reference plans of one program."""

    program: Program
    places: NarrowPlaces

    def __call__(self) -> Iterator[Schedule]:
        """Yield all of them."""
        yield self.least_saved()
        yield self.light_ops_again()
        for count in (8, 16, 32):
            yield self.block_boundaries(count)

    def least_saved(self) -> Schedule:
        """Save the fewest bytes that allow the backward; all else runs again, once."""
        return self._one_cut(self.program.tables.is_rerunnable)

    def light_ops_again(self) -> Schedule:
        """Save the fewest bytes such that no op with FLOPs and no random op runs again: about what torch's partitioner does by default."""
        tables = self.program.tables
        is_light = (tables.flops[: len(self.program.ops)] == 0) & (tables.rng_state < 0)
        must = np.array([not tables.is_savable[list(op.writes)].all() for op in self.program.ops], dtype=bool)
        return self._one_cut(tables.is_rerunnable & (is_light | must))

    def _one_cut(self, may_run: BoolArray) -> Schedule:
        layout = StagedCut(sweeps=1, reach=math.inf).lay_out(self.program, (0,))
        # A byte is worth more than any time.
        layout = replace(layout, seconds=np.where(may_run[layout.op], 0.0, math.inf), written_bytes=np.zeros(len(layout.op)))
        (decisions,) = StagedCut(sweeps=1)(layout, (1.0, 0.0))
        return emit(self.program, decisions)

    def block_boundaries(self, count: int) -> Schedule:
        """Save what crosses the boundaries of about ``count`` blocks of the forward; every block runs again when its backward begins.

        Chen et al. 2016, algorithm 1, with the blocks found as stages are.
        """
        ops = self.program.ops
        is_forward = self.program.tables.is_forward
        last = {s: i for i, op in enumerate(ops) if is_forward[i] for s in op.reads}
        change = np.zeros(len(ops) + 1, dtype=np.int64)
        crossing: list[tuple[int, int, int]] = []
        for i, op in enumerate(ops):
            for s in op.writes:
                if last.get(s, i) > i:
                    change[i + 1] += self.program.storages[s].bytes
                    change[last[s] + 1] -= self.program.storages[s].bytes
                    crossing.append((s, i, last[s]))
        boundaries = np.asarray(deepest(persistence(np.cumsum(change)[:-1]), count), dtype=np.int64)
        saved = frozenset(s for s, made, read in crossing if ((boundaries > made) & (boundaries <= read)).any())
        starts = self.places.stages(count)
        free = frozenset(np.flatnonzero(self.program.tables.is_rerunnable).tolist())
        return emit(self.program, Decisions(starts, (saved,) * len(starts), (free,) * len(starts)))
