"""The difference between two plans of one graph."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from tabulate import tabulate

from fxckpt.budgets import format_bytes
from fxckpt.errors import InvalidOption
from fxckpt.plans.types import Plan, Row
from fxckpt.reports.narrate import Narrator
from fxckpt.utils.tables import Column, Table
from fxckpt.utils.units import format_seconds, shorten


@dataclass(frozen=True)
class Difference:
    """The changes from one plan to another plan of the same graph, made by ``Plan.diff``."""

    before: Plan
    """The plan compared against."""
    after: Plan
    """The plan that is compared."""
    rows: tuple[tuple[Row | None, Row | None], ...]
    """The (before, after) rows of values whose decision or number of runs changes, largest first.

    None stands for a value that the backward of that plan does not need.
    """

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
        narrator = Narrator(self.after)

        def cells(before: Row | None, after: Row | None) -> tuple[Any, ...]:
            row = after or before
            assert row is not None
            why = narrator.why(after) if after is not None else "the backward does not need it"
            decisions = _decision_text(before), _decision_text(after)
            return (row.name, row.op, row.module, row.bytes, *decisions, why)

        return Table(columns, tuple(cells(*pair) for pair in self.rows))

    def summary(self) -> list[tuple[str, str]]:
        """Return the figures before and after as (name, text)."""
        a, b = self.before, self.after
        seconds = (format_seconds(plan.extra_seconds) for plan in (a, b))
        return [
            ("peak", _bytes_change(a.peak_bytes, b.peak_bytes)),
            ("saved", _bytes_change(a.saved_bytes, b.saved_bytes)),
            ("extra time", " -> ".join(seconds)),
            ("changed", f"{len(self.rows)} values"),
        ]

    def top(self, count: int) -> Difference:
        """Return the difference with its ``count`` largest changes."""
        return replace(self, rows=self.rows[: max(0, count)])

    def __str__(self) -> str:
        figures = tabulate(self.summary(), tablefmt="plain")
        return f"{figures}\n\n{self.table()}" if self.rows else f"{figures}\n\nthe same decisions"


def diff(before: Plan, after: Plan) -> Difference:
    """Return the changes from ``before`` to ``after``.

    Raises :class:`fxckpt.InvalidOption` if ``after`` is not a plan of the same graph.
    """
    if not isinstance(after, Plan):
        raise InvalidOption(
            f"diff({after!r}): that is no plan. "
            "Give another plan of the same graph: fxckpt.plan(model, *inputs, budget=...)."
        )
    if before.graph != after.graph:
        raise InvalidOption(
            "these two plans are of different graphs, so their values cannot be compared. "
            "Plan the same model with the same input sizes twice."
        )
    # A plan read from JSON carries no snapshot; the other plan's is that of the same graph.
    snapshot = before.snapshot or after.snapshot
    before, after = replace(before, snapshot=snapshot), replace(after, snapshot=snapshot)
    old, new = ({row.name: row for row in plan.rows} for plan in (before, after))
    changed = [
        (old.get(n), new.get(n))
        for n in dict.fromkeys((*old, *new))
        if _decision_text(old.get(n)) != _decision_text(new.get(n))
    ]
    return Difference(before, after, tuple(sorted(changed, key=lambda pair: -_bytes(*pair))))


def _bytes(before: Row | None, after: Row | None) -> int:
    return max(row.bytes for row in (before, after) if row is not None)


def _decision_text(row: Row | None) -> str:
    if row is None:
        return "not needed"
    return row.decision.value if row.runs < 2 else f"{row.decision.value} x{row.runs}"


def _bytes_change(before: int, after: int) -> str:
    """Return ``"8.0 KiB -> 6.0 KiB (-2.0 KiB)"``."""
    sign = "-" if after < before else "+"
    change = f"{sign}{format_bytes(abs(after - before))}"
    return f"{format_bytes(before)} -> {format_bytes(after)} ({change})"
