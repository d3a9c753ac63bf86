"""The memory of a step as rows by kind and module, and as text."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

from fxckpt.budgets import format_bytes
from fxckpt.process_memory.tracker import TrackedStorage
from fxckpt.utils.tables import Column, Table

BEFORE = "held before the step"
"""Kind of bytes in use before the step that are neither of the model nor of the optimizer."""
KERNELS = "kernels' own memory"
"""Kind of bytes that the allocator counts and no tensor holds."""
SHOWN = 20
"""Rows of a printed report; the others are counted."""


@dataclass(frozen=True)
class MemoryRow:
    """Bytes of one kind in one module, or in several that are alike."""

    kind: str
    """Purpose of the bytes."""
    module: str
    """Path of the module; ``*`` stands for the numbers of layers that are alike."""
    layers: int
    """Number of modules that are folded into the row."""
    tensors: int
    """Number of storages."""
    bytes: int
    """Their bytes."""


@dataclass(frozen=True)
class OutOfMemory:
    """Where a step ran out of memory."""

    block: str
    """Path of the module that ran; empty outside of all."""
    op: str
    """Op that failed."""
    phase: str
    """``"forward"`` or ``"backward"``, recomputes included; ``"step"`` where it is not known."""
    level: str
    """How the block is checkpointed: its level, or that it is eager code."""
    held_bytes: int
    """Bytes in use when the op failed."""
    fitting_budget: int
    """Most bytes that the step held beyond those before it: a budget that fits."""

    def __str__(self) -> str:
        where = self.block or "outside of all modules"
        return (
            f"out of memory: {where} in the {self.phase} ({self.op}; {self.level}), with "
            f"{format_bytes(self.held_bytes)} in use. A budget of "
            f"{format_bytes(self.fitting_budget)} ({self.fitting_budget}) would have fitted: "
            f'torch.compile(model, backend="fxckpt", options={{"budget": {self.fitting_budget}}}).'
        )


@dataclass(frozen=True)
class MemoryReport:
    """The memory of a step at its peak, or when it ran out. Printing shows a table."""

    rows: tuple[MemoryRow, ...]
    """Bytes by kind and module, the largest first."""
    peak_bytes: int
    """Bytes in use at the peak by the device's allocator, all of the process."""
    start_bytes: int
    """Bytes in use before the step."""
    fragmented_bytes: int | None
    """Bytes that the device's allocator keeps in split blocks that nobody uses; None on the CPU."""
    sees: str
    """Allocations that the allocator's figure counts."""
    out_of_memory: OutOfMemory | None = None
    """Where the step ran out of memory; None if it did not."""

    def kinds(self) -> dict[str, int]:
        """Return the bytes of each kind; their sum is the peak."""
        found: defaultdict[str, int] = defaultdict(int)
        for row in self.rows:
            found[row.kind] += row.bytes
        return dict(found)

    @property
    def attributed_bytes(self) -> int:
        """Bytes at the peak that tensors hold: all but the kernels' own memory."""
        return sum(row.bytes for row in self.rows if row.kind != KERNELS)

    def table(self) -> Table:
        """Return the rows as a table with exports."""
        columns = (
            Column("kind", "for"),
            Column("module", "module"),
            Column("layers", "layers", is_number=True),
            Column("tensors", "tensors", is_number=True),
            Column("bytes", "bytes", format_bytes, is_number=True),
        )
        rows = ((r.kind, r.module, r.layers, r.tensors, r.bytes) for r in self.rows)
        return Table(columns, tuple(rows))

    def __str__(self) -> str:
        at = "when memory ran out" if self.out_of_memory else "at the peak"
        lines = [f"{format_bytes(self.peak_bytes)} in use {at}"]
        for kind, size in sorted(self.kinds().items(), key=lambda item: -item[1]):
            share = 100 * size / self.peak_bytes if self.peak_bytes else 0
            lines.append(f"  {format_bytes(size):>10}  {share:3.0f} %  {kind}")
        if self.fragmented_bytes is not None:
            lines.append(f"  {format_bytes(self.fragmented_bytes):>10}  more is fragmented")
        hidden = len(self.rows) - SHOWN
        lines += ["", str(self.table().top(SHOWN))]
        lines += [f"... and {hidden} more rows"] if hidden > 0 else []
        lines += ["", str(self.out_of_memory)] if self.out_of_memory else []
        return "\n".join(lines)


def rows_of(storages: Iterable[TrackedStorage]) -> tuple[MemoryRow, ...]:
    """Return storages summed by kind and module, with layers that are alike in one row.

    Modules are alike if their paths differ in numbers alone.
    """
    modules: defaultdict[tuple[str, str], set[str]] = defaultdict(set)
    sizes: defaultdict[tuple[str, str], list[int]] = defaultdict(list)
    for storage in storages:
        key = storage.kind, fold(storage.module)
        modules[key].add(storage.module)
        sizes[key].append(storage.bytes)
    rows = (
        MemoryRow(
            kind,
            module if len(modules[kind, module]) > 1 else next(iter(modules[kind, module])),
            len(modules[kind, module]),
            len(found),
            sum(found),
        )
        for (kind, module), found in sizes.items()
    )
    return tuple(sorted(rows, key=lambda row: -row.bytes))


def fold(module: str) -> str:
    """Return a module's path with a star for each number.

    >>> fold("transformer.h.11.attn")
    'transformer.h.*.attn'
    """
    return re.sub(r"(?<=\.)\d+(?=\.|$)|^\d+(?=\.|$)", "*", module)
