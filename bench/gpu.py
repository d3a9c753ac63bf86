"""The promises on a GPU: peaks by the allocator, predictions, and step times beside torch's ways.

A case is a model in one dtype with one inner compiler. In each, eight budgets from the
uncheckpointed peak down to the least; every step's peak by the allocator's statistics, beside the
plan's; then the steps of all ways timed in turn. A case that fails is a row with its error, and one
that the time does not allow is a row that says so. ``FXCKPT_TEST_DEVICE=cpu`` runs the same code at
tiny sizes, with ``fxckpt.measure_peak`` for the allocator's statistics.

    python bench/gpu.py [--only 'gpt2/bfloat16/*'] [--seconds 520] [--tests] [--out FOLDER]
"""

from __future__ import annotations

import argparse
import fnmatch
import gc
import json
import os
import platform
import random
import signal
import statistics
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from tabulate import tabulate
from torch._dynamo import config as dynamo_config
from torch._functorch import config as functorch_config

# Kineto, which measures peaks on the CPU, logs each start and stop.
os.environ.setdefault("KINETO_LOG_LEVEL", "99")
import fxckpt

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))
from gpu_models import MODELS, Made  # noqa: E402

DEVICE = os.environ.get("FXCKPT_TEST_DEVICE") or ("cuda" if torch.cuda.is_available() else "cpu")
POINTS = 8
TORCH_BUDGETS = (0.5, 0.2)
INNERS: dict[str, dict[str, Any]] = {
    "aot_eager": {"inner": "aot_eager"},
    "inductor": {"inner": "inductor"},
    "reduce-overhead": {"inner": "inductor", "mode": "reduce-overhead"},
}
STOCK: dict[str, dict[str, Any]] = {
    "aot_eager": {"backend": "aot_eager_default_partitioner"},
    "inductor": {},
    "reduce-overhead": {"mode": "reduce-overhead"},
}
"""What each inner compiler is compared with: options of plain ``torch.compile``."""
MIN_CUT = {"backend": "aot_eager_decomp_partition"}
"""torch's partitioner without Inductor."""
PROMISED = {"aot_eager": 0.001, "inductor": 0.01, "reduce-overhead": 0.01}
"""Promised relative error of the predicted peak."""


class OutOfTime(Exception):
    """The time of the run is over."""


@dataclass
class Way:
    """One way to run a step, and what was measured of it."""

    name: str
    budget_bytes: int | None = None
    predicted_bytes: int | None = None
    peak_bytes: int | None = None
    reserved_bytes: int | None = None
    """Bytes that the caching allocator held at most during the step; None on the CPU."""
    allocated_bytes: int | None = None
    """Bytes allocated at most during the step, parameters included."""
    predicted_seconds: float | None = None
    seconds: float | None = None
    """Median of the timed steps."""
    of_stock: float | None = None
    """Time, divided by that of stock."""
    compile_seconds: float | None = None
    error: str | None = None

    @property
    def is_kept(self) -> bool | None:
        """Whether the peak is within the budget; None without one."""
        if self.budget_bytes is None or self.peak_bytes is None:
            return None
        return self.peak_bytes <= self.budget_bytes

    @property
    def wrong_by(self) -> float | None:
        """Relative difference of the peak from its prediction."""
        if self.peak_bytes is None or not self.predicted_bytes:
            return None
        return self.peak_bytes / self.predicted_bytes - 1


@dataclass
class Case:
    """One model in one dtype with one inner compiler."""

    name: str
    ways: list[Way] = field(default_factory=list)
    seconds: float = 0.0
    error: str | None = None


def synchronize() -> None:
    """Wait for the device."""
    if DEVICE == "cuda":
        torch.cuda.synchronize()


class Runner:
    """Compiles a model in several ways and steps each of them."""

    def __init__(self, made: Made, inner: str) -> None:
        self.made = made
        self.inner = inner
        self.steps: dict[str, Callable[[], None]] = {}

    def compiled(self, options: dict[str, Any], by_block: bool) -> Callable[[], None]:
        """Return a step of the model, compiled apart from all others."""
        model = self.made.model

        # Compiled code hangs on the code object: each way needs one of its own.
        namespace: dict[str, Any] = {"model": model}
        exec("def forward(*inputs):\n    return model(*inputs)\n", namespace)
        forward = torch.compile(namespace["forward"], **options)

        def step() -> None:
            model.zero_grad(set_to_none=True)
            # Compiled code checks that the switch is as it was.
            self.made.switch(by_block)
            if self.inner == "reduce-overhead":
                torch.compiler.cudagraph_mark_step_begin()
            forward(*self.made.inputs).backward()

        return step

    def measure(self, way: Way, options: dict[str, Any], *, by_block: bool = False) -> None:
        """Compile a way, run it twice, and measure the peak of the third step."""
        begin = time.perf_counter()
        step = self.compiled(options, by_block)
        step()
        synchronize()
        way.compile_seconds = time.perf_counter() - begin
        step()
        self.made.model.zero_grad(set_to_none=True)
        way.peak_bytes = fxckpt.measure_peak(step)
        if DEVICE == "cuda":
            way.reserved_bytes = torch.cuda.max_memory_reserved()
            way.allocated_bytes = torch.cuda.max_memory_allocated()
        self.steps[way.name] = step

    def time(self, rounds: int) -> dict[str, float]:
        """Return the median seconds of a step in each way, run in turn in a new order each time."""
        times: dict[str, list[float]] = {name: [] for name in self.steps}
        order = list(self.steps)
        for _ in range(rounds):
            random.shuffle(order)
            for name in order:
                synchronize()
                begin = time.perf_counter()
                self.steps[name]()
                synchronize()
                times[name].append(time.perf_counter() - begin)
        return {name: statistics.median(found) for name, found in times.items()}


def fxckpt_ways(made: Made, inner: str, points: int) -> Iterator[tuple[Way, dict[str, Any]]]:
    """Yield fxckpt at its budgets; a way that has none is the uncheckpointed one.

    The budgets are shares of the uncheckpointed peak, evenly spaced down to the least peak that
    the planner finds. With Inductor that may be too low: then the least peak that the error names
    is the last budget.
    """
    plan = fxckpt.plan(made.model, *made.inputs, budget=None)
    floor = plan.floor_bytes / plan.baseline_peak_bytes
    shares = [1 - (1 - floor) * i / (points - 1) for i in range(points)]
    for share in dict.fromkeys(round(share, 4) for share in shares):
        # Rounding must not make the least peak infeasible.
        budget: Any = min(1.0, share + 1e-4)
        yield Way(f"fxckpt {share:.3f}"), {"budget": budget, **INNERS[inner]}


def guarded(run: Callable[[], object]) -> str | None:
    """Run a function and return its error as text, or None; time that is over ends all."""
    try:
        run()
    except (OutOfTime, KeyboardInterrupt):
        raise
    except BaseException as error:
        traceback.print_exc(limit=4)
        return f"{type(error).__name__}: {str(error).strip()[:600]}"
    return None


def run_fxckpt(runner: Runner, case: Case, points: int) -> None:
    """Measure fxckpt at its budgets."""
    for way, options in fxckpt_ways(runner.made, runner.inner, points):
        case.ways.append(way)
        backend = fxckpt.Backend(**options)
        way.error = guarded(lambda w=way, b=backend: runner.measure(w, {"backend": b}))
        floor = least_peak(way.error)
        if floor is not None:
            way.name, options["budget"] = "fxckpt, least", f"{floor}B"
            backend = fxckpt.Backend(**options)
            way.error = guarded(lambda w=way, b=backend: runner.measure(w, {"backend": b}))
        if not backend.plans:
            way.error = way.error or "it ran uncompiled"
        else:
            plan = backend.plans[-1]
            way.budget_bytes = plan.budget_bytes
            way.predicted_bytes = plan.compiled_peak_bytes or plan.peak_bytes
            way.predicted_seconds = plan.step_seconds + plan.recompute_seconds
        if floor is not None:
            break


def least_peak(error: str | None) -> int | None:
    """Return the least peak that a ``BudgetInfeasible`` names."""
    if error is None or "Raise the budget to at least '" not in error:
        return None
    return int(error.split("Raise the budget to at least '")[1].split("B'")[0])


def run_case(case: Case, made: Made, inner: str, points: int, rounds: int) -> None:
    """Measure every way of a case, then time them in turn."""
    runner, stock = Runner(made, inner), STOCK[inner]
    others: list[tuple[str, bool, float]] = [
        ("stock", False, 1.0),
        ("stock, checkpoint by block", True, 1.0),
        *((f"stock, activation_memory_budget={b}", False, b) for b in TORCH_BUDGETS),
    ]
    for name, by_block, budget in others:
        way = Way(name)
        case.ways.append(way)
        # The partitioner of aot_eager's default saves everything, at any budget.
        options = MIN_CUT if inner == "aot_eager" and budget < 1 else stock
        with functorch_config.patch(activation_memory_budget=budget):
            way.error = guarded(
                lambda w=way, o=options, b=by_block: runner.measure(w, o, by_block=b)
            )
    run_fxckpt(runner, case, points)
    times = runner.time(rounds)
    for way in case.ways:
        way.seconds = times.get(way.name)
        if way.seconds is not None and times.get("stock"):
            way.of_stock = way.seconds / times["stock"]


@contextmanager
def deadline(seconds: float) -> Iterator[None]:
    """Raise :class:`OutOfTime` in the block when its time is over."""

    def ring(*_: Any) -> None:
        raise OutOfTime

    before = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, max(seconds, 0.001))
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def names() -> list[str]:
    """Return the cases, what matters most first."""
    return [
        f"{model}/{dtype}/{inner}"
        for dtype in ("bfloat16", "float32")
        for inner in INNERS
        for model in MODELS
    ]


def facts() -> dict[str, Any]:
    """Return what the figures depend on."""
    found = {
        "device": DEVICE,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "fxckpt": fxckpt.__version__,
        "alloc_conf": os.environ.get("PYTORCH_CUDA_ALLOC_CONF", ""),
    }
    if DEVICE == "cuda":
        found |= {
            "name": torch.cuda.get_device_name(),
            "memory_bytes": torch.cuda.get_device_properties(0).total_memory,
            "cuda": torch.version.cuda,
            "cudnn": torch.backends.cudnn.version(),
        }
    return found


def run_tests(seconds: float) -> dict[str, Any]:
    """Run the GPU's tests in a process of their own; return the last lines of what they print."""
    # What a newer or older torch warns of is no failure here.
    options = ["-q", "-W", "default", "-m", "gpu", "-p", "no:cacheprovider"]
    command = [sys.executable, "-m", "pytest", *options, str(HERE.parent / "tests/gpu")]
    begin = time.perf_counter()
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=seconds, cwd=HERE.parent, check=False
        )
        code, text = done.returncode, done.stdout + done.stderr
    except subprocess.TimeoutExpired as error:
        said = error.stdout or ""
        # The output of a process that was stopped comes undecoded.
        text = said.decode(errors="replace") if isinstance(said, bytes) else said
        code, text = -1, f"{text}\nout of time"
    spent = time.perf_counter() - begin
    return {"code": code, "seconds": spent, "tail": text[-6000:]}


def show(cases: list[Case]) -> str:
    """Return all cases as one table."""

    def number(value: float | None, form: str, scale: float = 1.0) -> str:
        return "" if value is None else format(value / scale, form)

    rows = []
    for case in cases:
        if case.error is not None:
            rows.append((case.name, case.error[:60], *[""] * 8))
        rows += [
            (
                case.name,
                way.name if way.error is None else f"{way.name}: {way.error[:40]}",
                number(way.budget_bytes, ".1f", 2**20),
                number(way.peak_bytes, ".1f", 2**20),
                {True: "yes", False: "NO", None: ""}[way.is_kept],
                number(way.wrong_by, "+.3%"),
                number(
                    way.reserved_bytes
                    and way.allocated_bytes
                    and way.reserved_bytes / way.allocated_bytes,
                    ".3f",
                ),
                number(way.seconds, ".2f", 1e-3),
                number(way.of_stock, ".3f"),
                number(
                    way.seconds and way.predicted_seconds and way.predicted_seconds / way.seconds,
                    ".2f",
                ),
            )
            for way in case.ways
        ]
    head = (
        "case",
        "way",
        "budget MiB",
        "peak MiB",
        "kept",
        "off prediction",
        "reserved / allocated",
        "step ms",
        "of stock",
        "predicted / step",
    )
    return tabulate(rows, head, disable_numparse=True, colalign=("left", "left", *["right"] * 8))


def verdict(cases: list[Case]) -> dict[str, Any]:
    """Return how often each promise was kept."""
    ways = [(case, way) for case in cases for way in case.ways if way.budget_bytes is not None]
    measured = [(case, way) for case, way in ways if way.peak_bytes is not None]
    near = [abs(way.wrong_by or 0.0) <= PROMISED[case.name.split("/")[2]] for case, way in measured]
    return {
        "budgets": len(ways),
        "measured": len(measured),
        "kept": sum(bool(way.is_kept) for _, way in measured),
        "predicted": sum(near),
        "failed_cases": [case.name for case in cases if case.error],
        "failed_ways": [f"{c.name}: {w.name}" for c in cases for w in c.ways if w.error],
    }


def write(folder: Path, cases: list[Case], tests: dict[str, Any] | None) -> None:
    """Write the JSON and the table."""
    found = {
        "facts": facts(),
        "verdict": verdict(cases),
        "tests": tests,
        "cases": [asdict(case) for case in cases],
    }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "gpu.json").write_text(json.dumps(found, indent=1))
    (folder / "gpu.txt").write_text(f"{facts()}\n{show(cases)}\n{verdict(cases)}\n")


def run(name: str, end: float, points: int, rounds: int) -> Case:
    """Run one case within the time that is left."""
    case, begin = Case(name), time.monotonic()
    model, dtype, inner = name.split("/")

    def whole() -> None:
        made = MODELS[model](getattr(torch, dtype), DEVICE, is_tiny=DEVICE == "cpu")
        run_case(case, made, inner, points, rounds)

    if end - begin < 1:
        case.error = "skipped: out of time"
        return case
    try:
        with deadline(end - begin):
            case.error = guarded(whole)
    except OutOfTime:
        case.error = "cut short: out of time"
    case.seconds = time.monotonic() - begin
    torch._dynamo.reset()
    gc.collect()
    if DEVICE == "cuda":
        torch.cuda.empty_cache()
    return case


def main(arguments: list[str] | None = None) -> dict[str, Any]:
    """Run the cases, write what they show after each, and return the verdict."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="*", help="pattern of MODEL/DTYPE/INNER")
    parser.add_argument("--seconds", type=float, default=520.0)
    parser.add_argument("--points", type=int, default=POINTS)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--tests", action="store_true", help="run tests/gpu first")
    parser.add_argument("--out", type=Path, default=Path(os.environ.get("OUT") or HERE / "out"))
    options = parser.parse_args(arguments)
    end = time.monotonic() + options.seconds
    torch.manual_seed(0)
    tests = run_tests(options.seconds / 3) if options.tests else None
    cases: list[Case] = []
    # All ways of a case are in memory at once; beyond its limit Dynamo compiles no more of them.
    with dynamo_config.patch(recompile_limit=2 * (options.points + len(TORCH_BUDGETS) + 3)):
        for name in fnmatch.filter(names(), options.only):
            cases.append(run(name, end, options.points, options.rounds))
            print(f"{name}: {cases[-1].error or 'done'}, {cases[-1].seconds:.0f} s", flush=True)
            write(options.out, cases, tests)
    print(show(cases))
    if tests is not None:
        print(tests["tail"][-1500:])
    print(json.dumps(verdict(cases)))
    return verdict(cases)


if __name__ == "__main__":
    main()
