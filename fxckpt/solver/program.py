"""Program: the joint graph as plain data, ops in joint order that access storages by index.

A program holds no ``fx.Node``, so that planning is deterministic and easy to test.
"""

from __future__ import annotations

import enum
import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from fxckpt.reason import Reason

FORWARD_ONLY = -1
"""Producer of a generator state."""
IN_BACKWARD = -2
"""Producer of a storage that the backward writes, or of an incoming gradient."""

IntArray = npt.NDArray[np.integer[Any]]
FloatArray = npt.NDArray[np.float64]
BoolArray = npt.NDArray[np.bool_]


class Side(enum.Enum):
    """The half of the uncheckpointed step that an op runs in."""

    FORWARD = enum.auto()
    """A forward output or a side effect depends on the op."""
    EITHER = enum.auto()
    """Only the backward depends on the op, which reads no tangent: either half may run it."""
    BACKWARD = enum.auto()
    """The op reads a tangent, or was traced in the backward and may not move."""


class SizedBytes(Protocol):
    """Bytes of a storage as a function of the sizes of the graph's inputs."""

    def at(self, sizes: Mapping[str, int]) -> int:
        """Return the bytes at these values of the symbols."""
        ...


@dataclass(frozen=True)
class Storage:
    """Memory written by one op."""

    name: str
    """The node that owns the storage, and is saved with it."""
    bytes: int
    producer: int
    """Index of the forward op that writes the storage.

    ``FORWARD_ONLY`` for a generator state, ``IN_BACKWARD`` for a storage of the backward.
    """
    is_output: bool = False
    """Whether a forward output holds the storage, which is then live to the end under any plan."""
    is_savable: bool = True
    """Whether a plan may save the storage."""
    held_to: int = -1
    """Index of the last forward op during which the storage is live under any plan.

    It is -1 where only readers and plans hold the storage. A generator state has it too.
    """
    sized: SizedBytes | None = field(default=None, compare=False, repr=False)
    """Bytes at other sizes of the graph's inputs; None where they are the same."""


@dataclass(frozen=True)
class Op:
    """One operation of the joint graph."""

    name: str
    side: Side
    seconds: float
    flops: int
    reads: tuple[int, ...]
    """Indices of the storages read; inputs of the graph are free and not listed."""
    writes: tuple[int, ...]
    """Indices of the storages written."""
    no_recompute: Reason | None = None
    """The reason why the op must not be recomputed, or None if it may."""
    rng_state: int | None = None
    """Storage of the generator state that a recompute reads."""
    workspace_bytes: int = 0
    """Bytes that the kernel allocates and frees before it returns."""
    takes: tuple[int, ...] = ()
    """Storages read whose memory the op may write its one result into, if it is their last access.

    Each has the bytes of the result. A version that the forward saved, that the user holds or that
    came in as a gradient is never taken.
    """

    @cached_property
    def needs(self) -> tuple[int, ...]:
        """Storages that a recompute reads, the generator state included."""
        return self.reads if self.rng_state is None else (*self.reads, self.rng_state)


@dataclass(frozen=True)
class SavedLimit:
    """A limit on the bytes of some storages that the forward saves."""

    name: str
    """The region of the model that the limit is of, for reports."""
    storages: tuple[int, ...]
    """Storages that count; the user holds forward outputs in any case, and they never count."""
    bytes: int
    budget: str = ""
    """The budget that the limit follows from."""
    least_bytes: int = 0
    """Fewest bytes that can be saved of the storages."""
    default_bytes: int = 0
    """Bytes that are saved of the storages without a budget."""


@dataclass(frozen=True)
class Link:
    """A link to memory off the device; each way copies one storage after another."""

    out_bytes_per_second: float
    """Rate from the device."""
    in_bytes_per_second: float
    """Rate to the device, which does not slow the other way."""
    limit_bytes: int
    """Most bytes that may be away at once."""
    storages: frozenset[int]
    """Storages that may be sent away if they are saved."""
    required: frozenset[int] = frozenset()
    """Those of them that must be sent away if they are saved."""


@dataclass(frozen=True)
class Program:
    """A joint graph as plain data."""

    ops: tuple[Op, ...]
    """Ops that the forward may run."""
    backward: tuple[Op, ...]
    """Ops of the backward; the last one is the graph's output, which reads the returned values."""
    storages: tuple[Storage, ...]
    tangents: tuple[int, ...]
    """Storages of the incoming gradients, live when the backward begins.

    Each is read by some backward op.
    """
    limits: tuple[SavedLimit, ...] = ()
    """Limits on what a plan saves, beside the limit on its peak."""
    link: Link | None = None
    """Link that saved storages may be sent away by; None if they stay on the device."""

    def at(self, sizes: Mapping[str, int]) -> Program:
        """Return the program at other values of the symbols in the sizes of the graph's inputs.

        Seconds stay those of the sizes that it was made for. Workspace is at least that, and grows
        in proportion to what the op reads or writes.
        """
        found: dict[SizedBytes, int] = {}
        storages = []
        for storage in self.storages:
            if (sized := storage.sized) is not None:
                if sized not in found:
                    found[sized] = sized.at(sizes)
                storage = replace(storage, bytes=found[sized])
            storages.append(storage)

        def grown(op: Op) -> Op:
            growth = max(
                (
                    storages[s].bytes / max(1, self.storages[s].bytes)
                    for s in (*op.reads, *op.writes)
                ),
                default=1.0,
            )
            if not op.workspace_bytes or growth <= 1:
                return op
            return replace(op, workspace_bytes=math.ceil(op.workspace_bytes * growth))

        return replace(
            self,
            ops=tuple(map(grown, self.ops)),
            backward=tuple(map(grown, self.backward)),
            storages=tuple(storages),
        )

    @cached_property
    def tangent_bytes(self) -> int:
        """Bytes of the incoming gradients."""
        return sum(self.storages[s].bytes for s in self.tangents)

    @cached_property
    def forward_reads(self) -> tuple[tuple[int, ...], ...]:
        """Forward values read by each backward op."""
        storages = self.storages
        return tuple(
            tuple([s for s in op.reads if storages[s].producer != IN_BACKWARD])
            for op in self.backward
        )

    @cached_property
    def forward_takes(self) -> tuple[bool, ...]:
        """Whether each op, of the forward and then of the backward, may take a forward value."""
        return tuple(
            any(self.storages[s].producer != IN_BACKWARD for s in op.takes)
            for op in (*self.ops, *self.backward)
        )

    @cached_property
    def always_forward(self) -> dict[int, None]:
        """Ops that the forward runs under any plan, in order."""
        return dict.fromkeys(i for i, op in enumerate(self.ops) if op.side is Side.FORWARD)

    @cached_property
    def outputs(self) -> frozenset[int]:
        """Storages of forward outputs, which are read where the forward left them."""
        return frozenset(s for s, storage in enumerate(self.storages) if storage.is_output)

    @cached_property
    def outputs_read(self) -> frozenset[int]:
        """Storages of forward outputs that the backward's own ops read."""
        return self.outputs.intersection(itertools.chain.from_iterable(self.forward_reads))

    @cached_property
    def producers(self) -> tuple[int, ...]:
        """:attr:`Storage.producer` of each storage."""
        return tuple([s.producer for s in self.storages])

    @cached_property
    def tables(self) -> Tables:
        """The program as arrays."""
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
    """A ragged array of ints (CSR form): row i is ``items[starts[i] : starts[i + 1]]``."""

    items: IntArray
    starts: IntArray

    @classmethod
    def of(cls, rows: Sequence[Sequence[int]]) -> Ragged:
        """Return ``rows`` as a ragged array."""
        return cls(
            np.asarray(list(itertools.chain.from_iterable(rows)), dtype=np.int64),
            np.concatenate(([0], np.cumsum([len(row) for row in rows], dtype=np.int64))),
        )

    def rows(self, chosen: IntArray) -> tuple[IntArray, IntArray]:
        """Return the items of the chosen rows, and the position in ``chosen`` of each item."""
        first, length = self.starts[chosen], self.starts[chosen + 1] - self.starts[chosen]
        position = np.repeat(np.arange(len(chosen)), length)
        begin = np.cumsum(length) - length
        return self.items[np.arange(len(position)) - begin[position] + first[position]], position


@dataclass(frozen=True, eq=False)
class Tables:
    """A program as arrays, in which forward ops come before backward ops."""

    reads: Ragged
    """Storages that each op reads."""
    needs: Ragged
    """Storages that a recompute of each forward op reads, the generator state included."""
    writes: Ragged
    """Storages that each op writes."""
    takes: Ragged
    """:attr:`Op.takes` of each op."""
    seconds: FloatArray
    """Seconds of each op."""
    flops: IntArray
    """FLOPs of each op."""
    workspace_bytes: IntArray
    """Workspace of each op."""
    state_bytes: IntArray
    """Bytes of the current generator state, which a recompute of each forward op puts aside."""
    written_bytes: IntArray
    """Bytes that each op writes."""
    rng_state: IntArray
    """Storage of each forward op's generator state, or -1."""
    is_forward: BoolArray
    """Whether the forward runs each forward op under any plan."""
    is_either: BoolArray
    """Whether either half may run each forward op."""
    is_recomputable: BoolArray
    """Whether each forward op may be recomputed."""
    bytes: IntArray
    """Bytes of each storage."""
    producer: IntArray
    """:attr:`Storage.producer` of each storage."""
    is_output: BoolArray
    """:attr:`Storage.is_output` of each storage."""
    is_savable: BoolArray
    """:attr:`Storage.is_savable` of each storage."""
    held_to: IntArray
    """:attr:`Storage.held_to` of each storage."""

    @classmethod
    def of(cls, program: Program) -> Tables:
        """Return the arrays of ``program``."""
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
            takes=Ragged.of([op.takes for op in both]),
            seconds=np.asarray([op.seconds for op in both], dtype=np.float64),
            flops=np.asarray([op.flops for op in both], dtype=np.int64),
            workspace_bytes=np.asarray([op.workspace_bytes for op in both], dtype=np.int64),
            state_bytes=np.where(state >= 0, np.append(nbytes, 0)[state], 0),
            written_bytes=np.asarray(
                [sum(storages[s].bytes for s in op.writes) for op in both], dtype=np.int64
            ),
            rng_state=state,
            is_forward=_mask(op.side is Side.FORWARD for op in ops),
            is_either=_mask(op.side is Side.EITHER for op in ops),
            is_recomputable=_mask(op.no_recompute is None for op in ops),
            bytes=nbytes,
            producer=np.asarray(program.producers, dtype=np.int64),
            is_output=_mask(s.is_output for s in storages),
            is_savable=_mask(s.is_savable for s in storages),
            held_to=np.asarray([s.held_to for s in storages], dtype=np.int64),
        )


def _mask(values: Iterable[bool]) -> BoolArray:
    """Return ``values`` as an array."""
    return np.asarray(list(values), dtype=bool)
