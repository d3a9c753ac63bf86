"""Blocks: parts of the forward between narrow boundaries, each with its stage of the backward.

The stage of a block is the span of the backward that reads values of the block, up to the first op
that reads values of earlier blocks alone. Between stages a plan holds what crosses boundaries, or
runs the forward again from one. What crosses into a block is read by the block's stage, which then
holds it to its end (``holds_inputs``), or after it by the stage of the block that writes it, which
may run that op again: the former is faster, the latter has lower peaks. A value that crosses many
boundaries is carried: it is held throughout.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

from fxckpt.solver.program import FORWARD_ONLY, IN_BACKWARD, Program, Side

CARRIED = 2
"""Boundaries that a value may cross without being carried."""


@dataclass(frozen=True)
class Blocks:
    """Blocks of one program, each with backward ops of its own."""

    program: Program
    of_op: tuple[int, ...]
    """Block of each forward op; ops that only the backward depends on are in that of their
    inputs."""
    stages: tuple[range, ...]
    """Backward ops of each block; the last block's stage is the first."""

    @classmethod
    def of(
        cls, program: Program, boundaries: Sequence[int], *, holds_inputs: bool = False
    ) -> Blocks:
        """Return the blocks that begin at the first op and at ``boundaries``, ascending.

        A block whose values no backward op is the first to read is joined to the next one.
        """
        of_op = _blocks_of_ops(program, boundaries)
        last = {
            s: crossed.stop - 1 if holds_inputs else crossed.start - 1
            for s, crossed in _crossed(program, of_op).items()
        }
        current, at = len(boundaries), []
        for reads in program.forward_reads:
            current = min(current, max([last[s] for s in reads if s in last], default=current))
            at.append(current)
        present = sorted({*at})
        joined = {
            b: min(sum(p < b for p in present), len(present) - 1)
            for b in range(len(boundaries) + 1)
        }
        starts = [at.index(b) for b in present]
        # The stage of a block begins where that of the next one ends.
        stages = tuple(map(range, starts, [len(at), *starts]))
        return cls(program, tuple(joined[b] for b in of_op), stages)

    @property
    def count(self) -> int:
        """Number of blocks."""
        return len(self.stages)

    @cached_property
    def ops(self) -> tuple[tuple[int, ...], ...]:
        """Forward ops of each block, ascending."""
        found: list[list[int]] = [[] for _ in self.stages]
        for o, block in enumerate(self.of_op):
            found[block].append(o)
        return tuple(map(tuple, found))

    @cached_property
    def _crossed(self) -> dict[int, range]:
        """Boundaries that each value crosses."""
        return _crossed(self.program, self.of_op)

    @cached_property
    def carried(self) -> frozenset[int]:
        """Storages that are held throughout: outputs too."""
        savable = self.program.tables.is_savable
        return self.program.outputs | {
            s for s, crossed in self._crossed.items() if len(crossed) > CARRIED and savable[s]
        }

    @cached_property
    def crossing(self) -> tuple[frozenset[int], ...]:
        """Storages that cross the boundary before each block, and that before none, at the end."""
        found: list[set[int]] = [set() for _ in range(self.count + 1)]
        for s, crossed in self._crossed.items():
            if s not in self.carried:
                for block in crossed:
                    found[block].add(s)
        return tuple(map(frozenset, found))

    def writers(self, wanted: Iterable[int], block: int) -> list[int]:
        """Return the ops of a block that write storages, from what crosses into it, ascending.

        A value of another block that must not be saved is written too.
        """
        program, savable = self.program, self.program.tables.is_savable
        found: set[int] = set()
        stack = list(wanted)
        while stack:
            s = stack.pop()
            o = program.producers[s]
            if o < 0 or o in found or s in self.carried or program.ops[o].no_recompute is not None:
                continue
            if self.of_op[o] == block or not savable[s]:
                found.add(o)
                stack.extend(program.ops[o].needs)
        return sorted(found)


def _blocks_of_ops(program: Program, boundaries: Sequence[int]) -> list[int]:
    """Return the block of each op before any are joined."""
    found: list[int] = []
    for block, (start, end) in enumerate(pairwise((0, *boundaries, len(program.ops)))):
        for op in program.ops[start:end]:
            inputs = [p for s in op.needs if (p := program.producers[s]) >= 0]
            is_either = op.side is Side.EITHER
            found.append(max((found[p] for p in inputs), default=block) if is_either else block)
    return found


def _crossed(program: Program, of_op: Sequence[int]) -> dict[int, range]:
    """Return the boundaries that each value crosses, as the blocks after them.

    Values that cross none have an empty range, which ends after their block. Outputs have none.
    """
    last: dict[int, int] = {}
    for o, op in enumerate(program.ops):
        for s in op.needs:
            last[s] = max(last.get(s, 0), of_op[o])
    return {
        s: range(of_op[producer] + 1, max(last.get(s, 0), of_op[producer]) + 1)
        for s, producer in enumerate(program.producers)
        if producer not in (FORWARD_ONLY, IN_BACKWARD) and s not in program.outputs
    }
