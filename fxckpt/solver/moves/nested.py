"""Nested recomputation: blocks recomputed from few of their boundaries, by rule.

A plan that holds every block's boundary recomputes each block once. Below that peak boundaries are
recomputed too: the forward is advanced again from a boundary that is held, and leaves others on its
way, for the blocks between. With a number of boundaries held at once, the fewest advances are those
of the binomial rule (Griewank and Walther, Revolve, 2000). Other values of a block are recomputed
when an op of its backward first reads them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache, cached_property

from fxckpt.solver.program import Program, Side
from fxckpt.solver.schedule import Schedule, with_runs


@dataclass(frozen=True)
class Nested:
    """Plans that advance the forward again from few of its block boundaries."""

    program: Program
    boundaries: tuple[int, ...]
    """First forward op of each block but the first, ascending."""

    def recomputes(self, held: int) -> int:
        """Return about how many ops the plan with ``held`` boundaries recomputes."""
        sizes = [0] * (len(self.boundaries) + 1)
        for block in self._block:
            sizes[block] += 1
        return sum(
            sum(sizes[start : block + 1]) for block, start in enumerate(advances(len(sizes), held))
        )

    def __call__(self, held: int) -> Schedule:
        """Return the plan that holds ``held`` boundaries at once, beside the program's inputs."""
        program, block = self.program, self._block
        starts = advances(len(self.boundaries) + 1, held)
        runs: list[int] = []
        before: list[int] = []
        current = len(starts)
        done: set[int] = set()
        for j, reads in enumerate(program.forward_reads):
            wanted = [o for s in reads if (o := self._runnable(s)) is not None]
            latest = max((block[o] for o in wanted), default=current)
            if latest < current:
                current, done = latest, set()
                advanced = self._of_blocks(starts[current], current)
                runs.extend(advanced)
                before.extend([j] * len(advanced))
            for o in wanted:
                if block[o] == current:
                    found = list(self._missing(o, done))
                    runs.extend(found)
                    before.extend([j] * len(found))
        return with_runs(program, tuple(runs), tuple(before))

    @cached_property
    def _block(self) -> list[int]:
        """Block of each op; ops that only the backward depends on are in that of their inputs."""
        found: list[int] = []
        count = 0
        for i, op in enumerate(self.program.ops):
            while count < len(self.boundaries) and self.boundaries[count] <= i:
                count += 1
            inputs = [p for s in op.needs if (p := self.program.producers[s]) >= 0]
            found.append(
                max((found[p] for p in inputs), default=count) if op.side is Side.EITHER else count
            )
        return found

    def _runnable(self, s: int) -> int | None:
        """Return the op that recomputes a storage, or None if there is none or no need."""
        o = self.program.producers[s]
        if o < 0 or self.program.ops[o].no_recompute is not None or s in self.program.outputs:
            return None
        return o

    def _of_blocks(self, first: int, end: int) -> list[int]:
        """Return the ops of the blocks from ``first`` to before ``end`` that may be recomputed."""
        return [
            o
            for o, op in enumerate(self.program.ops)
            if first <= self._block[o] < end and op.no_recompute is None
        ]

    def _missing(self, op: int, done: set[int]) -> Iterator[int]:
        """Yield an op and the ops of its block that it depends on, but for those already done."""
        stack = [op]
        while stack:
            o = stack[-1]
            if o in done:
                stack.pop()
                continue
            missing = [
                p
                for s in self.program.ops[o].needs
                if (p := self._runnable(s)) is not None
                and p not in done
                and self._block[p] == self._block[op]
            ]
            if missing:
                stack.extend(reversed(missing))
                continue
            stack.pop()
            done.add(o)
            yield o


def advances(blocks: int, held: int) -> Sequence[int]:
    """Return the block at whose boundary the advance to each block begins.

    At most ``held`` boundaries are held at once, beside the inputs of block 0. What an advance
    passes on its way is held for the blocks between.
    """
    starts = list(range(blocks))
    todo: list[tuple[int, int, int, int | None]] = [(0, blocks, held, None)]
    while todo:
        low, high, free, origin = todo.pop()
        if free and high - low > 1:
            middle = low + _first_part(high - low, free)
            todo.append((low, middle, free, low))
            todo.append((middle, high, free - 1, origin))
            continue
        starts[low:high] = [low] * (high - low)
        if origin is not None:
            starts[high - 1] = origin
    return starts


def _first_part(blocks: int, held: int) -> int:
    """Return how far the first of ``held`` boundaries is from the start of some blocks."""
    return min(
        range(1, blocks),
        key=lambda m: (m + _steps(blocks - m, held - 1) + _steps(m, held), -m),
    )


@cache
def _steps(blocks: int, held: int) -> int:
    """Return the fewest blocks that are advanced through, the first time included."""
    if blocks <= 1:
        return 0
    if not held:
        return blocks * (blocks - 1) // 2
    return min(m + _steps(blocks - m, held - 1) + _steps(m, held) for m in range(1, blocks))
