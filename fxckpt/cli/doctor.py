"""The doctor: probes of this machine and its Python, and their effects on fxckpt.

A probe that raises becomes a finding.
"""

from __future__ import annotations

import ctypes
import importlib.metadata
import importlib.util
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from fxckpt import __version__
from fxckpt.budgets import format_bytes, free_bytes
from fxckpt.errors import FxckptError
from fxckpt.memory_meter import meter_of
from fxckpt.partitioner import OPTIONS, Partitioner
from fxckpt.planner.planned_device import built_for
from fxckpt.repro import Repro
from fxckpt.torch_private import cpp_command
from fxckpt.torch_private.inductor.options import drawing_as_eager
from fxckpt.torch_private.versions import TESTED, is_tested
from fxckpt.utils.cache_folder import cache_dir
from fxckpt.utils.tables import Column, Table

SELF_TESTS = {"self-test": "aot_eager", "self-test, default": "inductor"}
"""The inner compilers to test, by the name of the finding."""
COMPILER_SECONDS = 60.0
"""Timeout of a C++ compiler with a small file."""
SMALL_SOURCE = "#include <cmath>\nint fxckpt_small() { return static_cast<int>(std::sqrt(4.0)); }\n"
"""A file that needs a compiler, its standard library and a linker."""


@dataclass(frozen=True)
class ProbeResult:
    """The result of one probe."""

    what: str
    """The name of the probe."""
    found: str
    """The version, path or error that was found."""
    state: str
    """``"ok"``, ``"missing"`` (some feature will not work) or ``"note"``."""
    effect: str = ""
    """The effect on fxckpt."""


@dataclass(frozen=True)
class Diagnosis:
    """The findings of all probes; printed, a table."""

    findings: tuple[ProbeResult, ...]

    @property
    def is_healthy(self) -> bool:
        """Whether nothing is missing that some feature needs."""
        return all(f.state != "missing" for f in self.findings)

    def table(self) -> Table:
        """Return the findings as a table."""
        columns = (
            Column("what", ""),
            Column("state", ""),
            Column("found", "found"),
            Column("effect", "what it means"),
        )
        return Table(columns, tuple((f.what, f.state, f.found, f.effect) for f in self.findings))

    def __str__(self) -> str:
        return str(self.table())


def examine(*, self_test: bool = True) -> Diagnosis:
    """Run all probes and return their findings.

    With ``self_test``, each inner compiler compiles a small step within a budget, and the
    gradients are compared with those of eager.
    """
    probes: tuple[tuple[str, Callable[[], ProbeResult]], ...] = (
        ("fxckpt", lambda: ProbeResult("fxckpt", __version__, "ok")),
        (
            "python",
            lambda: ProbeResult("python", f"{platform.python_version()} at {sys.executable}", "ok"),
        ),
        (
            "system",
            lambda: ProbeResult(
                "system",
                f"{platform.platform()}, {os.cpu_count()} cores, "
                f"torch uses {torch.get_num_threads()}",
                "ok",
            ),
        ),
        (
            "memory",
            lambda: ProbeResult(
                "memory",
                f"{format_bytes(free_bytes(torch.device('cpu')))} available",
                "ok",
                'what budget="auto" starts from',
            ),
        ),
        ("torch", _torch),
        ("backend", _entry_point),
        ("C++ compiler", _compiler),
        ("memory meter", _memory_meter),
        ("CUDA", _cuda),
        ("triton", _triton),
        (
            "matplotlib",
            lambda: _package("matplotlib", "pictures: plan.plot_memory(), frontier.plot()"),
        ),
        ("pandas", lambda: _package("pandas", "plan.explain().to_pandas()")),
        ("cache folder", _cache),
    )
    findings = [_run_probe(name, probe) for name, probe in probes]
    if self_test:
        findings.extend(
            _run_probe(name, partial(_self_test, name, inner)) for name, inner in SELF_TESTS.items()
        )
    return Diagnosis(tuple(findings))


def _run_probe(name: str, probe: Callable[[], ProbeResult]) -> ProbeResult:
    """Return the finding of a probe, or its error as one."""
    try:
        return probe()
    except Exception as error:
        found = f"{type(error).__name__}: {_first_line(str(error))}"
        return ProbeResult(name, found, "missing", "looking failed")


def _torch() -> ProbeResult:
    if is_tested():
        return ProbeResult(
            "torch", torch.__version__, "ok", f"fxckpt is tested with {', '.join(TESTED)}"
        )
    return ProbeResult(
        "torch",
        torch.__version__,
        "note",
        f"none of those that fxckpt is tested with: {', '.join(TESTED)}",
    )


def _entry_point() -> ProbeResult:
    names = {e.name for e in importlib.metadata.entry_points(group="torch_dynamo_backends")}
    if "fxckpt" in names:
        return ProbeResult("backend", 'torch.compile(model, backend="fxckpt") finds it', "ok")
    return ProbeResult(
        "backend",
        "not registered",
        "missing",
        "install fxckpt with pip, or pass backend=fxckpt.Backend() itself",
    )


def _compiler() -> ProbeResult:
    """Compile a small file with the compiler that Inductor takes."""
    name, effect = "C++ compiler", 'inner="inductor" compiles for the CPU'
    lacking = (
        'inner="inductor" (the default) does not work on the CPU: '
        'install g++ or name a compiler in $CXX, or use inner="aot_eager"'
    )
    with tempfile.TemporaryDirectory() as folder:
        source, library = Path(folder, "small.cpp"), Path(folder, "small.so")
        source.write_text(SMALL_SOURCE)
        try:
            command = cpp_command(source, library)
            done = _run_compiler(command)
            if done.returncode != 0:
                said = _first_error(done.stderr) or f"it ended with {done.returncode}"
                found = f"{command[0]} does not compile a small file: {said}"
                return ProbeResult(name, found, "missing", lacking)
            ctypes.CDLL(str(library))
            version = _run_compiler([command[0], "--version"]).stdout
        except (OSError, RuntimeError, subprocess.SubprocessError) as error:
            return ProbeResult(name, _first_line(str(error)), "missing", lacking)
    about = _first_line(version) or "says no version"
    return ProbeResult(name, f"{shutil.which(command[0]) or command[0]}: {about}", "ok", effect)


def _run_compiler(command: list[str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        errors="replace",
        timeout=COMPILER_SECONDS,
        check=False,
    )


def _first_error(text: str) -> str:
    """Return the first line of a compiler's messages that is an error, else the first one."""
    return _first_line("\n".join(line for line in text.splitlines() if "error" in line) or text)


def _first_line(text: str) -> str:
    return next(iter(text.strip().splitlines()), "")


def _memory_meter() -> ProbeResult:
    meter = meter_of("cpu")
    if meter.exact:
        effect = "fxckpt.measure_peak() is exact on the CPU"
        return ProbeResult("memory meter", "counts every block", "ok", effect)
    return ProbeResult("memory meter", "counts no blocks", "note", meter.describes)


def _cuda() -> ProbeResult:
    if not torch.cuda.is_available():
        return ProbeResult(
            "CUDA",
            f"no device; torch is {built_for()}",
            "note",
            "plans for GPUs can be made here: fxckpt plan --device H100",
        )
    names = [
        f"{torch.cuda.get_device_name(i)} ({format_bytes(torch.cuda.mem_get_info(i)[0])} free)"
        for i in range(torch.cuda.device_count())
    ]
    return ProbeResult("CUDA", ", ".join(names), "ok")


def _triton() -> ProbeResult:
    if importlib.util.find_spec("triton") is not None:
        return ProbeResult("triton", importlib.metadata.version("triton"), "ok")
    state = "missing" if torch.cuda.is_available() else "note"
    return ProbeResult("triton", "not installed", state, 'inner="inductor" on a GPU needs it')


def _package(name: str, use: str) -> ProbeResult:
    if importlib.util.find_spec(name) is None:
        return ProbeResult(name, "not installed", "note", f"{use} needs it")
    return ProbeResult(name, importlib.metadata.version(name), "ok", use)


def _cache() -> ProbeResult:
    folder = cache_dir()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        return ProbeResult(
            "cache folder",
            f"{folder} cannot be written: {error.strerror or error}",
            "missing",
            "what is measured is lost at the end of a process; $FXCKPT_CACHE_DIR moves the folder",
        )
    return ProbeResult(
        "cache folder", str(folder), "ok", "keeps what was measured; $FXCKPT_CACHE_DIR moves it"
    )


def _self_test(name: str, inner: str) -> ProbeResult:
    """Return whether a small step compiled within a budget has the gradients of eager."""
    from fxckpt.backend import Backend

    def gradients(
        step: Callable[[torch.Tensor], torch.Tensor], model: torch.nn.Module
    ) -> list[torch.Tensor]:
        model.zero_grad(set_to_none=True)
        step(torch.ones(64, 32)).square().mean().backward()
        return [p.grad.clone() for p in model.parameters() if p.grad is not None]

    # Inductor fuses ops, which may change the rounding of the last bits.
    equal, equality = (
        (torch.equal, "equal, bitwise")
        if inner == "aot_eager"
        else (torch.allclose, "equal, but for rounding")
    )
    with torch.random.fork_rng(devices=[]):
        model = torch.nn.Sequential(
            *(torch.nn.Sequential(torch.nn.Linear(32, 32), torch.nn.GELU()) for _ in range(4))
        )
        backend = Backend(budget=0.8, inner=inner)
        expected = gradients(model, model)
        found = gradients(torch.compile(model, backend=backend), model)
    (plan,) = backend.plans
    if not all(equal(a, b) for a, b in zip(expected, found, strict=True)):
        return ProbeResult(
            name,
            f"a small step inside a budget gave other gradients with inner={inner!r}",
            "missing",
            "please report this",
        )
    peak = plan.peak_bytes if plan.compiled_peak_bytes is None else plan.compiled_peak_bytes
    return ProbeResult(
        name,
        f"a small step took {1 - peak / plan.baseline_peak_bytes:.0%} less memory; "
        f"its gradients are {equality}",
        "ok",
        f"inner={inner!r}",
    )


def replan(repro: Repro) -> tuple[str, bool]:
    """Plan the graph of a repro file again.

    Returns what came of it, and whether the defect is gone.
    """
    heading = f"Planned again by fxckpt {__version__} with torch {torch.__version__}"
    lacking = [name for name in OPTIONS if name not in repro.settings]
    if lacking:
        heading += f", without its {' and '.join(lacking)}"
    try:
        joint = repro.joint()
    except Exception as error:
        return f"Not planned again: {type(error).__name__}: {error}", False
    try:
        with drawing_as_eager(repro.fallback_random):
            plan = Partitioner(**repro.settings).replan(
                joint, num_fwd_outputs=repro.num_fwd_outputs, inner=repro.inner
            )
    except Exception as error:
        # Whatever planning raises is what the file is about.
        shown = "".join(traceback.format_exception(error)).strip()
        kind = "stops with" if isinstance(error, FxckptError) else "the defect still shows"
        return f"{heading}: {kind}\n{shown}", False
    peak = format_bytes(plan.peak_bytes)
    return f"{heading}: the graph is planned, with a peak of {peak}.", True
