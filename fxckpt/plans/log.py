"""Log of planning: one entry per plan, from every entry point, on the logger ``fxckpt``.

``TORCH_LOGS=fxckpt`` shows the figures of each plan, ``TORCH_LOGS=+fxckpt`` the reasons too.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

from fxckpt.budgets import format_bytes
from fxckpt.plans.types import Plan
from fxckpt.utils.units import format_seconds

log = logging.getLogger("fxckpt")

OF_THE_STEP = "a level within the budget of the step"
"""Said of a plan of one of the graphs of a step."""


def log_plan(plan: Plan, seconds: float, *, is_level: bool = False) -> None:
    """Log a new plan: its figures at INFO, the reason for each value at DEBUG.

    ``seconds`` is the time of planning; ``is_level`` says that the budget is that of a step, of
    whose graphs this is one.
    """
    if log.isEnabledFor(logging.INFO):
        digest = plan.digest
        log.info(
            "plan %s of %s: %s, made in %s",
            digest,
            _graph(plan),
            _within(plan, OF_THE_STEP if is_level else "no budget"),
            format_seconds(seconds),
        )
        for name, figure in plan.explain().summary():
            if is_level and name == "budget":
                figure = "that of the step"
            log.info("plan %s: %s: %s", digest, name, figure)
    if log.isEnabledFor(logging.DEBUG):
        digest, shown = plan.digest, plan.explain()
        for row in shown.rows:
            log.debug(
                "plan %s: %s (%s, %s): %s",
                digest,
                row.name,
                row.module or "model",
                row.source or "no source",
                shown.why(row.name),
            )


def log_frontier(plans: Sequence[Plan], seconds: float) -> None:
    """Log the plans of a new frontier at INFO, one line each.

    ``seconds`` is the time of planning.
    """
    if plans and log.isEnabledFor(logging.INFO):
        log.info(
            "frontier of %s: %d plans, made in %s",
            _graph(plans[0]),
            len(plans),
            format_seconds(seconds),
        )
        for plan in plans:
            log.info("plan %s of the frontier: %s", plan.digest, _within(plan))


def log_known(plan: Plan) -> None:
    """Log at INFO that a cached or a given plan is applied."""
    if log.isEnabledFor(logging.INFO):
        log.info("plan %s of %s is applied: %s", plan.digest, _graph(plan), _within(plan))


def _graph(plan: Plan) -> str:
    """Return a description of a plan's graph: its size and its first line of model source."""
    labels, first = (
        ((), "") if plan.snapshot is None else (plan.snapshot.labels, plan.snapshot.first_source)
    )
    return f"a graph of {len(plan.graph) or len(labels)} nodes{f' from {first}' if first else ''}"


def _within(plan: Plan, otherwise: str = "no budget") -> str:
    """Return the peak, the budget and the number of recomputes of a plan, as text.

    ``otherwise`` is said of a plan without a budget of its own.
    """
    limit = plan.budget_bytes
    budget = otherwise if limit is None else f"budget {format_bytes(limit)}"
    peak = format_bytes(plan.compiled_peak_bytes or plan.peak_bytes)
    runs = len(plan.schedule)
    return f"peak {peak}, {budget}, {runs} recompute{'' if runs == 1 else 's'}"
