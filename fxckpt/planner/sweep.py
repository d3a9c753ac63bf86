"""Plans of one graph over a sweep of budgets."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from fxckpt.budgets import Budget, validate
from fxckpt.costs.models import CostModel
from fxckpt.errors import InvalidOption
from fxckpt.planner.build_plan import build_plan
from fxckpt.planner.capture import capture_joint, is_on_meta
from fxckpt.planner.pipeline import prepare
from fxckpt.planner.planned_device import planned_device, warn_beyond
from fxckpt.planner.planner import Planner
from fxckpt.planner.refusals import refuse_tiles
from fxckpt.plans.log import log_frontier
from fxckpt.plans.types import Plan, snapshot_of_plan
from fxckpt.policies import as_policy
from fxckpt.reports.tradeoff import Frontier
from fxckpt.solver.search.price_search import PriceSearch, evenly_spaced
from fxckpt.tiers import Tier, tier_of
from fxckpt.utils.progress import progress


def frontier(
    model_or_fn: Callable[..., Any],
    *args: Any,
    points: int | Sequence[Budget] = 16,
    policy: Any = None,
    cost: str | CostModel = "roofline",
    device: str | torch.device | None = None,
    offload: Tier | str | None = None,
    **kwargs: Any,
) -> Frontier:
    """Return the plans of ``model_or_fn(*args, **kwargs)`` at many budgets; the step is not run.

    A progress bar shows on a terminal.

    Parameters
    ----------
    model_or_fn, args, kwargs, policy, cost, device, offload:
        As for :func:`fxckpt.plan`.
    points:
        The number of budgets, from the least peak to the uncheckpointed one, evenly spaced in their
        logarithm; or the budgets themselves, each as :class:`fxckpt.Backend` takes it.

    Returns
    -------
    Frontier
        The plans, each with its extra time, its peak and the least possible time.

    Raises
    ------
    CaptureError
        As :func:`fxckpt.plan` does.
    BudgetInfeasible
        For a budget below the least peak.
    InvalidBudget, InvalidOption
        For invalid arguments, fewer than 2 points or no budgets.

    Examples
    --------
    >>> import torch, fxckpt
    >>> with torch.device("meta"):
    ...     layers = [m for _ in range(8) for m in (torch.nn.Linear(64, 64), torch.nn.GELU())]
    >>> model = torch.nn.Sequential(*layers)
    >>> curve = fxckpt.frontier(model, torch.empty(512, 64, device="meta"), points=4)
    >>> seconds = [row.recompute_seconds for row in curve.rows]
    >>> seconds == sorted(seconds, reverse=True)
    True
    """
    if isinstance(points, int):
        count, is_legal = points, points >= 2
    else:
        is_legal = isinstance(points, Sequence) and not isinstance(points, str) and len(points) > 0
        count = len(points) if is_legal else 0
    if not is_legal:
        raise InvalidOption(
            f"points={points!r}: a frontier has at least 2 points, the floor and the "
            "uncheckpointed plan, or a list of budgets. "
            "Examples: points=16, points=['8GiB', '6GiB', 0.5]."
        )
    asked = () if isinstance(points, int) else points
    for budget in asked:
        validate(budget)
    chosen = as_policy(policy)
    refuse_tiles(chosen)
    on_meta = is_on_meta(model_or_fn, args, kwargs)
    target = planned_device(device, is_on_meta=on_meta)
    for budget in asked if device is not None else ():
        warn_beyond(target.named, "budget", budget)
    planner = Planner(
        None,
        chosen,
        cost,
        measure_workspace=not on_meta and target.named is None,
        device=target.named,
        offload=tier_of(offload),
    )
    with progress("frontier", "budgets", count) as shown:
        joint = capture_joint(model_or_fn, args, kwargs, target)
        prepare(joint)
        plans = planner.frontier(joint, points=points, tick=shown.tick)
    return Frontier(plans)


def frontier_of(plan: Plan, points: int = 8) -> Frontier:
    """Return the frontier of the graph that a plan carries, with the plan among its points.

    The model is not captured again. Raises :class:`InvalidOption` for a plan that does not carry
    its graph, and for fewer than 2 points.
    """
    if points < 2:
        raise InvalidOption(
            f"points={points!r}: a frontier has at least 2 points, the floor and the "
            "uncheckpointed plan."
        )
    snapshot = snapshot_of_plan(plan)
    begin = time.perf_counter()
    with progress("frontier", "budgets", points) as shown:
        found = PriceSearch().frontier(snapshot.program, partial(evenly_spaced, points), shown.tick)
    made = (
        build_plan(snapshot, f, f.best, budget_bytes=f.limit, cost=plan.cost)
        for f in found
        if f.best is not None
    )
    others = (replace(other, graph=plan.graph) for other in made)
    apart = [
        other for other in others if (other.saved, other.schedule) != (plan.saved, plan.schedule)
    ]
    plans = tuple(
        sorted((*apart, plan), key=lambda p: (p.peak_bytes, p.budget_bytes or p.peak_bytes))
    )
    log_frontier(plans, time.perf_counter() - begin)
    return Frontier(plans)
