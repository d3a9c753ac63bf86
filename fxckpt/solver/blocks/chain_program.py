"""The dynamic program over a chain of blocks: the fastest nested recomputation within any budget.

The backward visits the blocks from the last to the first. Let W(i, j, m) be the least seconds of
recomputes for the stages of blocks i to j - 1, if what crosses into block i is held and m bytes are
left for the rest. It is the least of these::

    run block i, then its stage, in a way that takes at most m bytes             (j = i + 1)
    run blocks i to k - 1, hold what crosses into block k meanwhile, and
        W(k, j, m - bytes that cross into i) + W(i, k, m)
    run block i, hold what a way to run its stage is given, and
        W(i + 1, j, m - bytes held) + seconds of the stage

The first forward is run anyway: W0(0, n, m) has the same terms without the seconds of the forward's
ops. It is the program of rotor (Beaumont, Eyraud-Dubois, Herrmann, Joly and Shilova, "Optimal
checkpointing for heterogeneous chains", 2019) with several ways for each block, as in HiRemate
(Gusak et al., ICML 2025), over bytes in equal parts. What is held is held until its stage.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from fxckpt.solver.blocks.block_program import BlockPrograms
from fxckpt.solver.blocks.partition import Blocks
from fxckpt.solver.blocks.ways import Way
from fxckpt.solver.program import FloatArray, IntArray
from fxckpt.solver.schedule import Schedule, with_runs

Choices = npt.NDArray[np.int16]
"""What is done first: the block advanced to, or ``~n`` for way n of the first block."""


@dataclass(frozen=True)
class Span:
    """Stages of consecutive blocks to run, within a number of parts of the budget."""

    first: int
    end: int
    parts: int
    is_forward: bool
    """Whether the first forward has yet to pass the blocks, at no extra time."""


@dataclass(frozen=True)
class ChainProgram:
    """Nested schedules of one program within up to ``most`` bytes."""

    programs: BlockPrograms
    ways: tuple[tuple[Way, ...], ...]
    """Ways to run the stage of each block; where a block has none, nothing is found."""
    most: int
    """Greatest budget in question."""
    parts: int
    """Number of equal parts of it in which bytes are counted."""

    def seconds(self, limit: int) -> float:
        """Return the extra time of the schedule within ``limit`` bytes, infinite if none is."""
        return float(self._first[0][0, self._parts_of(limit)])

    def least_limit(self, seconds: float) -> int | None:
        """Return the least budget with a schedule of at most ``seconds``, None if none has."""
        enough = np.flatnonzero(self._first[0][0] <= seconds)
        return int(enough[0]) * self._unit if len(enough) else None

    def schedule(self, limit: int) -> Schedule | None:
        """Return the schedule of least extra time within ``limit`` bytes, None if none is.

        Its peak may be above the limit by what the program does not see: values that stages read
        from afar, and what is lost in rounding.
        """
        if math.isinf(self.seconds(limit)):
            return None
        runs: list[int] = []
        before: list[int] = []
        for op, position in self._recomputes(self._parts_of(limit)):
            runs.append(op)
            before.append(position)
        return with_runs(self._blocks.program, tuple(runs), tuple(before))

    @property
    def _blocks(self) -> Blocks:
        """The blocks of the chain."""
        return self.programs.blocks

    @property
    def _unit(self) -> int:
        """Bytes of a part."""
        return max(1, math.ceil(self.most / self.parts))

    def _parts_of(self, limit: int) -> int:
        """Return the whole parts in some bytes."""
        return min(max(limit, 0) // self._unit, self.parts)

    def _nearest(self, nbytes: int) -> int:
        """Return the number of parts nearest to some bytes, at most one more than there are.

        Rounded up, the vectors beside each value held would take the room of a further one.
        """
        return min((nbytes + self._unit // 2) // self._unit, self.parts + 1)

    @cached_property
    def _crossing_bytes(self) -> list[int]:
        """Bytes that cross into each block."""
        nbytes = self._blocks.program.tables.bytes
        return [int(nbytes[list(values)].sum()) for values in self._blocks.crossing]

    @cached_property
    def _crossing_parts(self) -> list[int]:
        """Parts that cross into each block."""
        return [self._nearest(nbytes) for nbytes in self._crossing_bytes]

    @cached_property
    def _advance_seconds(self) -> FloatArray:
        """Seconds of the forward from the first block's begin to each block's."""
        blocks, seconds = self._blocks, self._blocks.program.tables.seconds
        each = [
            seconds[blocks.writers(blocks.crossing[b + 1], b)].sum() for b in range(blocks.count)
        ]
        return np.concatenate(([0.0], np.cumsum(each)))

    @cached_property
    def _forward_bytes(self) -> list[int]:
        """Bytes that a run of each block's forward takes, with what crosses into the block."""
        return [min((way.forward_bytes for way in ways), default=0) for ways in self.ways]

    def _advance_parts(self, first: int, end: int, live: int) -> IntArray:
        """Return the parts that an advance from a block to each later one before ``end`` takes.

        What crosses into the first is held throughout; ``live`` bytes are live beside it.
        """
        held = [0, *[self._crossing_bytes[first]] * (end - first - 2)]
        taken = np.asarray(self._forward_bytes[first : end - 1]) + held + live
        nearest: IntArray = (np.maximum.accumulate(taken) + self._unit // 2) // self._unit
        return nearest

    @cached_property
    def _all(self) -> tuple[FloatArray, Choices]:
        """Seconds and first choice of each span, by first block, end and parts."""
        count, size = self._blocks.count, self.parts + 1
        seconds = np.full((count, count + 1, size), math.inf)
        choice = np.zeros(seconds.shape, dtype=np.int16)
        for length in range(1, count + 1):
            for first in range(count - length + 1):
                end = first + length
                seconds[first, end], choice[first, end] = self._least(
                    first, end, seconds[:, end], seconds, is_forward=False
                )
        return seconds, choice

    @cached_property
    def _first(self) -> tuple[FloatArray, Choices]:
        """Seconds and first choice from each block to the last in the first forward, by parts."""
        count, size = self._blocks.count, self.parts + 1
        seconds = np.full((count, size), math.inf)
        choice = np.zeros(seconds.shape, dtype=np.int16)
        for first in range(count - 1, -1, -1):
            seconds[first], choice[first] = self._least(
                first, count, seconds, self._all[0], is_forward=True
            )
        return seconds, choice

    def _least(
        self, first: int, end: int, later: FloatArray, every: FloatArray, *, is_forward: bool
    ) -> tuple[FloatArray, Choices]:
        """Return the least seconds of a span and its first choice, by parts.

        ``later`` has the seconds of the spans that end there by first block, ``every`` those of
        all spans after the first forward.
        """
        size = self.parts + 1
        least, choice = np.full(size, math.inf), np.zeros(size, dtype=np.int16)
        live = self.programs.held_bytes if is_forward else self.programs.bytes_before(end - 1)
        if end - first > 1 and (held := self._crossing_parts[first]) < size:
            middles = np.arange(first + 1, end)
            total = every[first, first + 1 : end].copy()
            total[:, held:] += later[first + 1 : end, : size - held]
            total[:, :held] = math.inf
            taken = self._advance_parts(first, end, live)
            total[np.arange(size) < taken[:, np.newaxis]] = math.inf
            if not is_forward:
                advanced = self._advance_seconds[middles] - self._advance_seconds[first]
                total += advanced[:, np.newaxis]
            best = total.argmin(axis=0)
            least = total[best, np.arange(size)]
            choice = middles[best].astype(np.int16)
        for n, way in enumerate(self.ways[first]):
            seconds, held, rest = way.extra_seconds, 0, np.zeros(size)
            taken_bytes = max(way.stage_bytes, way.forward_bytes + live)
            if end - first > 1:
                held, rest = self._nearest(way.held_bytes), later[first + 1]
                seconds += 0.0 if is_forward else way.pass_seconds
            elif not is_forward:
                seconds += way.run_seconds
                taken_bytes = way.run_bytes
            begin = max(held, self._nearest(taken_bytes))
            if begin >= size:
                continue
            found = rest[begin - held : size - held] + seconds
            better = found < least[begin:]
            least[begin:][better] = found[better]
            choice[begin:][better] = ~n
        return least, choice

    def _recomputes(self, parts: int) -> Iterator[tuple[int, int]]:
        """Yield the recomputes of the schedule, and the backward op that each precedes."""
        blocks = self._blocks
        todo: list[Span | Way] = [Span(0, blocks.count, parts, is_forward=True)]
        while todo:
            span = todo.pop()
            if isinstance(span, Way):
                yield from zip(span.runs, span.before, strict=True)
                continue
            first, end = span.first, span.end
            choice = int(
                self._first[1][first, span.parts]
                if span.is_forward
                else self._all[1][first, end, span.parts]
            )
            if choice > 0:
                left = span.parts - self._crossing_parts[first]
                todo.append(Span(first, choice, span.parts, is_forward=False))
                todo.append(Span(choice, end, left, span.is_forward))
                passed = [(b, blocks.crossing[b + 1]) for b in range(first, choice)]
            else:
                way = self.ways[first][~choice]
                todo.append(way)
                passed = [(first, frozenset(way.saved))]
                if end - first > 1:
                    left = span.parts - self._nearest(way.held_bytes)
                    todo.append(Span(first + 1, end, left, span.is_forward))
                    passed = [(first, blocks.crossing[first + 1].union(way.saved))]
            if not span.is_forward:
                begin = blocks.stages[end - 1].start
                for block, wanted in passed:
                    yield from ((o, begin) for o in blocks.writers(wanted, block))
