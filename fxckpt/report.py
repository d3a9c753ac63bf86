"""Reports: data first, text second."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from tabulate import tabulate

from fxckpt.budget import format_bytes
from fxckpt.plan import Decision, Plan, Row

BARS = " ▁▂▃▄▅▆▇█"


def shorten(text: str, width: int) -> str:
    """Cut the middle out of a long text.

    >>> shorten("transformer.h.11.attn.c_proj", 16)
    'transfo…n.c_proj'
    """
    if len(text) <= width:
        return text
    left = (width - 1) // 2
    return f"{text[:left]}…{text[-(width - 1 - left) :]}"


def format_seconds(seconds: float) -> str:
    """Return seconds for people: ``"1.25 ms"``."""
    if seconds >= 1:
        return f"{seconds:.2f} s"
    return f"{seconds * 1e3:.2f} ms" if seconds >= 1e-3 else f"{seconds * 1e6:.1f} us"


def format_flops(flops: float) -> str:
    """Return FLOPs for people: ``"2.1 GFLOP"``."""
    for unit in ("", "K", "M", "G", "T"):
        if abs(flops) < 1000:
            return f"{flops:.1f} {unit}FLOP" if unit else f"{flops:.0f} FLOP"
        flops /= 1000
    return f"{flops:.1f} PFLOP"


@dataclass(frozen=True)
class Explanation:
    """A plan explained: its rows as data, and as text when printed."""

    plan: Plan
    rows: tuple[Row, ...]
    """Largest first."""

    def top(self, count: int) -> Explanation:
        """Return the explanation with the ``count`` largest rows."""
        return replace(self, rows=self.rows[:count])

    def gap(self) -> str:
        """Say how far from the best possible the plan can be."""
        plan = self.plan
        if plan.recompute_seconds <= plan.lower_bound_seconds:
            return "this plan is optimal"
        if plan.budget_bytes is None or not plan.step_seconds:
            return "no bound"
        return f"this plan is within {(plan.recompute_seconds - plan.lower_bound_seconds) / plan.step_seconds:.2%} of the step of it"

    def next_100_mib(self) -> str:
        """Say what 100 MiB more would buy."""
        plan = self.plan
        if not plan.next_seconds or not plan.step_seconds:
            return "nothing"
        return f"at most {format_seconds(plan.next_seconds)}, {plan.next_seconds / plan.step_seconds:.2%} of the step"

    def summary(self) -> list[tuple[str, str]]:
        """Return the plan's figures as (name, text)."""
        plan = self.plan
        share = plan.recompute_seconds / plan.step_seconds if plan.step_seconds else 0.0
        budget = "none" if plan.budget_bytes is None else format_bytes(plan.budget_bytes)
        return [
            ("peak", format_bytes(plan.peak_bytes)),
            ("budget", budget),
            ("uncheckpointed peak", format_bytes(plan.baseline_peak_bytes)),
            ("floor (least peak found)", f"{format_bytes(plan.floor_bytes)}; no plan is below {format_bytes(plan.floor_bound_bytes)}"),
            ("saved for the backward", f"{format_bytes(plan.saved_bytes)} in {len(plan.saved)} values"),
            ("runs again", f"{len(plan.schedule)} runs of {len(plan.recomputed)} ops, {format_flops(plan.recompute_flops)}"),
            ("extra time", f"{format_seconds(plan.recompute_seconds)}, {share:.1%} of the step (cost model: {plan.cost})"),
            ("least possible extra time", f"{format_seconds(plan.lower_bound_seconds)}: {self.gap()}"),
            ("price of memory", f"{format_seconds(plan.price)} a MiB at the margin; the next 100 MiB save {self.next_100_mib()}"),
        ]

    def __str__(self) -> str:
        hidden = len(self.plan.rows) - len(self.rows)
        parts = [tabulate(self.summary(), tablefmt="plain"), memory_bar(self.plan), _table(self.rows)]
        if hidden > 0:
            parts.append(f"... and {hidden} smaller values")
        return "\n\n".join(parts)


def explain(plan: Plan) -> Explanation:
    """Return the explanation of a plan."""
    return Explanation(plan, tuple(sorted(plan.rows, key=lambda row: -row.bytes)))


def _table(rows: Sequence[Row]) -> str:
    head = ("value", "op", "shape", "dtype", "bytes", "module", "source", "decision", "reason", "recompute")
    body = [
        (
            shorten(r.name, 26),
            shorten(r.op, 22),
            "x".join(map(str, r.shape)),
            r.dtype,
            format_bytes(r.bytes),
            shorten(r.module, 26),
            shorten(r.source, 24),
            r.decision.value,
            r.reason.value,
            f"{r.runs} x {format_seconds(r.recompute_seconds)}" if r.decision is Decision.RECOMPUTED else "",
        )
        for r in rows
    ]
    return str(tabulate(body, headers=head, disable_numparse=True))


def memory_bar(plan: Plan, width: int = 72, height: int = 8) -> str:
    """Draw live bytes over the step, the forward left of the mark, the budget as a dashed line where there is one."""
    if not plan.profile:
        return "(no memory profile)"
    steps = len(plan.profile)
    width = min(width, steps)
    columns = [max(plan.profile[i * steps // width : max((i + 1) * steps // width, i * steps // width + 1)]) for i in range(width)]
    top = max(plan.peak_bytes, plan.budget_bytes or 0, 1) if (plan.budget_bytes or 0) < 2 * plan.peak_bytes else max(plan.peak_bytes, 1)
    lines = []
    for level in range(height, 0, -1):
        line = "".join(_block(value / top * height - (level - 1)) for value in columns)
        at_budget = plan.budget_bytes is not None and level - 1 < plan.budget_bytes / top * height <= level
        if at_budget:
            line = line.replace(" ", "-")
        label = format_bytes(top * level / height)
        lines.append(f"{label:>10} |{line}{'- budget' if at_budget else ''}")
    split = plan.forward_ops * width // steps
    lines.append(f"{'':>10} +{'-' * split}^{'-' * max(0, width - split - 1)}")
    lines.append(f"{'':>12}{'forward'.ljust(split)[: max(split, 7)]} backward ({steps} ops)")
    return "\n".join(lines)


def _block(fill: float) -> str:
    return BARS[max(0, min(8, round(fill * 8)))]


@dataclass(frozen=True)
class Report:
    """The plans of a backend; printed, one table a graph."""

    plans: tuple[Plan, ...]

    def __str__(self) -> str:
        if not self.plans:
            return "no graph with a backward has been compiled yet: run one forward of the compiled model with gradients enabled"
        count = len(self.plans)
        return "\n\n".join(f"graph {i} of {count}\n{plan.explain()}" for i, plan in enumerate(self.plans, 1))
