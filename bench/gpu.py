"""The promises on a GPU: peaks by the allocator, predictions, and step times beside torch's ways.

A case is a model in one dtype with one inner compiler. In each, eight budgets from the
uncheckpointed peak down to the least; every step's peak by the allocator's statistics, beside the
plan's; then the steps of all ways timed in turn. A case that fails is a row with its error, and one
that the time does not allow is a row that says so. ``FXCKPT_TEST_DEVICE=cpu`` runs the same code at
tiny sizes, with ``fxckpt.measure_peak`` for the allocator's statistics; without it and without a
GPU nothing runs.

    python bench/gpu.py [--only 'gpt2/bfloat16/*'] [--seconds 520] [--tests] [--out FOLDER]

Exit codes: 0, all that ran is as promised; 1, a test or a row failed, a promise was broken, or
nothing was measured, each in a line of its own; 2, unusable arguments, or no such device.
"""

from __future__ import annotations

import argparse
import copy
import fnmatch
import gc
import json
import math
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
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from tabulate import tabulate
from torch import nn
from torch._dynamo import config as dynamo_config
from torch._functorch import config as functorch_config

# Kineto, which measures peaks on the CPU, logs each start and stop.
os.environ.setdefault("KINETO_LOG_LEVEL", "99")
import fxckpt

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))
from gpu_device import VARIABLE, NoDevice, chosen_device  # noqa: E402
from gpu_models import MODELS, Made  # noqa: E402

DONE, FAILED, USAGE = 0, 1, 2
"""Exit codes."""
POINTS = 8
DTYPES = ("bfloat16", "float32")
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
BLOCK_SHARES = (0.8, 0.6, 0.4)
OFFLOAD_SHARES = (0.7, 0.5)
"""Shares of the peak of the model as it is that its blocks have, and of the plan's own peak."""
MIN_CUT = {"backend": "aot_eager_decomp_partition"}
"""torch's partitioner without Inductor."""
PROMISED = {"aot_eager": 0.001, "inductor": 0.01, "reduce-overhead": 0.01}
"""Promised relative error of the predicted peak."""


SKIPPED, CUT = "skipped: out of time", "cut short: out of time"
"""Errors of cases that the time did not allow."""


class OutOfTime(BaseException):
    """The time of the run is over; compilers make no error of their own of it, as of others."""


RINGS_AGAIN = 1.0
"""Seconds after which the end of the time is told again to code that went on."""


@dataclass
class Way:
    """One way to run a step, and what was measured of it."""

    name: str
    budget_bytes: int | None = None
    predicted_bytes: int | None = None
    peak_bytes: int | None = None
    first_peak_bytes: int | None = None
    """Peak of the first step, what the compiler took included."""
    reserved_bytes: int | None = None
    """Bytes that the caching allocator held at most during the step; None on the CPU."""
    allocated_bytes: int | None = None
    """Bytes allocated at most during the step, parameters included."""
    predicted_seconds: float | None = None
    away_bytes: int | None = None
    """Most bytes on the host."""
    stall_seconds: float | None = None
    """Seconds that the plan waits for copies."""
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

    @property
    def is_unfinished(self) -> bool:
        """Whether the time did not allow the case."""
        return self.error in (SKIPPED, CUT)


def synchronize(device: str) -> None:
    """Wait for the device."""
    if device == "cuda":
        torch.cuda.synchronize()


class Runner:
    """Compiles a model in several ways and steps each of them."""

    def __init__(self, made: Made, inner: str, device: str) -> None:
        self.made = made
        self.device = device
        self.inner = inner
        self.steps: dict[str, Callable[[], None]] = {}

    def compiled(self, options: dict[str, Any], by_block: bool = False) -> Callable[[], None]:
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

    def uncompiled(self) -> Callable[[], None]:
        """Return a step of the model as it is."""

        def step() -> None:
            self.made.model.zero_grad(set_to_none=True)
            self.made.switch(False)
            self.made.model(*self.made.inputs).backward()

        return step

    def by_blocks(self, model: Any, backend: fxckpt.Backend) -> Callable[[], None]:
        """Return a step of a model, each block compiled by one backend."""
        for block in model.stack.blocks:
            block.compile(backend=backend)

        def step() -> None:
            model.zero_grad(set_to_none=True)
            model(*self.made.inputs).backward()

        return step

    def measure(self, way: Way, step: Callable[[], None], model: nn.Module | None = None) -> None:
        """Run a way's step, which compiles it, twice, and measure the peak of the third.

        ``model`` has the gradients, which no step begins with; None is the one that was made.
        """
        model = model or self.made.model
        model.zero_grad(set_to_none=True)
        begin = time.perf_counter()
        way.first_peak_bytes = fxckpt.measure_peak(step)
        synchronize(self.device)
        way.compile_seconds = time.perf_counter() - begin
        if self.device == "cuda":
            # What other ways and the compiler took is not what this way's step takes.
            torch.cuda.empty_cache()
        step()
        model.zero_grad(set_to_none=True)
        way.peak_bytes = fxckpt.measure_peak(step)
        if self.device == "cuda":
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
                synchronize(self.device)
                begin = time.perf_counter()
                self.steps[name]()
                synchronize(self.device)
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


@dataclass(frozen=True)
class Failure:
    """What an error said; the error itself would hold the tensors of its frames."""

    text: str
    least_bytes: int | None
    """The least peak that was found, of a budget that is below it."""


def guarded(run: Callable[[], object]) -> Failure | None:
    """Run a function and return its failure, or None; time that is over ends all."""
    try:
        run()
    except (OutOfTime, KeyboardInterrupt):
        raise
    except BaseException as error:
        if is_of_the_time(error):
            raise OutOfTime from error
        traceback.print_exc(limit=4)
        least = error.floor_bytes if isinstance(error, fxckpt.BudgetInfeasible) else None
        return Failure(f"{type(error).__name__}: {str(error).strip()[:600]}", least)
    return None


def is_of_the_time(error: BaseException | None) -> bool:
    """Return whether an error is, or followed from, the end of the time."""
    while error is not None and not isinstance(error, OutOfTime):
        error = error.__cause__ or error.__context__
    return error is not None


def said(failure: Failure | None) -> str | None:
    """Return the text of a failure."""
    return None if failure is None else failure.text


def run_fxckpt(runner: Runner, case: Case, points: int) -> None:
    """Measure fxckpt at its budgets."""
    for way, options in fxckpt_ways(runner.made, runner.inner, points):
        case.ways.append(way)
        least = run_budget(runner, way, options)
        if least is not None:
            way.name, options["budget"] = "fxckpt, least", f"{least}B"
            run_budget(runner, way, options)
            break


def run_budget(runner: Runner, way: Way, options: dict[str, Any]) -> int | None:
    """Measure the whole model within a budget; return the least peak if the budget is below it."""
    backend = fxckpt.Backend(**options)
    failure = guarded(lambda: runner.measure(way, runner.compiled({"backend": backend})))
    way.error = said(failure)
    if backend.plans:
        plan = backend.plans[-1]
        way.budget_bytes = plan.budget_bytes
        way.predicted_bytes = plan.compiled_peak_bytes or plan.peak_bytes
        way.predicted_seconds = plan.step_seconds + plan.recompute_seconds + plan.stall_seconds
        way.away_bytes, way.stall_seconds = plan.away_bytes, plan.stall_seconds
    else:
        way.error = way.error or "it ran uncompiled"
    return None if failure is None else failure.least_bytes


def run_blocks(runner: Runner, case: Case) -> None:
    """Measure one budget over blocks compiled one by one, beside the model as it is."""
    eager = Way("eager")
    case.ways.append(eager)
    eager.error = said(guarded(lambda: runner.measure(eager, runner.uncompiled())))
    if eager.peak_bytes is None or not hasattr(runner.made.model, "stack"):
        return
    for share in BLOCK_SHARES:
        way = Way(f"fxckpt, blocks, {share} of eager")
        case.ways.append(way)
        least = run_budget_of_blocks(runner, way, int(share * eager.peak_bytes))
        if least is not None:
            way.name = "fxckpt, blocks, least"
            run_budget_of_blocks(runner, way, least)
            break


def run_budget_of_blocks(runner: Runner, way: Way, budget: int) -> int | None:
    """Measure a budget over blocks; return the least peak if the budget is below it."""
    model = copy.deepcopy(runner.made.model)
    backend = fxckpt.Backend(budget, **INNERS[runner.inner])
    failure = guarded(lambda: runner.measure(way, runner.by_blocks(model, backend), model))
    way.error, way.budget_bytes = said(failure), budget
    found = backend.report().step
    if found is not None:
        way.predicted_bytes = found.predicted_peak_bytes
    else:
        way.error = way.error or "it ran uncompiled"
    return None if failure is None else failure.least_bytes


def run_offload(runner: Runner, case: Case) -> None:
    """Measure budgets that plans may also meet by sending values to the host, and torch's way."""
    model, inputs = runner.made.model, runner.made.inputs

    def on_the_host() -> None:
        model.zero_grad(set_to_none=True)
        runner.made.switch(False)
        with torch.autograd.graph.save_on_cpu(pin_memory=True):
            loss = model(*inputs)
        loss.backward()

    way = Way("eager, save_on_cpu")
    case.ways.append(way)
    way.error = said(guarded(lambda: runner.measure(way, on_the_host)))
    for share in OFFLOAD_SHARES:
        for offload in (None, "64GiB"):
            way = Way(f"fxckpt {share:.3f}" + (", offload" if offload else ", no offload"))
            case.ways.append(way)
            options = {"budget": share, "offload": offload, **INNERS[runner.inner]}
            run_budget(runner, way, options)


def run_case(case: Case, runner: Runner, points: int, rounds: int) -> None:
    """Measure every way of a case, then time them in turn."""
    inner, stock = runner.inner, STOCK[runner.inner]
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
            step = runner.compiled(options, by_block)
            failure = guarded(lambda w=way, s=step: runner.measure(w, s))
            way.error = said(failure)
    run_fxckpt(runner, case, points)
    if inner != "reduce-overhead":
        run_blocks(runner, case)
        run_offload(runner, case)
    times = runner.time(rounds)
    for way in case.ways:
        way.seconds = times.get(way.name)
        if way.seconds is not None and times.get("stock"):
            way.of_stock = way.seconds / times["stock"]


@contextmanager
def deadline(seconds: float) -> Iterator[None]:
    """Raise :class:`OutOfTime` in the block when its time is over, and again if it goes on."""

    def ring(*_: Any) -> None:
        raise OutOfTime

    before = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, max(seconds, 0.001), RINGS_AGAIN)
    try:
        yield
    finally:
        # First of all: it must not ring here.
        signal.signal(signal.SIGALRM, signal.SIG_IGN)
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def names() -> list[str]:
    """Return the cases, what matters most first."""
    return [f"{model}/{dtype}/{inner}" for dtype in DTYPES for inner in INNERS for model in MODELS]


def facts(device: str) -> dict[str, Any]:
    """Return what the figures depend on."""
    found = {
        "device": device,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "fxckpt": fxckpt.__version__,
        "alloc_conf": os.environ.get("PYTORCH_CUDA_ALLOC_CONF", ""),
    }
    if device == "cuda":
        found |= {
            "name": torch.cuda.get_device_name(),
            "memory_bytes": torch.cuda.get_device_properties(0).total_memory,
            "cuda": torch.version.cuda,
            "cudnn": torch.backends.cudnn.version(),
        }
    return found


def run_tests(device: str, seconds: float, folder: Path) -> dict[str, Any]:
    """Run the GPU's tests in a process of their own; return the last lines of what they print.

    All of it goes to ``gpu-tests.txt`` in a folder.
    """
    environment = {**os.environ, VARIABLE: device}
    # What a newer or older torch warns of is no failure here.
    options = ["-q", "-W", "default", "-m", "gpu", "-p", "no:cacheprovider"]
    command = [sys.executable, "-m", "pytest", *options, str(HERE.parent / "tests/gpu")]
    begin = time.perf_counter()
    try:
        done = subprocess.run(
            command,
            env=environment,
            capture_output=True,
            text=True,
            timeout=seconds,
            cwd=HERE.parent,
            check=False,
        )
        code, text = done.returncode, done.stdout + done.stderr
    except subprocess.TimeoutExpired as error:
        said = error.stdout or ""
        # The output of a process that was stopped comes undecoded.
        text = said.decode(errors="replace") if isinstance(said, bytes) else said
        code, text = -1, f"{text}\nout of time"
    spent = time.perf_counter() - begin
    (folder / "gpu-tests.txt").write_text(text)
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
    return {
        "budgets": len(ways),
        "measured": len(measured),
        "kept": sum(bool(way.is_kept) for _, way in measured),
        "predicted": sum(is_predicted(case, way) for case, way in measured),
        "failed_cases": [c.name for c in cases if c.error and not c.is_unfinished],
        "unfinished_cases": [c.name for c in cases if c.is_unfinished],
        "failed_ways": [f"{c.name}: {w.name}" for c in cases for w in c.ways if w.error],
    }


def is_predicted(case: Case, way: Way) -> bool:
    """Return whether a measured peak is as near to its prediction as promised."""
    promised = PROMISED[case.name.split("/")[2]]
    return way.wrong_by is not None and abs(way.wrong_by) <= promised


def failures(cases: list[Case], tests: dict[str, Any] | None) -> list[str]:
    """Return what went wrong, a line each; nothing for cases that the time did not allow."""
    found = []
    if tests is not None and tests["code"] != 0:
        found.append(f"tests/gpu: pytest ended with {tests['code']}, see its output")
    for case in cases:
        if case.error and not case.is_unfinished:
            found.append(f"{case.name}: {case.error}")
        for way in case.ways:
            if way.error:
                found.append(f"{case.name}, {way.name}: {way.error}")
            elif way.is_kept is False:
                found.append(
                    f"{case.name}, {way.name}: its peak of {way.peak_bytes} bytes is over the "
                    f"budget of {way.budget_bytes}"
                )
            elif way.is_kept and not is_predicted(case, way):
                found.append(
                    f"{case.name}, {way.name}: its peak of {way.peak_bytes} bytes is not near the "
                    f"prediction of {way.predicted_bytes}"
                )
    if not verdict(cases)["measured"]:
        found.append("no budget was measured; give more --seconds, if the time was over")
    return [" ".join(line.split()) for line in found]


def write(folder: Path, device: str, cases: list[Case], tests: dict[str, Any] | None) -> None:
    """Write the JSON and the table."""
    found = {
        "facts": facts(device),
        "verdict": verdict(cases),
        "failures": failures(cases, tests),
        "tests": tests,
        "cases": [asdict(case) for case in cases],
    }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "gpu.json").write_text(json.dumps(found, indent=1))
    (folder / "gpu.txt").write_text(f"{facts(device)}\n{show(cases)}\n{verdict(cases)}\n")


def run(name: str, device: str, end: float, points: int, rounds: int) -> Case:
    """Run one case within the time that is left."""
    case, begin = Case(name), time.monotonic()
    model, dtype, inner = name.split("/")

    def whole() -> None:
        made = MODELS[model](getattr(torch, dtype), device, is_tiny=device == "cpu")
        run_case(case, Runner(made, inner, device), points, rounds)

    if end - begin < 1:
        case.error = SKIPPED
        return case
    try:
        with deadline(end - begin):
            case.error = said(guarded(whole))
    except OutOfTime:
        case.error = CUT
    case.seconds = time.monotonic() - begin
    torch._dynamo.reset()
    gc.collect()
    if device == "cuda":
        torch.cuda.empty_cache()
    return case


def at_least(least: int, kind: type = int) -> Callable[[str], Any]:
    """Return a parser of finite numbers from ``least``."""

    def parse(text: str) -> Any:
        with suppress(ValueError):
            if least <= kind(text) < math.inf:
                return kind(text)
        what = "whole number" if kind is int else "number"
        raise argparse.ArgumentTypeError(f"{text!r} is not a {what} from {least}")

    return parse


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """Return the options; those that cannot be used end the process with code 2."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default="*", help="pattern of MODEL/DTYPE/INNER")
    parser.add_argument("--seconds", type=at_least(1, float), default=520.0)
    parser.add_argument("--points", type=at_least(2), default=POINTS, help="budgets, 2 or more")
    parser.add_argument("--rounds", type=at_least(1), default=7, help="timed steps of each way")
    parser.add_argument("--tests", action="store_true", help="run tests/gpu first")
    parser.add_argument("--out", type=Path, default=Path(os.environ.get("OUT") or HERE / "out"))
    options = parser.parse_args(arguments)
    options.cases = fnmatch.filter(names(), options.only)
    if not options.cases:
        choices = (MODELS, DTYPES, INNERS)
        parser.error(
            f"--only {options.only!r} matches no case. They are MODEL/DTYPE/INNER: "
            f"{' / '.join(', '.join(each) for each in choices)}. Example: --only 'gpt2/*'"
        )
    return options


def main(arguments: list[str] | None = None) -> int:
    """Run the cases, write what they show after each, and return the exit code."""
    options = parse(arguments)
    end = time.monotonic() + options.seconds
    cases: list[Case] = []
    try:
        device = chosen_device()
        # Before anything is measured: it could not be written.
        write(options.out, device, cases, None)
    except (NoDevice, OSError) as error:
        print(f"bench/gpu.py: {error}", file=sys.stderr)
        return USAGE
    torch.manual_seed(0)
    tests = run_tests(device, options.seconds / 3, options.out) if options.tests else None
    # All ways of a case are in memory at once; beyond its limit Dynamo compiles no more of them.
    with dynamo_config.patch(recompile_limit=2 * (options.points + len(TORCH_BUDGETS) + 3)):
        for name in options.cases:
            cases.append(run(name, device, end, options.points, options.rounds))
            print(f"{name}: {cases[-1].error or 'done'}, {cases[-1].seconds:.0f} s", flush=True)
            write(options.out, device, cases, tests)
    print(show(cases))
    if tests is not None:
        print(tests["tail"][-1500:])
    print(json.dumps(verdict(cases)), flush=True)
    failed = failures(cases, tests)
    for line in failed:
        print(f"FAILED {line}", file=sys.stderr)
    return FAILED if failed else DONE


if __name__ == "__main__":
    sys.exit(main())
