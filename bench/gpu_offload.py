"""Offload on a GPU: steps within a budget that may send values to the host, beside other ways.

A Llama-like stack in bfloat16. At each budget, a share of the uncheckpointed peak, plans that
recompute alone and plans that may send values away too; beside them torch's ``save_on_cpu`` with
page-locked memory and torch's checkpoint of every block. Peaks are the allocator's of a third
step. The steps of all ways are timed in turn, the device waited for. A way that fails is a row
with its error. ``FXCKPT_TEST_DEVICE=cpu`` runs the same code at tiny sizes.

    python bench/gpu_offload.py [--inners aot_eager inductor] [--shares 0.6 0.4 0.25]
        [--seconds 200] [--out FOLDER]

Exit codes: 0, all ways ran; 1, one failed or the time did not allow it; 2, no such device.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import sys
import time
import traceback
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from tabulate import tabulate
from torch._dynamo import config as dynamo_config

# Kineto, which measures peaks on the CPU, logs each start and stop.
os.environ.setdefault("KINETO_LOG_LEVEL", "99")
import fxckpt

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))
from gpu_device import NoDevice, chosen_device  # noqa: E402
from gpu_models import MODELS, Made  # noqa: E402

DONE, FAILED, USAGE = 0, 1, 2
"""Exit codes."""
LIMIT = "64GiB"
SHARES = (0.6, 0.4, 0.25)
STOCK = {"aot_eager": {"backend": "aot_eager_default_partitioner"}, "inductor": {}}
"""What the steps of each inner compiler are compared with: options of ``torch.compile``."""
ROUNDS = 7
SKIPPED = "skipped: out of time"


@dataclass
class Row:
    """One way to run a step, and what was measured of it."""

    inner: str
    way: str
    budget_bytes: int | None = None
    peak_bytes: int | None = None
    planned_bytes: int | None = None
    away_bytes: int | None = None
    """Most bytes on the host, by the tier."""
    planned_away_bytes: int | None = None
    recompute_seconds: float | None = None
    stall_seconds: float | None = None
    seconds: float | None = None
    """Median of the timed steps."""
    of_uncheckpointed: float | None = None
    compile_seconds: float | None = None
    error: str | None = None
    least_bytes: int | None = None
    """The least peak that was found, of a budget below it, which is no failure."""

    @property
    def is_kept(self) -> bool | None:
        """Whether the peak is within the budget; None without one of them."""
        if self.budget_bytes is None or self.peak_bytes is None:
            return None
        return self.peak_bytes <= self.budget_bytes

    @property
    def is_failed(self) -> bool:
        """Whether the way failed, or broke its budget."""
        return self.is_kept is False or (self.error is not None and self.least_bytes is None)


class Bench:
    """Runs the ways of one inner compiler."""

    def __init__(self, made: Made, inner: str, device: str, end: float) -> None:
        self.made, self.inner, self.device, self.end = made, inner, device, end
        self.steps: list[tuple[Row, Callable[[], None]]] = []
        self.rows: list[Row] = []

    def synchronize(self) -> None:
        """Wait for the device."""
        if self.device == "cuda":
            torch.cuda.synchronize()

    def compiled(self, options: dict[str, Any], by_block: bool = False) -> Callable[[], None]:
        """Return a step of the model, compiled apart from all others."""
        model = self.made.model
        # Compiled code hangs on the code object: each way needs one of its own.
        namespace: dict[str, Any] = {"model": model}
        exec("def forward(*inputs):\n    return model(*inputs)\n", namespace)
        forward = torch.compile(namespace["forward"], **options)

        def step() -> None:
            # Compiled code checks that the switch is as it was.
            self.made.switch(by_block)
            forward(*self.made.inputs).backward()

        return step

    def eager(self, on_host: bool) -> Callable[[], None]:
        """Return a step of the model as it is, with what is saved on the host or not."""

        def step() -> None:
            self.made.switch(False)
            # Beyond the CPU there is no other memory to pin.
            pins = self.device == "cuda"
            saves = torch.autograd.graph.save_on_cpu(pin_memory=pins) if on_host else nullcontext()
            with saves:
                loss = self.made.model(*self.made.inputs)
            loss.backward()

        return step

    def run(self, way: str, make: Callable[[], Callable[[], None]], tier: Any = None) -> Row:
        """Measure a way; its error is kept in the row."""
        row = Row(self.inner, way)
        self.rows.append(row)
        if time.monotonic() > self.end:
            row.error = SKIPPED
            return row
        try:
            self.measure(row, make(), tier)
        except fxckpt.BudgetInfeasible as error:
            row.least_bytes = error.floor_bytes
            row.error = f"the least is {error.floor_bytes / 1e6:.1f} MB"
        except Exception as error:
            traceback.print_exc(limit=6)
            row.error = f"{type(error).__name__}: {str(error).strip()[:400]}"
        gc.collect()
        if self.device == "cuda":
            torch.cuda.empty_cache()
        print(f"{self.inner}, {way}: {row.error or 'measured'}", flush=True)
        return row

    def measure(self, row: Row, step: Callable[[], None], tier: Any) -> None:
        """Run a step twice, and measure the peak of the third, on the device and on the host."""
        model = self.made.model
        begin = time.perf_counter()
        for _ in range(2):
            model.zero_grad(set_to_none=True)
            step()
        self.synchronize()
        row.compile_seconds = time.perf_counter() - begin
        model.zero_grad(set_to_none=True)
        if tier is not None:
            tier.restart_peak()  # The rates were measured by copies to it.
        row.peak_bytes = fxckpt.measure_peak(step)
        row.away_bytes = None if tier is None else tier.peak_bytes
        self.steps.append((row, step))

    def fxckpt(self, way: str, budget: int, offload: bool) -> Row:
        """Measure a plan within a budget."""
        host = fxckpt.tiers.Host(LIMIT) if offload else None
        options: dict[str, Any] = {"inner": self.inner, "offload": host}
        backend = fxckpt.Backend(f"{budget}B", **options)
        row = self.run(way, lambda: self.compiled({"backend": backend}), host)
        row.budget_bytes = budget
        if not backend.plans:
            row.error = row.error or "it ran uncompiled"
            return row
        plan = backend.plans[-1]
        row.planned_bytes = plan.compiled_peak_bytes or plan.peak_bytes
        row.recompute_seconds, row.stall_seconds = plan.recompute_seconds, plan.stall_seconds
        row.planned_away_bytes = plan.away_bytes
        return row

    def run_all(self, shares: list[float]) -> None:
        """Measure all ways, then time them in turn."""
        stock = STOCK[self.inner]
        uncheckpointed = self.run("uncheckpointed", lambda: self.compiled(stock))
        self.run("eager", lambda: self.eager(on_host=False))
        self.run("checkpoint by block", lambda: self.compiled(stock, by_block=True))
        self.run("eager, save_on_cpu", lambda: self.eager(on_host=True))
        least: dict[str, int] = {}
        """The least peak of each kind of plan, from the first budget below it."""
        for share in shares if uncheckpointed.peak_bytes else ():
            budget = int(share * uncheckpointed.peak_bytes)
            for kind in ("recompute", "offload"):
                if kind in least:
                    continue
                row = self.fxckpt(f"fxckpt, {kind} {share:.0%}", budget, kind == "offload")
                if row.least_bytes is not None:
                    least[kind] = row.least_bytes
                    self.fxckpt(f"fxckpt, {kind} least", row.least_bytes, kind == "offload")
        self.time(uncheckpointed)

    def time(self, uncheckpointed: Row) -> None:
        """Time the ways in turn; a step that fails leaves the round."""
        times: dict[str, list[float]] = {row.way: [] for row, _ in self.steps}
        for _ in range(ROUNDS):
            for row, step in self.steps:
                if row.error is not None:
                    continue
                self.made.model.zero_grad(set_to_none=True)
                self.synchronize()
                begin = time.perf_counter()
                try:
                    step()
                    self.synchronize()
                except Exception as error:
                    traceback.print_exc(limit=6)
                    row.error = f"timed: {type(error).__name__}: {str(error).strip()[:400]}"
                    continue
                times[row.way].append(time.perf_counter() - begin)
        for row, _ in self.steps:
            row.seconds = statistics.median(times[row.way]) if times[row.way] else None
        for row, _ in self.steps:
            if row.seconds and uncheckpointed.seconds:
                row.of_uncheckpointed = row.seconds / uncheckpointed.seconds


def table(rows: list[Row]) -> str:
    """Return the rows as text."""

    def text(value: float | None, scale: float, digits: int) -> str:
        return "" if value is None else f"{value * scale:.{digits}f}"

    headers = (
        "inner",
        "way",
        "budget MB",
        "peak MB",
        "plan MB",
        "away MB",
        "recompute ms",
        "stall ms",
        "step ms",
        "x uncheckpointed",
        "kept",
        "error",
    )
    found = [
        (
            row.inner,
            row.way,
            text(row.budget_bytes, 1e-6, 1),
            text(row.peak_bytes, 1e-6, 1),
            text(row.planned_bytes, 1e-6, 1),
            text(row.away_bytes, 1e-6, 1),
            text(row.recompute_seconds, 1e3, 2),
            text(row.stall_seconds, 1e3, 2),
            text(row.seconds, 1e3, 2),
            text(row.of_uncheckpointed, 1, 3),
            {None: "", True: "yes", False: "NO"}[row.is_kept],
            (row.error or "").splitlines()[0][:60] if row.error else "",
        )
        for row in rows
    ]
    return tabulate(found, headers, disable_numparse=True, stralign="right")


def write(out: Path, device: str, rates: tuple[float, float] | None, rows: list[Row]) -> None:
    """Write what is known so far."""
    out.mkdir(parents=True, exist_ok=True)
    name = torch.cuda.get_device_name() if device == "cuda" else "cpu"
    found = {
        "device": name,
        "torch": torch.__version__,
        "bytes_per_second": rates,
        "rows": [asdict(row) for row in rows],
    }
    (out / "gpu_offload.json").write_text(json.dumps(found, indent=1) + "\n")
    link = "" if rates is None else f"\nlink: {rates[0] / 1e9:.1f}, {rates[1] / 1e9:.1f} GB/s"
    text = f"{name}, torch {torch.__version__}{link}\n{table(rows)}\n"
    (out / "gpu_offload.txt").write_text(text)


def main(arguments: list[str] | None = None) -> int:
    """Run all ways, write what they show, and return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--inners", nargs="+", choices=tuple(STOCK), default=list(STOCK))
    parser.add_argument("--shares", type=float, nargs="+", default=list(SHARES))
    parser.add_argument("--seconds", type=float, default=200.0, help="ways begin in 3/4 of it")
    parser.add_argument("--out", type=Path, default=Path(os.environ.get("OUT") or HERE / "out"))
    options = parser.parse_args(arguments)
    begin = time.monotonic()
    try:
        device = chosen_device()
    except NoDevice as error:
        print(f"bench/gpu_offload.py: {error}", file=sys.stderr)
        return USAGE
    rows: list[Row] = []
    rates: tuple[float, float] | None = None
    try:
        rates = fxckpt.tiers.Host(LIMIT).rates(torch.device(device))
    except Exception:
        traceback.print_exc(limit=6)
    for i, inner in enumerate(options.inners):
        torch.manual_seed(0)
        torch._dynamo.reset()
        made = MODELS["llama"](torch.bfloat16, device, is_tiny=device == "cpu")
        share = 0.75 * (i + 1) / len(options.inners)
        bench = Bench(made, inner, device, begin + share * options.seconds)
        # Beyond its limit Dynamo compiles no more ways of the one model.
        with dynamo_config.patch(recompile_limit=4 * (len(options.shares) + 4)):
            bench.run_all(options.shares)
        rows += bench.rows
        write(options.out, device, rates, rows)
        del made, bench
        gc.collect()
    print((options.out / "gpu_offload.txt").read_text())
    return FAILED if any(row.is_failed for row in rows) else DONE


if __name__ == "__main__":
    sys.exit(main())
