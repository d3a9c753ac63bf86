"""The log of planning: what every door says, once a plan, to the logger ``fxckpt`` (``TORCH_LOGS=fxckpt``, ``+fxckpt`` for reasons)."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from fxckpt.budget import format_bytes
from fxckpt.plans.types import Plan
from fxckpt.utils.units import format_seconds

log = logging.getLogger("fxckpt")


def log_plan(plan: Plan, seconds: float) -> None:
    """Log a plan that took ``seconds`` to make: its figures with INFO, its values with their reasons in words with DEBUG."""
    if log.isEnabledFor(logging.INFO):
        digest = plan.digest
        log.info(
            "plan %s of %s: %s, made in %s",
            digest,
            _graph(plan),
            _within(plan),
            format_seconds(seconds),
        )
        for name, figure in plan.explain().summary():
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
    """Log a frontier that took ``seconds`` to make: its plans with INFO, a line each."""
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
    """Log with INFO that a plan made before, or given, is applied."""
    if log.isEnabledFor(logging.INFO):
        log.info("plan %s of %s is applied: %s", plan.digest, _graph(plan), _within(plan))


def _graph(plan: Plan) -> str:
    """Say which graph a plan is of: its size, and the first line of the model that it was traced from."""
    labels = plan.step.labels if plan.step is not None else ()
    first = next((label.source for label in labels if label.source), "")
    return f"a graph of {len(plan.graph) or len(labels)} nodes{f' from {first}' if first else ''}"


def _within(plan: Plan) -> str:
    budget = (
        "no budget" if plan.budget_bytes is None else f"budget {format_bytes(plan.budget_bytes)}"
    )
    runs = len(plan.schedule)
    return f"peak {format_bytes(plan.compiled_peak_bytes or plan.peak_bytes)}, {budget}, {runs} recompute{'' if runs == 1 else 's'}"
