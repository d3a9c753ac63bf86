"""The planner at given budgets, beside plans made by hand and torch's default partitioner.

All plan the same graphs and are evaluated with the same liveness and the same costs. Peers write
nothing in place, so that the table of such plans is without them.

    python bench/targets.py
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from models import gpt2, llama_style
from peers import allocates, evaluate, torch_partition
from tabulate import tabulate

from fxckpt.costs.models import CostModel, FlopCost, checked
from fxckpt.costs.roofline import Roofline
from fxckpt.passes.analysis.joint import read_facts
from fxckpt.passes.graphs import Joint
from fxckpt.planner.capture import capture_joint
from fxckpt.planner.pipeline import prepare
from fxckpt.solver.program import IN_BACKWARD, Program
from fxckpt.solver.search.price_search import PriceSearch

TORCH_BUDGETS = (1.0, 0.5, 0.2, 0.05, 0.0)
ROUNDING = 0.0499
"""Tolerance in MB, as the targets are known to one decimal."""


@dataclass(frozen=True)
class Target:
    """One graph and its budgets."""

    name: str
    joint: Joint
    cost: CostModel
    megabytes: tuple[float, ...]
    by_hand: tuple[tuple[str, float, float], ...] = ()
    """Plans made by hand: name, peak in MB, extra time in percent."""
    tight: PriceSearch = field(default_factory=lambda: PriceSearch(path_rounds=300))
    """The search with tighter bounds."""
    with_gradients: bool = True
    """Whether the gradients that the backward returns count towards the peak."""
    in_place: bool = False
    """Whether ops write into operands that die, as the halves of aot_eager do; peers' do not."""

    def program(self) -> Program:
        """Return the solver's program of the graph."""
        facts = read_facts(
            self.joint.module,
            num_fwd_outputs=self.joint.num_fwd_outputs,
            cost=checked(self.cost),
            in_place=self.in_place,
        )
        return facts.program if self.with_gradients else without_gradients(facts.program)


def without_gradients(program: Program) -> Program:
    """Return ``program`` with zero bytes for the storages that the backward returns."""
    returned = {
        s for s in program.backward[-1].reads if program.storages[s].producer == IN_BACKWARD
    }
    return replace(
        program,
        storages=tuple(
            replace(s, bytes=0) if i in returned else s for i, s in enumerate(program.storages)
        ),
    )


def rows(target: Target) -> Iterator[tuple[str, ...]]:
    """Yield the plans of a target, made by one frontier call, and those of its peers."""
    program = target.program()
    step = program.step_seconds
    limits = [int((mb + ROUNDING) * 1e6) for mb in target.megabytes]
    start = time.process_time()
    PriceSearch().frontier(program, lambda floor, baseline: limits)
    seconds = time.process_time() - start
    start = time.process_time()
    found = target.tight.frontier(program, lambda floor, baseline: limits)
    tight_seconds = time.process_time() - start - seconds
    for f in reversed(found):
        assert f.best is not None and f.limit is not None
        extra, least = f.best.simulation.extra_seconds, f.bound.seconds
        gap = f"{(step + extra) / (step + least) - 1:+.2%}"
        peak = f.best.simulation.peak_bytes
        yield (
            f"fxckpt {f.limit / 1e6:.1f}",
            f"{peak / 1e6:.1f}",
            f"{extra / step:+.2%}",
            f"{least / step:+.2%}",
            gap,
        )
    further = PriceSearch().further(program, replace(found[0], limit=0, best=None))
    for name, floor in (("the floor", found[0].least_peak), ("below it", further.least_peak)):
        yield (
            f"fxckpt, {name}",
            f"{floor.simulation.peak_bytes / 1e6:.1f}",
            f"{floor.simulation.extra_seconds / step:+.2%}",
            f"no peak below {found[0].peak_bound_bytes / 1e6:.1f}",
            f"{floor.simulation.peak_bytes / found[0].peak_bound_bytes - 1:+.2%}",
        )
    for name, peak, percent in target.by_hand:
        yield f"by hand: {name}", f"{peak:.1f}", f"{percent:+.2f}%", "", ""
    yield "fxckpt's search, all budgets", "", f"{seconds:.1f} s", "", ""
    yield "fxckpt's tighter bounds, all budgets", "", f"{tight_seconds:.1f} s", "", ""
    if target.in_place:
        return
    graph_seconds = sum(
        target.cost.seconds(n) for n in target.joint.module.graph.nodes if allocates(n)
    )
    for budget in TORCH_BUDGETS:
        forward, backward = torch_partition(
            target.joint.module, budget, num_fwd_outputs=target.joint.num_fwd_outputs
        )
        figures = evaluate(
            forward,
            backward,
            target.cost,
            num_fwd_outputs=target.joint.num_fwd_outputs,
            with_gradients=target.with_gradients,
        )
        yield (
            f"torch {budget}",
            f"{figures.peak_bytes / 1e6:.1f}",
            f"{figures.seconds / graph_seconds - 1:+.2%}",
            "",
            "",
        )


def capture(name: str) -> Joint:
    """Return the normalized joint graph of a model."""
    model, inputs = {"gpt2": gpt2, "llama": llama_style}[name]()
    joint = capture_joint(model, (), inputs)
    prepare(joint)
    return joint


def main() -> None:
    """Print one table for each target."""
    tight = PriceSearch(path_rounds=2000, path_moments=32)
    targets = (
        Target(
            "Llama-style, 32 layers, d 256, 2048 tokens, FLOPs, without parameter gradients",
            capture("llama"),
            FlopCost(),
            (963.6, 573.6, 181.4, 125.9, 100.0, 79.9, 60.0, 50.4),
            (
                ("save matmuls and attention", 963.6, 0.0),
                ("every second matmul, attention", 573.6, 5.8),
                ("save attention", 181.4, 11.5),
                ("checkpoint every block", 125.9, 26.9),
            ),
            tight=tight,
            with_gradients=False,
        ),
        Target(
            "The same stack, written in place",
            capture("llama"),
            FlopCost(),
            (125.9, 100.0, 79.9, 60.0, 50.4, 45.0, 40.0, 36.0),
            tight=tight,
            with_gradients=False,
            in_place=True,
        ),
        Target(
            "GPT-2, 12 layers, d 768, 4 x 256 tokens, dropout, 100 TFLOP/s and 1.5 TB/s",
            capture("gpt2"),
            Roofline(100e12, 1.5e12, 0.0),
            (1594, 1396, 1138, 1000, 900, 850),
        ),
    )
    for target in targets:
        print(f"\n{target.name}")
        head = ("plan", "peak MB", "extra time", "least possible", "gap")
        print(
            tabulate(
                list(rows(target)), head, disable_numparse=True, colalign=("left", *["right"] * 4)
            ),
            flush=True,
        )


if __name__ == "__main__":
    main()
