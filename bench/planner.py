"""The planner: its time, and its plans beside those of torch's default partitioner.

Both plan the same graphs and are evaluated with the same liveness and the same costs.

    python bench/planner.py
"""

from __future__ import annotations

import copy
import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass

from models import gpt2, llama_style
from peers import allocates, evaluate, torch_partition
from tabulate import tabulate
from torch import fx, nn

from fxckpt.costs.models import CostModel
from fxckpt.costs.roofline import Roofline
from fxckpt.errors import BudgetInfeasible
from fxckpt.passes.graphs import Joint
from fxckpt.planner.capture import capture_joint
from fxckpt.planner.pipeline import Emission, emit_halves, prepare
from fxckpt.planner.planner import Planner

COST = Roofline(100e12, 1.5e12, 0.0)
"""A generic GPU: 100 TFLOP/s, 1.5 TB/s."""
FRACTIONS = (0.9, 0.7, 0.5, 0.3)
TORCH_BUDGETS = (1.0, 0.5, 0.1, 0.0)
REPEATS = 3
POINTS = 16


@dataclass(frozen=True)
class Row:
    """One plan of one graph: peak in MB, extra time of the step, seconds of planning."""

    graph: str
    nodes: int
    plan: str
    peak_mb: float | None
    extra: str
    seconds: str


def capture(model: nn.Module, inputs: dict[str, object]) -> Joint:
    """Return the normalized joint graph of a model."""
    joint = capture_joint(model, (), inputs)
    prepare(joint)
    return joint


def rows(name: str, joint: Joint, cost: CostModel) -> Iterator[Row]:
    """Yield the plans of one graph: at each budget, a whole frontier, and torch's."""
    nodes = len(joint.module.graph.nodes)
    step = sum(cost.seconds(n) for n in joint.module.graph.nodes if allocates(n))
    for fraction in (1.0, *FRACTIONS):
        planner = Planner(fraction, None, cost, measure_workspace=False)
        times = []
        try:
            for _ in range(REPEATS):
                start = time.perf_counter()
                planner.plan(joint)
                times.append(time.perf_counter() - start)
        except BudgetInfeasible as error:
            yield Row(
                name,
                nodes,
                f"fxckpt {fraction}",
                error.floor_bytes / 1e6,
                "infeasible; the floor",
                "",
            )
            continue
        forward, backward = plan_halves(joint, planner)
        figures = evaluate(forward, backward, cost, num_fwd_outputs=joint.num_fwd_outputs)
        extra = f"{figures.seconds / step - 1:+.2%}"
        yield Row(
            name,
            nodes,
            f"fxckpt {fraction}",
            figures.peak_bytes / 1e6,
            extra,
            f"{statistics.median(times):.2f}",
        )
    start = time.perf_counter()
    Planner(None, None, cost, measure_workspace=False).frontier(joint, points=POINTS)
    yield Row(
        name,
        nodes,
        f"fxckpt, a frontier of {POINTS}",
        None,
        "",
        f"{time.perf_counter() - start:.2f}",
    )
    for budget in TORCH_BUDGETS:
        start = time.perf_counter()
        forward, backward = torch_partition(
            joint.module, budget, num_fwd_outputs=joint.num_fwd_outputs
        )
        seconds = time.perf_counter() - start
        figures = evaluate(forward, backward, cost, num_fwd_outputs=joint.num_fwd_outputs)
        yield Row(
            name,
            nodes,
            f"torch {budget}",
            figures.peak_bytes / 1e6,
            f"{figures.seconds / step - 1:+.2%}",
            f"{seconds:.2f}",
        )


def plan_halves(joint: Joint, planner: Planner) -> tuple[fx.GraphModule, fx.GraphModule]:
    """Return the forward and the backward of a plan of a copy of ``joint``."""
    copied = copy.deepcopy(joint.module)
    facts, plan = planner.plan(Joint(copied, joint.num_fwd_outputs))
    return emit_halves(Emission(Joint(copied, joint.num_fwd_outputs), facts, plan))


def main() -> None:
    """Print one table for each graph."""
    graphs = {
        "GPT-2, 12 layers d 768": gpt2(),
        "GPT-2, 29 layers d 384": gpt2(29, 384, vocabulary=256),
        "Llama-style, 32 layers": llama_style(),
    }
    for name, (model, inputs) in graphs.items():
        table = list(rows(name, capture(model, inputs), COST))
        print(f"\n{name}: {table[0].nodes} joint nodes")
        cells = [
            (r.plan, "" if r.peak_mb is None else f"{r.peak_mb:.1f}", r.extra, r.seconds)
            for r in table
        ]
        print(
            tabulate(
                cells,
                ("plan", "peak MB", "extra time", "planner s"),
                disable_numparse=True,
                colalign=("left", *["right"] * 3),
            )
        )


if __name__ == "__main__":
    main()
