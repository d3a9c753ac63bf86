"""The memory profile of a plan as a bar chart in text."""

from __future__ import annotations

from fxckpt.budgets import format_bytes
from fxckpt.plans.types import Plan

BLOCKS = " ▁▂▃▄▅▆▇█"
"""A character cell filled from zero to eight eighths."""


def memory_bar(plan: Plan, width: int = 72, height: int = 8) -> str:
    """Return live bytes over the ops of the step as text of ``width`` by ``height`` cells.

    A ``^`` on the axis marks the end of the forward. A dashed line marks the budget, if it is below
    twice the peak. Each column shows the maximum over its ops.
    """
    if not plan.profile:
        return "(no memory profile)"
    steps = len(plan.profile)
    width = min(width, steps)
    columns = [
        max(
            plan.profile[i * steps // width : max((i + 1) * steps // width, i * steps // width + 1)]
        )
        for i in range(width)
    ]
    top = (
        max(plan.peak_bytes, plan.budget_bytes or 0, 1)
        if (plan.budget_bytes or 0) < 2 * plan.peak_bytes
        else max(plan.peak_bytes, 1)
    )
    lines = []
    for level in range(height, 0, -1):
        line = "".join(_block(value / top * height - (level - 1)) for value in columns)
        at_budget = (
            plan.budget_bytes is not None and level - 1 < plan.budget_bytes / top * height <= level
        )
        if at_budget:
            line = line.replace(" ", "-")
        label = format_bytes(top * level / height)
        lines.append(f"{label:>10} |{line}{'- budget' if at_budget else ''}")
    split = plan.forward_ops * width // steps
    lines.append(f"{'':>10} +{'-' * split}^{'-' * max(0, width - split - 1)}")
    lines.append(f"{'':>12}{'forward'.ljust(split)[: max(split, 7)]} backward ({steps} ops)")
    return "\n".join(lines)


def _block(fill: float) -> str:
    return BLOCKS[max(0, min(8, round(fill * 8)))]
