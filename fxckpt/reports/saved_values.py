"""The saved values of a plan, one line a value, in the format of JAX's saved residuals."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from fxckpt.budgets import format_bytes
from fxckpt.plans.snapshot import NodeLabel
from fxckpt.plans.types import Row
from fxckpt.reason import Decision, Reason
from fxckpt.utils.tables import Column, Table
from fxckpt.utils.units import format_shape, shorten


@dataclass(frozen=True)
class SavedValue:
    """A forward value or graph input that the backward reads."""

    type: str
    """The dtype and shape in JAX's notation: ``f32[4,256]``."""
    bytes: int
    """The bytes of its storage; 0 for a graph input, which is not memory of the step."""
    origin: str
    """The op that computes it, or the name of the input."""
    source: str
    """The line of the model that computes it: ``file.py:12``."""
    module: str
    """The path of the module that computes it."""


@dataclass(frozen=True)
class SavedValues:
    """The values that the backward receives from the forward; printed one line a value."""

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
            source = f" from {v.source}" if v.source else ""
            module = f" ({v.module})" if v.module else ""
            size = format_bytes(v.bytes) if v.bytes else ""
            lines.append(f"{v.type:<{width}}  {size:>10}  {v.origin}{source}{module}")
        return "\n".join(lines)


def list_saved_values(rows: Iterable[Row], inputs: Iterable[NodeLabel]) -> SavedValues:
    """Return the saved values among ``rows``, largest first, followed by the graph inputs."""
    saved = sorted(
        (r for r in rows if r.decision is not Decision.RECOMPUTED), key=lambda r: -r.bytes
    )
    values = [
        SavedValue(format_shape(r.dtype, r.shape), r.bytes, _origin(r), r.source, r.module)
        for r in saved
    ]
    for i in inputs:
        origin = f"from the input {i.name}"
        values.append(SavedValue(format_shape(i.dtype, i.shape), 0, origin, i.source, i.module))
    return SavedValues(tuple(values))


def _origin(row: Row) -> str:
    if row.reason is Reason.RNG_STATE:
        return f"generator state of {row.op}"
    return f"output of {row.op}"
