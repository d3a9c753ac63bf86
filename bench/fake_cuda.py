"""Plans for a GPU that is not here: models at real sizes, from shapes alone, in seconds.

Beside them, torch's own partitioner on the same graphs, at its own budgets; both are evaluated with
the same liveness and the same roofline of the device.

    python bench/fake_cuda.py [--device H100] [--only llama_8b] [--layers N] [--json FILE]
"""

from __future__ import annotations

import argparse
import inspect
import json
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import real_sizes
import torch
from peers import allocates, evaluate, torch_partition
from tabulate import tabulate

from fxckpt.costs import DeviceRoofline
from fxckpt.costs.devices import device_named
from fxckpt.errors import BudgetInfeasible
from fxckpt.passes.graphs import Joint
from fxckpt.planner.capture import capture_joint
from fxckpt.planner.pipeline import prepare
from fxckpt.planner.planned_device import planned_device
from fxckpt.planner.planner import Planner

MODELS: dict[str, Callable[..., real_sizes.Made]] = {
    "llama_8b": real_sizes.llama_8b,
    "qwen3_8b": real_sizes.qwen3_8b,
    "gpt2_xl": real_sizes.gpt2_xl,
    "sdxl_unet": real_sizes.sdxl_unet,
    "vit_large": real_sizes.vit_large,
}
FRACTIONS = (0.9, 0.8, 0.7, 0.6, 0.5, 0.4)
"""Budgets of fxckpt, of the save-all peak."""
TORCH_BUDGETS = (1.0, 0.7, 0.3, 0.0)


@dataclass(frozen=True)
class Row:
    """One plan of one graph."""

    model: str
    plan: str
    peak_bytes: int
    extra: float | None
    """Extra time of the step, as a share of it."""
    bound: float | None
    """Lower bound of the extra time at this peak."""
    seconds: float
    """Seconds of planning."""


def capture(made: real_sizes.Made, device: str) -> Joint:
    """Return the normalized joint graph of a model on a device that is not here."""
    model, inputs = made
    joint = capture_joint(model, (), inputs, planned_device(device, is_on_meta=True))
    prepare(joint)
    return joint


def plans(name: str, joint: Joint, device: str) -> Iterator[Row]:
    """Yield the plans of one graph: at each budget, at each peak of torch's, and torch's."""
    cost = DeviceRoofline.of(device)
    step = sum(cost.seconds(n) for n in joint.module.graph.nodes if allocates(n))

    def planned(label: str, budget: float | int) -> Row:
        begin = time.perf_counter()
        planner = Planner(budget, measure_workspace=False, device=device_named(device))
        try:
            _, plan = planner.plan(joint)
        except BudgetInfeasible as error:
            seconds = time.perf_counter() - begin
            return Row(name, f"{label}: the least peak", error.floor_bytes, None, None, seconds)
        extra, bound = (
            s / plan.step_seconds for s in (plan.recompute_seconds, plan.lower_bound_seconds)
        )
        seconds = time.perf_counter() - begin
        return Row(name, label, plan.peak_bytes, extra, bound, seconds)

    yield planned("fxckpt 1.0", 1.0)
    for fraction in FRACTIONS:
        row = planned(f"fxckpt {fraction}", fraction)
        yield row
        if row.extra is None:
            break
    for budget in TORCH_BUDGETS:
        begin = time.perf_counter()
        halves = torch_partition(joint.module, budget, num_fwd_outputs=joint.num_fwd_outputs)
        seconds = time.perf_counter() - begin
        figures = evaluate(*halves, cost, num_fwd_outputs=joint.num_fwd_outputs)
        yield Row(
            name, f"torch {budget}", figures.peak_bytes, figures.seconds / step - 1, None, seconds
        )
        yield planned(f"fxckpt, at torch {budget}'s peak", figures.peak_bytes)


def show(rows: list[Row]) -> str:
    """Return the plans of one graph as a table."""
    whole = rows[0].peak_bytes

    def percent(share: float | None) -> str:
        return "" if share is None else f"{share:+.2%}"

    cells = [
        (
            r.plan,
            f"{r.peak_bytes / 2**30:.2f}",
            f"{r.peak_bytes / whole:.2f}",
            percent(r.extra),
            percent(r.bound),
            f"{r.seconds:.2f}",
        )
        for r in rows
    ]
    head = ("plan", "peak GiB", "of save-all", "extra time", "bound", "planner s")
    return tabulate(cells, head, disable_numparse=True, colalign=("left", *["right"] * 5))


def main(arguments: list[str] | None = None) -> list[Row]:
    """Print one table for each model, and return the rows."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="H100")
    parser.add_argument("--only", action="append", choices=MODELS)
    parser.add_argument("--layers", type=int, help="fewer layers than the model has")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(arguments)
    warnings.filterwarnings("ignore", message=".*an autograd kernel was not registered.*")
    rows: list[Row] = []
    for name in options.only or MODELS:
        make = MODELS[name]
        shape: dict[str, Any] = {}
        if options.layers and "layers" in inspect.signature(make).parameters:
            shape["layers"] = options.layers
        made = make(**shape)
        count = sum(p.numel() for p in made[0].parameters())
        inputs = ", ".join(f"{k} {'x'.join(map(str, v.shape))}" for k, v in made[1].items())
        begin = time.perf_counter()
        joint = capture(made, options.device)
        seconds = time.perf_counter() - begin
        nodes = len(joint.module.graph.nodes)
        print(
            f"\n{name}: {count / 1e9:.3f} B parameters, bfloat16, {inputs}, {options.device}; "
            f"{nodes} joint nodes, captured in {seconds:.1f} s",
            flush=True,
        )
        found = list(plans(name, joint, options.device))
        print(show(found), flush=True)
        rows += found
        torch._dynamo.reset()
    if options.json:
        options.json.write_text(json.dumps([asdict(r) for r in rows], indent=1))
    return rows


if __name__ == "__main__":
    main()
