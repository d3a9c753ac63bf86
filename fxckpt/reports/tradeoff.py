"""The frontier: recompute time against peak memory, one plan a budget."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fxckpt.budgets import format_bytes
from fxckpt.errors import InvalidOption
from fxckpt.plans.types import Plan
from fxckpt.reports.plots import Peer
from fxckpt.reports.step_report import AWAY
from fxckpt.utils.tables import Column, Table
from fxckpt.utils.units import format_seconds

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from fxckpt.reports.step_plan import StepPlan


@dataclass(frozen=True)
class Point:
    """The figures of one plan of a frontier."""

    budget_bytes: int
    """The budget; the peak, if the plan was made without one."""
    peak_bytes: int
    """The plan's peak."""
    saved_bytes: int
    """Bytes saved for the backward."""
    recompute_seconds: float
    """Extra time over the uncheckpointed step: recomputes, and waits for copies."""
    lower_bound_seconds: float
    """A lower bound on the extra time of any plan within the budget."""
    share: float
    """Extra time divided by the time of the uncheckpointed step."""
    away_bytes: int = 0
    """Bytes sent off the device."""


POINT_COLUMNS = (
    Column("budget_bytes", "budget", format_bytes, is_number=True),
    Column("peak_bytes", "peak", format_bytes, is_number=True),
    Column("saved_bytes", "saved", format_bytes, is_number=True),
    Column("recompute_seconds", "extra time", format_seconds, is_number=True),
    Column("share", "of the step", lambda v: f"{v:+.2%}", is_number=True),
    Column("lower_bound_seconds", "least possible", format_seconds, is_number=True),
)
"""Columns of points, beside that of the bytes sent away."""


def points_of(plans: Sequence[Plan | StepPlan]) -> tuple[Point, ...]:
    """Return the figures of plans, one point a plan."""
    return tuple(
        Point(
            plan.peak_bytes if plan.budget_bytes is None else plan.budget_bytes,
            plan.peak_bytes,
            plan.saved_bytes,
            plan.extra_seconds,
            plan.lower_bound_seconds,
            plan.slowdown,
            plan.away_bytes,
        )
        for plan in plans
    )


def table_of_points(points: Sequence[Point]) -> Table:
    """Return points as a table; people see what is sent away where anything is."""
    away = replace(AWAY, is_brief=any(point.away_bytes for point in points))
    columns = (*POINT_COLUMNS, away)
    return Table(
        columns, tuple(tuple(getattr(point, column.name) for column in columns) for point in points)
    )


@dataclass(frozen=True)
class Frontier:
    """The plans of one step at increasing budgets, made by :func:`fxckpt.frontier`.

    The extra time never rises with the budget. Printing shows the table of :meth:`table`.

    >>> import torch, fxckpt
    >>> from torch import nn
    >>> with torch.device("meta"):
    ...     model = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.GELU()) for _ in range(4)))
    >>> curve = fxckpt.frontier(model, torch.empty(512, 64, device="meta"), points=3)
    >>> [point.share > 0 for point in curve.rows]
    [True, True, False]
    """

    plans: tuple[Plan, ...]
    """The plans, from the least peak to the uncheckpointed step."""

    @property
    def rows(self) -> tuple[Point, ...]:
        """The figures of the plans, one point a plan."""
        return points_of(self.plans)

    def table(self) -> Table:
        """Return the points as a table, with the shadow price of memory at each budget."""
        price = Column("price", "price a MiB", format_seconds, is_number=True)
        points = table_of_points(self.rows)
        return Table(
            (*points.columns, price),
            tuple((*row, plan.price) for row, plan in zip(points.rows, self.plans, strict=True)),
        )

    def __str__(self) -> str:
        return str(self.table())

    def plot(
        self, ax: Axes | None = None, *, chosen: Plan | None = None, peers: Sequence[Peer] = ()
    ) -> Axes:
        """Draw recompute time over peak with the lower bounds, and return the axes.

        ``ax`` are the axes to draw on (new ones by default), ``chosen`` is a plan to mark and
        ``peers`` are other ways to train the same step (:class:`fxckpt.reports.plots.Peer`).
        Needs matplotlib. Raises :class:`fxckpt.InvalidOption` if ``chosen`` is not a plan of the
        same graph.
        """
        from fxckpt.reports import plots

        if chosen is not None:
            self._check_same_graph(chosen, "plot")
        return plots.draw_frontier(self, ax, chosen=chosen, peers=peers)

    def to_html(
        self, path: str | Path, *, chosen: Plan | None = None, title: str | None = None
    ) -> Path:
        """Write a self-contained HTML page with a slider over the plans, and return its path.

        The page opens at ``chosen``, by default the middle plan; a plan that is not part of the
        frontier is added to the slider. The title is by default the name of the model. Raises
        :class:`fxckpt.InvalidOption` if ``chosen`` is not a plan of the same graph.
        """
        from fxckpt.reports import html

        plans = self.plans
        if chosen is not None and chosen not in plans:
            self._check_same_graph(chosen, "to_html")
            plans = tuple(sorted((*plans, chosen), key=lambda plan: plan.peak_bytes))
        return html.write(
            plans,
            path,
            chosen=len(plans) // 2 if chosen is None else plans.index(chosen),
            title=title,
        )

    def _check_same_graph(self, chosen: Plan, method: str) -> None:
        if not isinstance(chosen, Plan):
            raise InvalidOption(
                f"{method}(chosen={chosen!r}): that is no plan. "
                "Give one of the frontier's, or fxckpt.plan(model, *inputs)."
            )
        if chosen.graph != self.plans[0].graph:
            raise InvalidOption(
                f"{method}(chosen=...): that plan is of another graph. "
                "Give one that was made of the same model and inputs."
            )

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        printer.text(str(self))

    def _repr_html_(self) -> str:
        return self.table().to_html()
