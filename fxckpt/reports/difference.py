"""Difference between two plans of one graph."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from tabulate import tabulate

from fxckpt.budget import format_bytes
from fxckpt.errors import InvalidOption
from fxckpt.plans.types import Plan, Row
from fxckpt.reports.narrate import Narrator
from fxckpt.utils.tables import Column, Table
from fxckpt.utils.units import format_seconds, shorten


@dataclass(frozen=True)
class Difference:
    """What changes from one plan to another of the same graph."""

    before: Plan
    after: Plan
    rows: tuple[tuple[Row | None, Row | None], ...]
    """Values that are decided otherwise, or run another number of times, the largest first. None: the backward does not need it."""

    def table(self) -> Table:
        """Return the changes as a table."""
        columns = (
            Column("name", "value", lambda v: shorten(v, 26)),
            Column("op", "op", lambda v: shorten(v, 22)),
            Column("module", "module", lambda v: shorten(v, 30)),
            Column("bytes", "bytes", format_bytes, is_number=True),
            Column("before", "before"),
            Column("after", "after"),
            Column("why", "why now", lambda v: shorten(v, 110)),
        )
        words = Narrator(self.after)

        def cells(before: Row | None, after: Row | None) -> tuple[Any, ...]:
            row = after or before
            assert row is not None
            why = words.why(after) if after is not None else "the backward does not need it"
            return (row.name, row.op, row.module, row.bytes, _said(before), _said(after), why)

        return Table(columns, tuple(cells(*pair) for pair in self.rows))

    def summary(self) -> list[tuple[str, str]]:
        """Return the figures that change as (name, text)."""
        a, b = self.before, self.after
        return [
            (
                "peak",
                f"{format_bytes(a.peak_bytes)} -> {format_bytes(b.peak_bytes)} ({_signed(b.peak_bytes - a.peak_bytes)})",
            ),
            (
                "saved",
                f"{format_bytes(a.saved_bytes)} -> {format_bytes(b.saved_bytes)} ({_signed(b.saved_bytes - a.saved_bytes)})",
            ),
            (
                "extra time",
                f"{format_seconds(a.recompute_seconds)} -> {format_seconds(b.recompute_seconds)}",
            ),
            ("changed", f"{len(self.rows)} values"),
        ]

    def top(self, count: int) -> Difference:
        """Return the difference with its ``count`` largest changes."""
        return replace(self, rows=self.rows[: max(0, count)])

    def __str__(self) -> str:
        figures = tabulate(self.summary(), tablefmt="plain")
        return f"{figures}\n\n{self.table()}" if self.rows else f"{figures}\n\nthe same decisions"


def diff(before: Plan, after: Plan) -> Difference:
    """Return what changes from one plan to another. Raises :class:`InvalidOption` for what is no plan, and for plans of different graphs."""
    if not isinstance(after, Plan):
        raise InvalidOption(
            f"diff({after!r}): that is no plan. Give another plan of the same graph: fxckpt.plan(model, *inputs, budget=...)."
        )
    if before.graph != after.graph:
        raise InvalidOption(
            "these two plans are of different graphs, so their values cannot be compared. Plan the same model with the same input sizes twice."
        )
    # A plan that was stored comes without its step; that of the other is the same.
    step = before.step or after.step
    before, after = replace(before, step=step), replace(after, step=step)
    old, new = ({row.name: row for row in plan.rows} for plan in (before, after))
    changed = [
        (old.get(n), new.get(n))
        for n in dict.fromkeys((*old, *new))
        if _said(old.get(n)) != _said(new.get(n))
    ]
    return Difference(before, after, tuple(sorted(changed, key=lambda pair: -_bytes(*pair))))


def _bytes(before: Row | None, after: Row | None) -> int:
    return max(row.bytes for row in (before, after) if row is not None)


def _said(row: Row | None) -> str:
    if row is None:
        return "not needed"
    return row.decision.value if row.runs < 2 else f"{row.decision.value} x{row.runs}"


def _signed(nbytes: int) -> str:
    return f"{'-' if nbytes < 0 else '+'}{format_bytes(abs(nbytes))}"
