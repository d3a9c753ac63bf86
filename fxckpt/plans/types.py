"""The plan as data: what is saved, what is recomputed, where, and why.

A plan holds node *names* of one joint graph, never ``fx.Node``: it prints, compares, pickles, and can be applied again to
the same graph. Solvers produce plans, :mod:`fxckpt.passes.transforms.rematerialize` applies them; neither knows the other.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fxckpt.errors import InvalidOption
from fxckpt.plans.snapshot import GraphSnapshot
from fxckpt.reason import Decision, Reason
from fxckpt.solver.schedule import Schedule

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from fxckpt.reports.difference import Difference
    from fxckpt.reports.explanation import Explanation
    from fxckpt.reports.timeline import Timeline
    from fxckpt.reports.tradeoff import Frontier


@dataclass(frozen=True)
class Row:
    """One forward value that the backward needs. ``bytes`` are those of its storage, counted once."""

    name: str
    op: str
    shape: tuple[int, ...]
    dtype: str
    bytes: int
    module: str
    source: str
    decision: Decision
    reason: Reason
    runs: int
    """How many times it runs in the backward; 0 if saved."""
    recompute_seconds: float
    """Time of one run."""
    recompute_flops: int
    """FLOPs of one run."""


@dataclass(frozen=True)
class Recompute:
    """Run forward op ``name`` again in front of backward node ``before`` (``"output"``: at the end)."""

    name: str
    before: str


@dataclass(frozen=True)
class Plan:
    """Which forward values are saved and which are recomputed, and what that costs.

    Bytes are peaks of one forward and backward beyond what was allocated when the step began; seconds and FLOPs are by the
    cost model named in ``cost``.
    """

    saved: tuple[str, ...]
    recomputed: tuple[str, ...]
    schedule: tuple[Recompute, ...]
    """Every run of a recomputed op, in the order of the backward."""
    saved_bytes: int
    peak_bytes: int
    baseline_peak_bytes: int
    """Peak of the uncheckpointed graph: everything the backward reads is saved."""
    floor_bytes: int
    """Least peak the planner reached on this graph."""
    floor_bound_bytes: int
    """No plan for this order of the graph has a lower peak."""
    recompute_seconds: float
    recompute_flops: int
    lower_bound_seconds: float
    """No plan within the budget has less recompute time (:mod:`fxckpt.solver.lower_bounds`)."""
    price: float
    """Shadow price of the budget: seconds that one MiB more would save, at most and at the margin; 0 if the budget does not bind."""
    next_seconds: float
    """Seconds that 100 MiB more would save: up to so many, by the lower bound there."""
    step_seconds: float
    """Forward and backward of the uncheckpointed graph."""
    step_flops: int
    budget_bytes: int | None
    rows: tuple[Row, ...]
    profile: tuple[int, ...]
    """Live bytes during each op, the forward's ops first."""
    forward_ops: int
    """How many leading entries of ``profile`` belong to the forward."""
    cost: str
    compiled_peak_bytes: int | None = None
    """Peak by the inner compiler's own schedule of the emitted halves, where one was asked; ``peak_bytes`` is the planner's model."""
    never_stored: tuple[str, ...] = ()
    """Values planned as taken into the loops of those who read them (:mod:`fxckpt.passes.inductor.fusion_model`)."""
    keeps_order: bool = True
    """Whether a compiler that schedules anew is held to the order of the backward; not where the plan is torch's own choice."""
    lets_go: bool = False
    """Whether the compiled backward lets go of memory that Inductor would keep for a later buffer, as it is over the budget otherwise."""
    graph: tuple[str, ...] = field(default=(), repr=False)
    """The joint graph the plan was made for, a line a node."""
    step: GraphSnapshot | None = field(default=None, compare=False, repr=False)
    """The graph it was made for, as plain data (:class:`fxckpt.passes.analysis.graph_snapshot.GraphSnapshot`): what reports, pictures and pages are drawn from. Two plans
    that decide the same are equal whatever it is."""

    @property
    def digest(self) -> str:
        """A hash of the graph and of what is decided about it; equal on every machine, and by every way of capture, that decides the same."""
        decided = (
            *self.graph,
            "saved",
            *self.saved,
            "runs again",
            *(f"{run.name} before {run.before}" for run in self.schedule),
        )
        return hashlib.sha256("\n".join(decided).encode()).hexdigest()[:16]

    def to_json(self, *, indent: int | None = None) -> str:
        """Return the plan as JSON text, which :meth:`from_json` reads."""
        from fxckpt.plans.serialize import dump

        return dump(self, indent=indent)

    @staticmethod
    def from_json(text: str) -> Plan:
        """Return the plan of a JSON text.

        Raises :class:`~fxckpt.errors.InvalidPlan` for another text, one of another version, or one that was changed.
        """
        from fxckpt.plans.serialize import load

        return load(text)

    @property
    def reasons(self) -> dict[str, Reason]:
        """The reason for each saved or recomputed value, by name."""
        return {row.name: row.reason for row in self.rows}

    def explain(self) -> Explanation:
        """Return the plan as rows and, printed, as tables and a memory profile."""
        from fxckpt.reports.explanation import explain

        return explain(self)

    def diff(self, other: Plan) -> Difference:
        """Return what changes from this plan to ``other``. Raises :class:`fxckpt.InvalidOption` for no plan, or one of another graph."""
        from fxckpt.reports.difference import diff

        return diff(self, other)

    def timeline(self) -> Timeline:
        """Return what the memory holds at every op of the step, value by value."""
        from fxckpt.reports.timeline import timeline

        return timeline(self)

    def frontier(self, points: int = 8) -> Frontier:
        """Return the plans of the same step at other budgets, this one among them; nothing is captured again.

        Raises :class:`fxckpt.InvalidOption` for fewer than 2 points, and for a plan that does not carry its step.
        """
        from fxckpt.planner.sweep import frontier_of

        return frontier_of(self, points)

    def plot_memory(self, ax: Axes | None = None, *, over: str = "ops") -> Axes:
        """Draw what holds the memory over the step's ops (or ``over="time"``), and return the axes. Needs matplotlib."""
        from fxckpt.reports import plots

        return plots.memory(self, ax, over=over)

    def plot_modules(self, ax: Axes | None = None, *, depth: int | None = None) -> Axes:
        """Draw saved and recomputed bytes by module, and return the axes. Needs matplotlib."""
        from fxckpt.reports import plots

        return plots.modules(self, ax, depth=depth)

    def to_html(self, path: str | Path, *, points: int = 8, title: str = "fxckpt") -> Path:
        """Write one self-contained page: the graph by module, why each value is saved or recomputed, the memory over the step; return its path.

        The page has a slider over ``points`` plans of the same step, which are made for it (:meth:`frontier`), 2 or more; with 0 it shows this plan
        alone. Raises :class:`fxckpt.InvalidOption` for another number of points, and for a plan that does not carry its step.
        """
        from fxckpt.reports import html

        if points != 0 and points < 2:
            raise InvalidOption(
                f"points={points!r}: the page's slider has at least 2 plans, from the floor up; with points=0 there is none."
            )

        plans = self.frontier(points).plans if points else (self,)
        return html.write(plans, path, chosen=plans.index(self), title=title)

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        printer.text(str(self.explain().top(20)))

    def _repr_html_(self) -> str:
        return self.explain()._repr_html_()


def schedule_of(plan: Plan) -> Schedule:
    """Return the schedule of a plan, in the indices of its step's program."""
    step = snapshot_of_plan(plan)
    return Schedule(
        tuple(sorted(step.storage_index[name] for name in plan.saved)),
        tuple(step.op_index[run.name] for run in plan.schedule),
        tuple(step.backward_index[run.before] for run in plan.schedule),
    )


def snapshot_of_plan(plan: Plan) -> GraphSnapshot:
    """Return the step a plan carries. Raises :class:`fxckpt.InvalidOption` for a plan without one."""
    if plan.step is None:
        raise InvalidOption(
            "this plan does not carry the graph it was made for, so it cannot be drawn or explained value by value. "
            "Plan again: fxckpt.plan(model, *inputs, budget=...)."
        )
    return plan.step
