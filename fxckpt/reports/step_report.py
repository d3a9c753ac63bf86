"""Report of a step: its calls by graph and level, and its predicted and measured peak."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from fxckpt.budgets import format_bytes
from fxckpt.utils.tables import Column, Table
from fxckpt.utils.units import format_seconds


@dataclass(frozen=True)
class StepRow:
    """The calls of one graph at one level."""

    graph: int
    """Number of the graph, from 1."""
    source: str
    """Line of the user's code that called it."""
    calls: int
    """Number of calls in the step."""
    level: int
    """Number of the level, from 1, the fastest first."""
    levels: int
    """Number of levels of the graph."""
    held_bytes: int
    """Bytes that one call holds from its forward to its backward."""
    forward_bytes: int
    """Peak of one forward beyond what was allocated when it began."""
    backward_bytes: int
    """Peak of one backward, the held bytes included."""
    extra_seconds: float
    """Seconds of recompute, and of waits for copies, that one call takes, by the cost model."""
    away_bytes: int = 0
    """Bytes that one call sends off the device."""


COLUMNS = (
    Column("graph", "graph", is_number=True),
    Column("source", "called at"),
    Column("calls", "calls", is_number=True),
    Column("level", "level", is_number=True),
    Column("levels", "of", is_number=True),
    Column("held_bytes", "held", format_bytes, is_number=True),
    Column("forward_bytes", "forward peak", format_bytes, is_number=True),
    Column("backward_bytes", "backward peak", format_bytes, is_number=True),
    Column("extra_seconds", "recompute", format_seconds, is_number=True),
)
AWAY = Column("away_bytes", "sent", format_bytes, is_number=True)
"""Column of bytes sent off the device, which people see where there are any."""


def table_of(rows: Sequence[StepRow]) -> Table:
    """Return the rows of a step as a table with exports."""
    columns = (*COLUMNS, replace(AWAY, is_brief=any(row.away_bytes for row in rows)))
    return Table(
        columns, tuple(tuple(getattr(row, column.name) for column in columns) for row in rows)
    )


@dataclass(frozen=True)
class StepReport:
    """The latest step that ended; printed, a table of its calls and a summary."""

    rows: tuple[StepRow, ...]
    budget_bytes: int
    predicted_peak_bytes: int
    """Peak of the step at these levels, from planned bytes and the outside bytes measured."""
    measured_peak_bytes: int
    """Most bytes allocated beyond those before the step, or a bound where that was not seen."""
    is_bound: bool
    """Whether the measured peak is an upper bound, as an accelerator's own peak was above it."""
    peak_at: str
    """Part of the step that reached the measured peak."""
    outside_bytes: int
    """Most bytes allocated outside of the graphs at any time of the step."""
    steps: int
    """Number of steps that ended."""
    settled_at: int | None
    """Number of the first step whose levels were chosen by what was learned; None before it."""
    lower_bound_seconds: float
    """Lower bound on the recompute seconds of any choice of these levels within the budget."""
    extra_seconds: float
    """Recompute seconds of the step."""
    sees: str
    """Allocations that the measured figures see."""

    def table(self) -> Table:
        """Return the rows as a table with exports."""
        return table_of(self.rows)

    def _measured(self) -> str:
        """Return the measured peak for people."""
        return f"{'at most ' if self.is_bound else ''}{format_bytes(self.measured_peak_bytes)}"

    def summary(self) -> str:
        """Return the figures of the step in one line."""
        return (
            f"the step's peak is {self._measured()} of a budget of "
            f"{format_bytes(self.budget_bytes)}, up to {format_bytes(self.outside_bytes)} of it "
            f"outside of the graphs; recompute takes {format_seconds(self.extra_seconds)} a step "
            "by the cost model"
        )

    def __str__(self) -> str:
        settled = (
            f"settled at step {self.settled_at}"
            if self.settled_at is not None
            else "not settled: the next step is planned with what this one showed"
        )
        return (
            f"step {self.steps}, {settled}\n{self.table()}\n"
            f"budget {format_bytes(self.budget_bytes)}, predicted peak "
            f"{format_bytes(self.predicted_peak_bytes)}, measured peak "
            f"{self._measured()} ({self.peak_at}); outside of the graphs up "
            f"to {format_bytes(self.outside_bytes)}; recompute "
            f"{format_seconds(self.extra_seconds)}, at least "
            f"{format_seconds(self.lower_bound_seconds)} at these levels. {self.sees}"
        )
