"""The frontier: recompute time against peak, from the floor to the uncheckpointed step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fxckpt.budget import format_bytes
from fxckpt.errors import InvalidOption
from fxckpt.plans.types import Plan
from fxckpt.reports.plots import Peer
from fxckpt.utils.tables import Column, Table
from fxckpt.utils.units import format_seconds

if TYPE_CHECKING:
    from matplotlib.axes import Axes


@dataclass(frozen=True)
class Point:
    """One plan of a frontier. Seconds are extra time beyond the uncheckpointed step's."""

    budget_bytes: int
    peak_bytes: int
    saved_bytes: int
    recompute_seconds: float
    lower_bound_seconds: float
    """No plan of this budget takes less."""
    share: float
    """Recompute time over the time of the uncheckpointed step."""


@dataclass(frozen=True)
class Frontier:
    """Plans from the least peak to the uncheckpointed one; recompute time never rises with the budget."""

    plans: tuple[Plan, ...]

    @property
    def rows(self) -> tuple[Point, ...]:
        """The curve as data, one point a plan."""
        return tuple(
            Point(
                plan.budget_bytes or plan.peak_bytes,
                plan.peak_bytes,
                plan.saved_bytes,
                plan.recompute_seconds,
                plan.lower_bound_seconds,
                plan.recompute_seconds / plan.step_seconds if plan.step_seconds else 0.0,
            )
            for plan in self.plans
        )

    def table(self) -> Table:
        """Return the curve as a table."""
        columns = (
            Column("budget_bytes", "budget", format_bytes, is_number=True),
            Column("peak_bytes", "peak", format_bytes, is_number=True),
            Column("saved_bytes", "saved", format_bytes, is_number=True),
            Column("recompute_seconds", "extra time", format_seconds, is_number=True),
            Column("share", "of the step", lambda v: f"{v:+.2%}", is_number=True),
            Column("lower_bound_seconds", "least possible", format_seconds, is_number=True),
            Column("price", "price a MiB", format_seconds, is_number=True),
        )
        rows = zip(self.rows, self.plans, strict=True)
        return Table(
            columns,
            tuple(
                (
                    p.budget_bytes,
                    p.peak_bytes,
                    p.saved_bytes,
                    p.recompute_seconds,
                    p.share,
                    p.lower_bound_seconds,
                    plan.price,
                )
                for p, plan in rows
            ),
        )

    def __str__(self) -> str:
        return str(self.table())

    def plot(
        self, ax: Axes | None = None, *, chosen: Plan | None = None, peers: Sequence[Peer] = ()
    ) -> Axes:
        """Draw recompute time over peak, with the lower bounds, and return the axes. Needs matplotlib.

        ``chosen`` is a plan to mark, ``peers`` are other ways to train the same step (:class:`fxckpt.reports.plots.Peer`). Raises :class:`InvalidOption`
        for a ``chosen`` plan of another graph.
        """
        from fxckpt.reports import plots

        if chosen is not None:
            self._refuse_foreign(chosen, "plot")
        return plots.frontier(self, ax, chosen=chosen, peers=peers)

    def to_html(
        self, path: str | Path, *, chosen: Plan | None = None, title: str = "fxckpt"
    ) -> Path:
        """Write one self-contained page with a slider over these plans, ``chosen`` (or the middle one) shown first; return its path.

        A ``chosen`` plan that is not among them joins them. Raises :class:`InvalidOption` for one of another graph.
        """
        from fxckpt.reports import html

        plans = self.plans
        if chosen is not None and chosen not in plans:
            self._refuse_foreign(chosen, "to_html")
            plans = tuple(sorted((*plans, chosen), key=lambda plan: plan.peak_bytes))
        return html.write(
            plans,
            path,
            chosen=len(plans) // 2 if chosen is None else plans.index(chosen),
            title=title,
        )

    def _refuse_foreign(self, chosen: Plan, method: str) -> None:
        if not isinstance(chosen, Plan):
            raise InvalidOption(
                f"{method}(chosen={chosen!r}): that is no plan. Give one of the frontier's, or fxckpt.plan(model, *inputs)."
            )
        if chosen.graph != self.plans[0].graph:
            raise InvalidOption(
                f"{method}(chosen=...): that plan is of another graph. Give one that was made of the same model and inputs."
            )

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        printer.text(str(self))

    def _repr_html_(self) -> str:
        return self.table().to_html()
