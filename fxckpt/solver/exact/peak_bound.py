"""Lower bound on the peak of any plan, from what must be held while the widest ops run.

While a backward op runs, its own reads and results are live. What the ops soon after it read is
held then too, or recomputed after it; and an op that is recomputed there needs its operands and its
result beside the gradients that are live all the while. Where these exceed a limit, the op cannot
run, and what follows from it must be held. So within the limit at least the bytes of a min-cut are
held: between the values that the next ops read and the ops that cannot run, each value at its
bytes. A limit that the widest op and its cut exceed is below the peak of every plan.

Values beside a link to other memory may be held there: such programs have the bound of single ops.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

import numpy as np

from fxckpt.solver.cuts.min_cut import Network
from fxckpt.solver.cuts.staged_cut import stage_cuts
from fxckpt.solver.program import FloatArray, IntArray, Program

WIDEST = 8
"""Number of backward ops whose windows are looked at."""
AHEAD = 64
"""Most ops of a window."""
REACH = 400
"""Most forward ops of a window's cut; what is beyond is held without bytes."""
BISECTIONS = 6
"""Halvings of the range in which the bound is."""


@dataclass(frozen=True)
class PeakBound:
    """Lower bound on the peak of one program."""

    program: Program
    at_ops: Sequence[int]
    """Bytes live during each backward op under any plan."""
    between: Sequence[int]
    """Bytes of outputs and gradients live before each backward op under any plan."""

    @cached_property
    def bytes(self) -> int:
        """Bytes that the peak of every plan reaches."""
        least = max(self.at_ops, default=0)
        if self.program.link is not None or not self._windows:
            return least
        # The bytes needed fall as the limit rises: the bound is where they meet.
        most = self._needed(least)
        if most <= least or self._needed(most - 1) >= most:
            return max(least, most)
        for _ in range(BISECTIONS):
            middle = (least + most) // 2
            if self._needed(middle) > middle:
                least = middle + 1
            else:
                most = middle
        return least

    @cached_property
    def _windows(self) -> tuple[tuple[int, int], ...]:
        """Widest ops, each with the last op of a window after it.

        A window ends where fewer gradients are live than before: a longer one only lets more run.
        """
        order = np.argsort(-np.asarray(self.at_ops, dtype=np.int64), kind="stable")
        found: list[tuple[int, int]] = []
        for j in order[:WIDEST].tolist():
            least = list(accumulate(self.between[j + 1 : j + 1 + AHEAD], min))
            ends = [i for i in range(len(least)) if i + 1 == len(least) or least[i + 1] < least[i]]
            found.extend((j, j + 1 + i) for i in ends)
        return tuple(found)

    @cached_property
    def _cut(self) -> tuple[Network, IntArray, IntArray]:
        """The network of all windows, and the ops and storages of its vertices."""
        stages = (range(j + 1, end + 1) for j, end in self._windows)
        return stage_cuts(self.program, stages, REACH)

    @cached_property
    def _keep_cost(self) -> FloatArray:
        """Bytes of each value vertex, if the window's first op does not count them."""
        tables = self.program.tables
        network, _, values = self._cut
        reads = [frozenset(self.program.forward_reads[j]) for j, _ in self._windows]
        of_window = network.problem_of_value
        is_read = np.fromiter(
            (s in reads[w] for s, w in zip(values.tolist(), of_window.tolist(), strict=True)),
            np.bool_,
            len(values),
        )
        is_beyond = (network.producer < 0) & (tables.producer[values] >= 0)
        is_free = is_read | is_beyond | tables.is_output[values]
        return np.where(is_free, 0.0, tables.bytes[values])

    @cached_property
    def _beside(self) -> IntArray:
        """Bytes live while each op vertex is recomputed, at the least."""
        tables = self.program.tables
        network, ops, _ = self._cut
        not_held = np.where(tables.is_output, 0, tables.bytes).tolist()
        at_op = [
            sum([not_held[s] for s in {*op.needs, *op.writes}])
            + op.workspace_bytes
            - max([not_held[s] for s in op.takes], default=0)
            for op in self.program.ops
        ]
        least = [min(self.between[j + 1 : end + 1]) for j, end in self._windows]
        found: IntArray = np.asarray(at_op, dtype=np.int64)[ops]
        return found + np.asarray(least, dtype=np.int64)[network.problem_of_op]

    def _needed(self, limit: int) -> int:
        """Return the most bytes that a window needs if no op runs that exceeds ``limit``."""
        network, ops, _ = self._cut
        may_run = self.program.tables.is_recomputable[ops] & (self._beside <= limit)
        recompute_cost = np.where(may_run, 0.0, math.inf)
        kept, _ = network.solve(recompute_cost, self._keep_cost)
        held = np.bincount(
            network.problem_of_value[kept], self._keep_cost[kept], len(self._windows)
        ) - network.rounding_errors(recompute_cost, self._keep_cost)
        at = np.asarray([self.at_ops[j] for j, _ in self._windows])
        return int(np.ceil(at + held).max())  # Bytes are whole.
