"""Report of everything that one backend compiled."""

from __future__ import annotations

from dataclasses import dataclass

from fxckpt.budget import format_bytes
from fxckpt.plans.types import Plan


@dataclass(frozen=True)
class Break:
    """Where a model broke into graphs, each planned on its own."""

    graph: int | None
    """The graph that ends there, counted from 1; None for one without a backward."""
    reason: str
    source: str
    bytes: int
    """What the graph hands on: held until its backward, whatever is planned."""

    def __str__(self) -> str:
        where = f"graph {self.graph}" if self.graph else "a graph without a backward"
        held = (
            f", and its outputs, {format_bytes(self.bytes)}, are held until its backward"
            if self.bytes
            else ""
        )
        at = f" at {self.source}" if self.source else ""
        return f"graph break: {where} ends{at} ({self.reason}): nothing is planned across it{held}"


def outputs_bytes(plan: Plan) -> int:
    """Return the bytes of what the forward of a plan returns."""
    return (
        0 if plan.step is None else sum(s.bytes for s in plan.step.program.storages if s.is_output)
    )


@dataclass(frozen=True)
class Report:
    """The plans of a backend; printed, one table a graph."""

    plans: tuple[Plan, ...]
    breaks: tuple[Break, ...] = ()

    def __str__(self) -> str:
        if not self.plans:
            return (
                "no graph with a backward has been compiled yet: run one forward of the compiled model with gradients enabled. If one was run, "
                "Dynamo left the model to Python (an RNN, a graph break in a loop): TORCH_LOGS=graph_breaks says where."
            )
        count = len(self.plans)
        graphs = [f"graph {i} of {count}\n{plan.explain()}" for i, plan in enumerate(self.plans, 1)]
        apart = (
            f"no graph break was seen between these {count} graphs, and each has the whole budget. If they are parts of one step, Dynamo left the "
            "function that calls them to Python: TORCH_LOGS=graph_breaks says where."
        )
        return "\n\n".join(
            (*graphs, *map(str, self.breaks), *([apart] if count > 1 and not self.breaks else []))
        )
