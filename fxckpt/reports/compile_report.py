"""The report of a backend: the plans of all graphs that it compiled, and the graph breaks."""

from __future__ import annotations

from dataclasses import dataclass, replace

from fxckpt.budgets import format_bytes
from fxckpt.plans.types import Plan
from fxckpt.reports.step_report import StepReport
from fxckpt.utils.tables import Column, Table
from fxckpt.utils.units import format_seconds

SHOWN = 20
"""Values that the report of a lone graph shows, largest first."""


@dataclass(frozen=True)
class Break:
    """A Dynamo graph break; the graphs on its two sides are planned separately."""

    graph: int | None
    """The graph that ends here, counted from 1; None if it has no backward."""
    reason: str
    """Dynamo's reason for the break."""
    source: str
    """The line of the model: ``file.py:12``."""
    bytes: int
    """Bytes of the graph's outputs, which stay live until its backward under any plan."""

    def __str__(self) -> str:
        graph = f"graph {self.graph}" if self.graph else "a graph without a backward"
        held = (
            f", and its outputs, {format_bytes(self.bytes)}, are held until its backward"
            if self.bytes
            else ""
        )
        at = f" at {self.source}" if self.source else ""
        return f"graph break: {graph} ends{at} ({self.reason}): nothing is planned across it{held}"


@dataclass(frozen=True)
class Fallback:
    """A graph that could not be planned and took torch's own partition."""

    graph: int
    """The graph, counted from 1."""
    error: str
    """The error that stopped planning."""
    repro: str
    """Path of the file from which ``fxckpt doctor`` reads the graph."""
    peak_bytes: int
    """Simulated peak of torch's partition."""

    def __str__(self) -> str:
        return (
            f"graph {self.graph} is not planned: it takes torch's own partition, with a simulated "
            f"peak of {format_bytes(self.peak_bytes)}. Planning failed: {self.error}. Repro: "
            f"{self.repro}"
        )


def outputs_bytes(plan: Plan) -> int:
    """Return the bytes of the forward's outputs; 0 if the plan carries no graph snapshot."""
    if plan.snapshot is None:
        return 0
    return sum(s.bytes for s in plan.snapshot.program.storages if s.is_output)


@dataclass(frozen=True)
class Origin:
    """The graph of a step that a plan is a level of."""

    graph: int
    """Number of the graph, from 1, as in the table of the step."""
    source: str
    """Line of the user's code that called it."""


COLUMNS = (
    Column("plan", "plan", is_number=True),
    Column("graph", "graph", lambda v: "" if v is None else str(v), is_number=True),
    Column("source", "called at"),
    Column("budget_bytes", "budget", lambda v: "none" if v is None else format_bytes(v), True),
    Column("peak_bytes", "peak", format_bytes, is_number=True),
    Column("baseline_peak_bytes", "uncheckpointed", format_bytes, is_number=True),
    Column("saved_bytes", "saved", format_bytes, is_number=True),
    Column("recomputed", "runs again", is_number=True),
    Column("extra_seconds", "recompute", format_seconds, is_number=True),
)
COLUMNS_OF_STEP = tuple(
    replace(c, show=lambda v: "the step's" if v is None else format_bytes(v))
    if c.name == "budget_bytes"
    else c
    for c in COLUMNS
)


@dataclass(frozen=True)
class Report:
    """The plans and graph breaks of a backend, and its latest step; printed, two short tables.

    A lone plan is printed with its largest values.
    """

    plans: tuple[Plan, ...]
    """One plan for each compiled graph that has a backward, in the order of compilation."""
    breaks: tuple[Break, ...] = ()
    """The graph breaks that Dynamo reported."""
    fallbacks: tuple[Fallback, ...] = ()
    """The graphs that could not be planned."""
    step: StepReport | None = None
    """The latest step, if the budget is one of a step and one has ended."""
    limits: tuple[str, ...] = ()
    """What a partitioner alone cannot do that a backend can."""
    origins: tuple[Origin | None, ...] = ()
    """The graph that each plan is a level of, if the budget is one of a step and it is known."""

    def table(self) -> Table:
        """Return the figures of the plans, one row each, as a table with exports."""
        rows = []
        for number, plan in enumerate(self.plans, 1):
            if self.origins:
                origin = self.origins[number - 1]
                graph, source = (None, "") if origin is None else (origin.graph, origin.source)
            else:
                graph, source = number, "" if plan.snapshot is None else plan.snapshot.first_source
            rows.append(
                (
                    number,
                    graph,
                    source,
                    plan.budget_bytes,
                    plan.compiled_peak_bytes or plan.peak_bytes,
                    plan.baseline_peak_bytes,
                    plan.saved_bytes,
                    len(plan.schedule),
                    plan.extra_seconds,
                )
            )
        return Table(COLUMNS_OF_STEP if self.origins else COLUMNS, tuple(rows))

    def __str__(self) -> str:
        if not self.plans and self.fallbacks:
            return "\n\n".join(map(str, (*self.fallbacks, *self.limits)))
        if not self.plans:
            nothing = (
                "no graph with a backward has been compiled yet: run one forward of the compiled "
                "model with gradients enabled. If one was run, Dynamo left the model to Python "
                "(an RNN, a graph break in a loop, a limit of compilations): "
                "TORCH_LOGS=graph_breaks,recompiles says where."
            )
            return "\n\n".join((nothing, *self.limits))
        count = len(self.plans)
        parts = [] if self.step is None else [str(self.step)]
        if count == 1:
            parts.append(str(self.plans[0].explain().top(SHOWN)))
        else:
            parts.append(
                f"{self.table()}\nplans[i].explain() of this report has the values of plan i + 1."
            )
        parts.extend(map(str, self.fallbacks))
        parts.extend(map(str, self.breaks))
        if self.step is None and count > 1 and not self.breaks and not self.limits:
            parts.append(
                f"no graph break was seen between these {count} graphs, and each has the whole "
                "budget. If they are parts of one step, Dynamo left the function that calls them "
                "to Python: TORCH_LOGS=graph_breaks says where. scope='step' gives them one budget."
            )
        parts.extend(self.limits)
        return "\n\n".join(parts)
