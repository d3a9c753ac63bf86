"""The frontier: recompute time against peak, from the floor to the uncheckpointed step."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tqdm import tqdm

from fxckpt.budget import Budget, format_bytes, validate
from fxckpt.capture import capture_joint, is_on_meta
from fxckpt.cost import CostModel
from fxckpt.errors import InvalidOption
from fxckpt.passes.describe import describe
from fxckpt.passes.normalize import normalize
from fxckpt.passes.price_search import PriceSearch, evenly_spaced
from fxckpt.pipeline import Planner
from fxckpt.plan import Plan, step_of_plan
from fxckpt.plan_log import log_frontier
from fxckpt.policies import as_policy
from fxckpt.tables import Column, Table
from fxckpt.units import format_seconds

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from fxckpt.pictures import Peer


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
                (p.budget_bytes, p.peak_bytes, p.saved_bytes, p.recompute_seconds, p.share, p.lower_bound_seconds, plan.price)
                for p, plan in rows
            ),
        )

    def __str__(self) -> str:
        return str(self.table())

    def plot(self, ax: Axes | None = None, *, chosen: Plan | None = None, peers: Sequence[Peer] = ()) -> Axes:
        """Draw recompute time over peak, with the lower bounds, and return the axes. Needs matplotlib.

        ``chosen`` is a plan to mark, ``peers`` are other ways to train the same step (:class:`fxckpt.pictures.Peer`). Raises :class:`InvalidOption`
        for a ``chosen`` plan of another graph.
        """
        from fxckpt import pictures

        if chosen is not None:
            self._refuse_foreign(chosen, "plot")
        return pictures.frontier(self, ax, chosen=chosen, peers=peers)

    def to_html(self, path: str | Path, *, chosen: Plan | None = None, title: str = "fxckpt") -> Path:
        """Write one self-contained page with a slider over these plans, ``chosen`` (or the middle one) shown first; return its path.

        A ``chosen`` plan that is not among them joins them. Raises :class:`InvalidOption` for one of another graph.
        """
        from fxckpt import page

        plans = self.plans
        if chosen is not None and chosen not in plans:
            self._refuse_foreign(chosen, "to_html")
            plans = tuple(sorted((*plans, chosen), key=lambda plan: plan.peak_bytes))
        return page.write(plans, path, chosen=len(plans) // 2 if chosen is None else plans.index(chosen), title=title)

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


def frontier(
    model_or_fn: Callable[..., Any],
    *args: Any,
    points: int | Sequence[Budget] = 16,
    policy: Any = None,
    cost: str | CostModel = "roofline",
    **kwargs: Any,
) -> Frontier:
    """Return the plans of ``model_or_fn(*args, **kwargs)`` at many budgets; the step is not run.

    ``points`` is how many budgets, from the floor to the uncheckpointed peak, evenly spaced in their logarithm; or the budgets themselves, each as
    :class:`fxckpt.Backend` takes it. A progress bar shows on a terminal. Raises :class:`CaptureError` as :func:`fxckpt.plan` does,
    :class:`BudgetInfeasible` for a budget below the floor and :class:`InvalidOption` for fewer than 2 points or no budgets.

    Examples
    --------
    >>> import torch, fxckpt
    >>> with torch.device("meta"):
    ...     model = torch.nn.Sequential(*(torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.GELU()) for _ in range(8)))
    >>> curve = fxckpt.frontier(model, torch.empty(512, 64, device="meta"), points=4)
    >>> [row.recompute_seconds for row in curve.rows] == sorted((row.recompute_seconds for row in curve.rows), reverse=True)
    True
    """
    if isinstance(points, int):
        count, is_legal = points, points >= 2
    else:
        is_legal = isinstance(points, Sequence) and not isinstance(points, str) and len(points) > 0
        count = len(points) if is_legal else 0
    if not is_legal:
        raise InvalidOption(
            f"points={points!r}: a frontier has at least 2 points, the floor and the uncheckpointed plan, or a list of budgets. "
            "Examples: points=16, points=['8GiB', '6GiB', 0.5]."
        )
    for budget in () if isinstance(points, int) else points:
        validate(budget)
    planner = Planner(None, as_policy(policy), cost, measure_scratch=not is_on_meta(model_or_fn, args, kwargs))
    joint = capture_joint(model_or_fn, args, kwargs)
    normalize(joint.module)
    with tqdm(total=count, desc="frontier", disable=None) as bar:
        plans = planner.frontier(joint.module, num_fwd_outputs=joint.num_fwd_outputs, points=points, tick=bar.update)
    return Frontier(plans)


def frontier_of(plan: Plan, points: int = 8) -> Frontier:
    """Return the frontier of the step that a plan carries, with the plan itself among its points; the model is not captured again.

    Raises :class:`InvalidOption` for a plan that does not carry its step, and for fewer than 2 points.
    """
    if points < 2:
        raise InvalidOption(f"points={points!r}: a frontier has at least 2 points, the floor and the uncheckpointed plan.")
    step = step_of_plan(plan)
    begin = time.perf_counter()
    with tqdm(total=points, desc="frontier", disable=None) as bar:
        found = PriceSearch().frontier(step.program, partial(evenly_spaced, points), bar.update)
    made = (describe(step, f, f.best, budget_bytes=f.limit, cost=plan.cost) for f in found if f.best is not None)
    others = (replace(other, graph=plan.graph) for other in made)
    apart = [other for other in others if (other.saved, other.schedule) != (plan.saved, plan.schedule)]
    plans = tuple(sorted((*apart, plan), key=lambda p: (p.peak_bytes, p.budget_bytes or p.peak_bytes)))
    log_frontier(plans, time.perf_counter() - begin)
    return Frontier(plans)
