"""The dynamic program: the least extra time within a budget, exactly, for few forward values.

It has the model of :mod:`~fxckpt.solver.exact.milp`: stages of one backward op, and recomputes in
topological order within a stage. A state is the set of forward values that are live at a point; its
cost is the least extra time to reach it. Values can be freed at any point, so that the cost of a
set is at most that of a larger one, and the best way to a set T through a recompute starts from the
smallest set that allows it: T without the results of the recompute, with its operands. Each point
is therefore one gather over an array of all sets. The integer program takes minutes where its
relaxation is weak; this takes a time known beforehand.

Ops run in place as they do in the simulator, with one exception: whether a forward value may be
written into in the backward depends on where its copy comes from, which a set does not tell. There
results count in full unless the value cannot be saved, so that a schedule may need less. With
``takes_saved`` they never do, so that it may need more.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from fxckpt.solver.exact.milp import Optimum
from fxckpt.solver.program import FloatArray, IntArray, Program, Side
from fxckpt.solver.schedule import with_runs
from fxckpt.solver.simulate import backward_own_profile, may_take_forward
from fxckpt.utils.intervals import last_uses


@dataclass(frozen=True)
class _Recompute:
    """Recompute of a forward op, over all sets of values that are live after it."""

    seconds: float
    before: IntArray
    """Smallest set that is live before it."""
    during: IntArray
    """Bytes of the values and the workspace that are live while it runs."""
    operands: int
    results: int
    """Sets of the values that it reads and writes."""


@dataclass(frozen=True)
class DynamicProgram:
    """The exact solver of one program, whose ops all run in the forward."""

    program: Program
    takes_saved: bool = False
    """Whether results are written into copies that the forward saved too, as in no plan."""

    def __post_init__(self) -> None:
        """Raise :class:`ValueError` if an op may run on either side."""
        if any(op.side is not Side.FORWARD for op in self.program.ops):
            raise ValueError("an op may run on either side: plan in_forward(program) instead")

    @property
    def size(self) -> int:
        """Number of states: the sets of live values at all points."""
        return sum((len(ops) + 1) << width for ops, width in self._stages)

    def optimum(self, limit: int) -> Optimum:
        """Return the schedule of least extra time within ``limit`` bytes.

        Time and memory grow with :attr:`size`: about 10 ns and one bit each.
        """
        cost = self._after_forward(limit)
        most_spared = may_take_forward(self.program)
        choices: list[list[npt.NDArray[np.uint8]]] = []
        for j, (ops, width) in enumerate(self._stages):
            # Sets that hold a value of no further use cost no less than those without it.
            sets = slice(1 << width)
            room_of_ops, room_of_backward = (limit - nbytes for nbytes in self._beside[j])
            cost = cost[sets]
            if ops:
                cost = np.where(self._bytes[sets] <= room_of_ops, cost, np.inf)
            choices.append([])
            for i in ops:
                run = self._recomputes[i]
                through = cost[run.before[sets]] + run.seconds
                through[run.during[sets] > room_of_ops] = np.inf
                is_better = through < cost
                choices[-1].append(np.packbits(is_better))
                cost = np.where(is_better, through, cost)
            with_reads = self._sets[sets] | self._reads[j]
            spared = self._spared(self.program.backward[j].takes, most_spared[j], len(cost))
            needed = self._bytes[with_reads] - spared
            fits = needed <= room_of_backward
            cost = np.where(fits, cost[with_reads], np.inf)
        if not np.isfinite(cost[0]):
            return Optimum(limit, None, 0.0)
        runs = self._runs(choices)
        schedule = with_runs(self.program, tuple(i for _, i in runs), tuple(j for j, _ in runs))
        return Optimum(limit, float(cost[0]), float(cost[0]), schedule)

    def _runs(self, choices: list[list[npt.NDArray[np.uint8]]]) -> list[tuple[int, int]]:
        """Return the recomputes of the cheapest way to the empty set at the end, in order."""
        live, found = 0, []
        for j, (ops, _) in reversed(list(enumerate(self._stages))):
            live |= self._reads[j]
            for i, chosen in zip(reversed(ops), reversed(choices[j]), strict=True):
                if chosen[live >> 3] >> (7 - (live & 7)) & 1:
                    found.append((j, i))
                    run = self._recomputes[i]
                    live = (live & ~run.results) | run.operands
        return found[::-1]

    @cached_property
    def _needs(self) -> tuple[dict[int, int], list[int]]:
        """Bit of each forward value of use to the backward, and their number at each stage.

        Of use to a stage are the values that its op and later ones read, and those from which these
        can be recomputed. Values of use to later stages have lower bits.
        """
        program = self.program
        is_output = program.tables.is_output
        bits: dict[int, int] = {}
        widths: list[int] = []
        for reads in reversed(program.forward_reads):
            todo = list(reads)
            while todo:
                s = todo.pop()
                if s in bits or is_output[s]:
                    continue
                bits[s] = 1 << len(bits)
                producer = program.storages[s].producer
                if producer >= 0 and program.ops[producer].no_recompute is None:
                    todo.extend(program.ops[producer].needs)
            widths.append(len(bits))
        return bits, widths[::-1]

    @property
    def _bit(self) -> dict[int, int]:
        return self._needs[0]

    @cached_property
    def _stages(self) -> list[tuple[list[int], int]]:
        """Ops that may be recomputed for each stage, and its number of values."""
        ops = {
            i: min(self._bit[s] for s in op.writes if s in self._bit)
            for i, op in enumerate(self.program.ops)
            if op.no_recompute is None and any(s in self._bit for s in op.writes)
        }
        return [
            ([i for i, lowest in ops.items() if lowest < 1 << width], width)
            for width in self._needs[1]
        ]

    @cached_property
    def _sets(self) -> IntArray:
        return np.arange(1 << len(self._bit), dtype=np.int64)

    @cached_property
    def _bytes(self) -> IntArray:
        """Bytes of each set."""
        total = np.zeros(1, dtype=np.int64)
        for s in self._bit:
            total = np.concatenate((total, total + self.program.storages[s].bytes))
        return total

    def _set_of(self, storages: tuple[int, ...]) -> int:
        return sum({self._bit.get(s, 0) for s in storages})

    @cached_property
    def _reads(self) -> list[int]:
        """Set that each backward op reads."""
        return [self._set_of(reads) for reads in self.program.forward_reads]

    def _spared(self, takes: tuple[int, ...], nbytes: int, count: int) -> IntArray | int:
        """Return the bytes that an op spares by writing into one of some values.

        It does where the value is not in the set after it, over the first ``count`` sets.
        """
        bits = [
            self._bit[s]
            for s in takes
            if s in self._bit and (self.takes_saved or not self.program.storages[s].is_savable)
        ]
        if not bits or not nbytes:
            return 0
        # It writes into none if all are live after it.
        is_kept = (self._sets[:count] & sum(bits)) == sum(bits)
        return np.where(is_kept, 0, nbytes)

    @cached_property
    def _recomputes(self) -> dict[int, _Recompute]:
        program, tables = self.program, self.program.tables
        found = {}
        for i in self._stages[0][0] if self._stages else ():
            op = program.ops[i]
            operands, results = self._set_of(op.needs), self._set_of(op.writes)
            before = (self._sets & ~results) | operands
            unread = sum(program.storages[s].bytes for s in {*op.writes} if s not in self._bit)
            during = self._bytes[before | results] + (
                unread + int(tables.workspace_bytes[i] + tables.state_bytes[i])
            )
            if op.takes:
                nbytes = program.storages[op.takes[0]].bytes
                during = during - self._spared(op.takes, nbytes, len(self._sets))
            found[i] = _Recompute(float(tables.seconds[i]), before, during, operands, results)
        return found

    @cached_property
    def _beside(self) -> list[tuple[int, int]]:
        """Bytes live in each stage beside forward values: at recomputes, and at its backward op."""
        program, tables = self.program, self.program.tables
        outputs = int(tables.bytes[tables.is_output].sum())
        count = len(program.ops)
        return [
            (outputs + before, outputs + during + int(tables.workspace_bytes[count + j]))
            for j, (before, during) in enumerate(zip(*backward_own_profile(program), strict=True))
        ]

    def _after_forward(self, limit: int) -> FloatArray:
        """Return the cost of each set at the end of the forward: 0, or infinite if it is none."""
        program, tables = self.program, self.program.tables
        last = last_uses((*op.reads, *op.writes) for op in program.ops)
        held_to = tables.held_to.tolist()
        unsavable = self._set_of(tuple(s for s in self._bit if not tables.is_savable[s]))
        fits = (self._sets & unsavable) == 0
        written: set[int] = set()
        for k, op in enumerate(program.ops):
            written.update(op.writes, () if op.rng_state is None else (op.rng_state,))
            live = int(tables.workspace_bytes[k])
            saved = 0
            free = [
                s for s in op.takes if last[s] == k and held_to[s] < k and not tables.is_output[s]
            ][:1]
            for s in written:
                if tables.is_output[s] or max(last.get(s, -1), held_to[s]) >= k:
                    live += int(tables.bytes[s])
                else:
                    saved |= self._bit.get(s, 0)
            needed = self._bytes[self._sets & saved] + live
            for s in free:
                needed -= np.where((self._sets & self._bit.get(s, 0)) == 0, tables.bytes[s], 0)
            fits &= needed <= limit
        for bound in program.limits:
            fits &= self._bytes[self._sets & self._set_of(bound.storages)] <= bound.bytes
        return np.where(fits, 0.0, np.inf)
