"""Program: a joint graph as planning sees it, forward ops and backward ops in joint order that read and write storages by index.

It knows no ``fx.Node``, so planning on it is deterministic and easy to test.
"""

from __future__ import annotations

import enum
import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from fxckpt.reason import Reason

FORWARD_ONLY = -1
IN_BACKWARD = -2

IntArray = npt.NDArray[np.integer[Any]]
FloatArray = npt.NDArray[np.float64]
BoolArray = npt.NDArray[np.bool_]


class Side(enum.Enum):
    """Where an op runs in the uncheckpointed step, and where else it may."""

    FORWARD = enum.auto()
    """The forward outputs (or an effect) need it."""
    EITHER = enum.auto()
    """Only the backward needs it, but it reads no tangent."""
    BACKWARD = enum.auto()
    """It reads a tangent, or was traced in the backward and may not move."""


@dataclass(frozen=True)
class Storage:
    """Memory filled by one op. ``name`` is the node that owns it: what gets saved."""

    name: str
    bytes: int
    producer: int
    """Index of the op that fills it; ``FORWARD_ONLY`` for a generator state, ``IN_BACKWARD`` for the backward's own."""
    is_output: bool = False
    """A forward output holds it: it stays until the end whatever is planned."""
    is_savable: bool = True


@dataclass(frozen=True)
class Op:
    """One unit of work. ``reads`` and ``writes`` are storage indices; inputs of the graph are free and not listed."""

    name: str
    side: Side
    seconds: float
    flops: int
    reads: tuple[int, ...]
    writes: tuple[int, ...]
    no_recompute: Reason | None = None
    """Why it must not run in the backward again; None if it may."""
    rng_state: int | None = None
    """Storage of the generator state a second run needs."""
    workspace_bytes: int = 0
    """What the kernel allocates and frees before it returns."""

    @cached_property
    def needs(self) -> tuple[int, ...]:
        """What a second run reads, the generator state included."""
        return self.reads if self.rng_state is None else (*self.reads, self.rng_state)


@dataclass(frozen=True)
class Program:
    """A joint graph as planning sees it. The last backward op is the graph's output and reads what is returned."""

    ops: tuple[Op, ...]
    backward: tuple[Op, ...]
    storages: tuple[Storage, ...]
    tangents: tuple[int, ...]
    """Storages of the incoming gradients: there when the backward begins, whatever is planned. Each is read by some backward op."""

    @cached_property
    def tangent_bytes(self) -> int:
        """Bytes of the incoming gradients."""
        return sum(self.storages[s].bytes for s in self.tangents)

    @cached_property
    def forward_reads(self) -> tuple[tuple[int, ...], ...]:
        """Per backward op: the forward values it reads."""
        storages = self.storages
        return tuple(
            tuple([s for s in op.reads if storages[s].producer != IN_BACKWARD])
            for op in self.backward
        )

    @cached_property
    def always_forward(self) -> dict[int, None]:
        """The ops that the forward runs whatever is saved, in order."""
        return dict.fromkeys(i for i, op in enumerate(self.ops) if op.side is Side.FORWARD)

    @cached_property
    def producers(self) -> tuple[int, ...]:
        """Per storage: :attr:`Storage.producer`."""
        return tuple([s.producer for s in self.storages])

    @cached_property
    def tables(self) -> Tables:
        """The same as arrays."""
        return Tables.of(self)

    @cached_property
    def step_seconds(self) -> float:
        """Seconds of the uncheckpointed step."""
        return sum(op.seconds for op in self.ops) + sum(op.seconds for op in self.backward)

    @cached_property
    def step_flops(self) -> int:
        """FLOPs of the uncheckpointed step."""
        return sum(op.flops for op in self.ops) + sum(op.flops for op in self.backward)


@dataclass(frozen=True, eq=False)
class Ragged:
    """A list of int lists as two arrays: list i is ``items[starts[i] : starts[i + 1]]``."""

    items: IntArray
    starts: IntArray

    @classmethod
    def of(cls, rows: Sequence[Sequence[int]]) -> Ragged:
        """Lay out ``rows``."""
        return cls(
            np.asarray(list(itertools.chain.from_iterable(rows)), dtype=np.int64),
            np.concatenate(([0], np.cumsum([len(row) for row in rows], dtype=np.int64))),
        )

    def rows(self, chosen: IntArray) -> tuple[IntArray, IntArray]:
        """Return the items of the chosen lists, one list after the other, and for each item the position in ``chosen`` of its list."""
        first, length = self.starts[chosen], self.starts[chosen + 1] - self.starts[chosen]
        position = np.repeat(np.arange(len(chosen)), length)
        begin = np.cumsum(length) - length
        return self.items[np.arange(len(position)) - begin[position] + first[position]], position


@dataclass(frozen=True, eq=False)
class Tables:
    """A program as arrays. Ops are numbered forward first, then backward; bytes and FLOPs are int64, seconds float64."""

    reads: Ragged
    """Per op: storages it reads."""
    needs: Ragged
    """Per forward op: what a second run reads, the generator state included."""
    writes: Ragged
    seconds: FloatArray
    flops: IntArray
    workspace_bytes: IntArray
    replay_bytes: IntArray
    """Per forward op: what a second run needs beside its workspace, the generator's present state set aside."""
    written_bytes: IntArray
    rng_state: IntArray
    """Per forward op: its generator state's storage, or -1."""
    is_forward: BoolArray
    """Per forward op: the forward runs it whatever is saved."""
    is_either: BoolArray
    is_rerunnable: BoolArray
    bytes: IntArray
    """Per storage."""
    producer: IntArray
    is_output: BoolArray
    is_savable: BoolArray

    @classmethod
    def of(cls, program: Program) -> Tables:
        """Lay ``program`` out."""
        ops, storages = program.ops, program.storages
        both = (*ops, *program.backward)
        nbytes = np.asarray([s.bytes for s in storages], dtype=np.int64)
        state = np.asarray(
            [-1 if op.rng_state is None else op.rng_state for op in ops], dtype=np.int64
        )
        return cls(
            reads=Ragged.of([op.reads for op in both]),
            needs=Ragged.of([op.needs for op in ops]),
            writes=Ragged.of([op.writes for op in both]),
            seconds=np.asarray([op.seconds for op in both], dtype=np.float64),
            flops=np.asarray([op.flops for op in both], dtype=np.int64),
            workspace_bytes=np.asarray([op.workspace_bytes for op in both], dtype=np.int64),
            replay_bytes=np.where(state >= 0, np.append(nbytes, 0)[state], 0),
            written_bytes=np.asarray(
                [sum(storages[s].bytes for s in op.writes) for op in both], dtype=np.int64
            ),
            rng_state=state,
            is_forward=_mask(op.side is Side.FORWARD for op in ops),
            is_either=_mask(op.side is Side.EITHER for op in ops),
            is_rerunnable=_mask(op.no_recompute is None for op in ops),
            bytes=nbytes,
            producer=np.asarray(program.producers, dtype=np.int64),
            is_output=_mask(s.is_output for s in storages),
            is_savable=_mask(s.is_savable for s in storages),
        )


def _mask(values: Iterable[bool]) -> BoolArray:
    return np.asarray(list(values), dtype=bool)
