"""The program of one block: its forward ops and its stage of the backward, as a program.

What comes from other blocks is written by an op that must not be recomputed; gradients that come
into the stage are its incoming gradients, and those that leave it are returned. A search of this
small program says how the stage may run in how many bytes. Blocks of one shape have equal programs.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain

from fxckpt.reason import Reason
from fxckpt.solver.blocks.partition import Blocks
from fxckpt.solver.program import FORWARD_ONLY, IN_BACKWARD, Op, Program, Side, Storage
from fxckpt.solver.schedule import Schedule
from fxckpt.solver.simulate import backward_own_profile


@dataclass(frozen=True)
class BlockProgram:
    """The program of one block, and what its indices mean."""

    program: Program
    storages: tuple[int, ...]
    """Storage of the whole program that each of the block's is."""
    ops: tuple[int, ...]
    """Forward op of the whole program that each of the block's but the first is."""
    stage: range
    """Backward ops of the whole program."""
    outside_bytes: int
    """Bytes that are live throughout the stage and not in the program: outputs, carried values and
    gradients that pass it by."""

    def recomputes(self, schedule: Schedule) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return the recomputes of a schedule of the block in indices of the whole program.

        Second come the backward ops that they precede.
        """
        last = len(self.stage) - 1
        return (
            tuple(self.ops[o - 1] for o in schedule.runs),
            tuple(self.stage[min(j, last)] for j in schedule.before),
        )


@dataclass(frozen=True)
class BlockPrograms:
    """The programs of all blocks."""

    blocks: Blocks

    def of(self, block: int) -> BlockProgram:
        """Return the program of one block."""
        program, stage, ops = self.blocks.program, self.blocks.stages[block], self.blocks.ops[block]
        own = list(chain.from_iterable(program.ops[o].writes for o in ops))
        backward = [program.backward[j] for j in stage]
        needed = chain(
            chain.from_iterable(program.ops[o].needs for o in ops),
            chain.from_iterable(program.forward_reads[j] for j in stage),
        )
        inputs = list(dict.fromkeys(s for s in needed if s not in {*own}))
        gradients = [
            s
            for s in dict.fromkeys(chain.from_iterable((*op.reads, *op.writes) for op in backward))
            if program.storages[s].producer == IN_BACKWARD
        ]
        storages = (*inputs, *own, *gradients)
        index = {s: i for i, s in enumerate(storages)}
        writer = {s: i for i, o in enumerate(ops, 1) for s in program.ops[o].writes}
        entering = [s for s in gradients if self._written[s] < stage.start]
        leaving = [s for s in gradients if self._last[s] >= stage.stop]
        source = tuple(s for s in inputs if program.storages[s].producer != FORWARD_ONLY)
        forward = (
            Op("", Side.FORWARD, 0.0, 0, (), source, no_recompute=Reason.OUTPUT),
            *(program.ops[o] for o in ops),
        )
        returned = Op("", Side.BACKWARD, 0.0, 0, tuple(leaving), ())
        return BlockProgram(
            Program(
                tuple(_renamed(op, index) for op in forward),
                tuple(_renamed(op, index) for op in (*backward, returned)),
                tuple(self._storage(s, writer.get(s, 0)) for s in storages),
                tuple(index[s] for s in entering),
            ),
            storages,
            ops,
            stage,
            self.held_bytes
            + self._gradients[stage.start]
            - sum(program.storages[s].bytes for s in entering),
        )

    @cached_property
    def held_bytes(self) -> int:
        """Bytes that are held throughout."""
        return sum(self.blocks.program.storages[s].bytes for s in self.blocks.carried)

    def bytes_before(self, block: int) -> int:
        """Return the bytes live when a block's stage begins, but for what is held for blocks."""
        return self.held_bytes + self._gradients[self.blocks.stages[block].start]

    def _storage(self, s: int, producer: int) -> Storage:
        """Return a storage of a block's program, without bytes if it is held throughout."""
        storage = self.blocks.program.storages[s]
        if storage.producer < 0:
            producer = storage.producer
        is_carried = s in self.blocks.carried
        return replace(
            storage,
            name="",
            bytes=0 if is_carried else storage.bytes,
            producer=producer,
            is_output=False,
            held_to=-1,
            is_savable=storage.is_savable or storage.is_output or producer == 0,
            sized=None,
        )

    @cached_property
    def _gradients(self) -> list[int]:
        """Bytes of gradients live before each backward op."""
        return backward_own_profile(self.blocks.program)[0]

    @cached_property
    def _written(self) -> dict[int, int]:
        """Backward op that writes each gradient, -1 if it comes in."""
        program = self.blocks.program
        written = {s: j for j, op in enumerate(program.backward) for s in op.writes}
        return written | dict.fromkeys(program.tangents, -1)

    @cached_property
    def _last(self) -> dict[int, int]:
        """Last backward op that accesses each gradient."""
        return {
            s: j
            for j, op in enumerate(self.blocks.program.backward)
            for s in (*op.writes, *op.reads)
        }


def _renamed(op: Op, index: dict[int, int]) -> Op:
    """Return an op without a name, and with the storages of a block's program."""

    def of(storages: Iterable[int]) -> tuple[int, ...]:
        return tuple(index[s] for s in storages)

    return replace(
        op,
        name="",
        reads=of(op.reads),
        writes=of(op.writes),
        takes=of(s for s in op.takes if s in index),
        rng_state=None if op.rng_state is None else index[op.rng_state],
    )
