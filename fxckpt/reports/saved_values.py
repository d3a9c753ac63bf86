"""Saved values of a plan, as JAX prints residuals."""

from __future__ import annotations

from dataclasses import dataclass

from fxckpt.budget import format_bytes
from fxckpt.utils.tables import Column, Table
from fxckpt.utils.units import shorten


@dataclass(frozen=True)
class SavedValue:
    """One thing the backward reads. ``bytes`` are 0 for an input, which is not the step's memory."""

    type: str
    """dtype and shape, as JAX writes them: ``f32[4,256]``."""
    bytes: int
    origin: str
    source: str
    """``file.py:12``, where the trace recorded it."""
    module: str


@dataclass(frozen=True)
class SavedValues:
    """What the backward gets from the forward; printed, one line a value."""

    values: tuple[SavedValue, ...]

    def table(self) -> Table:
        """Return the values as a table."""
        columns = (
            Column("type", "type"),
            Column("bytes", "bytes", lambda v: format_bytes(v) if v else "", is_number=True),
            Column("origin", "origin"),
            Column("source", "source", lambda v: shorten(v, 24)),
            Column("module", "module", lambda v: shorten(v, 30)),
        )
        return Table(
            columns, tuple((v.type, v.bytes, v.origin, v.source, v.module) for v in self.values)
        )

    def __str__(self) -> str:
        width = max((len(v.type) for v in self.values), default=0)
        lines = []
        for v in self.values:
            where = f" from {v.source}" if v.source else ""
            module = f" ({v.module})" if v.module else ""
            size = format_bytes(v.bytes) if v.bytes else ""
            lines.append(f"{v.type:<{width}}  {size:>10}  {v.origin}{where}{module}")
        return "\n".join(lines)
