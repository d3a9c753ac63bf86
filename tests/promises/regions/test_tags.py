"""Names of recomputed ops in the profiler and in printed graphs, and the log of plans."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import fx, nn
from torch.profiler import ProfilerActivity, profile

import fxckpt
from fxckpt.profiling import PREFIX
from fxckpt.torch_private import RECORD_FUNCTION


def model() -> nn.Module:
    return nn.Sequential(
        *(nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.1), nn.GELU()) for _ in range(6))
    )


def test_profiler_names_recomputed_ops() -> None:
    """The profiler has a record with the name of each recomputed op."""
    backend = fxckpt.Backend(budget=0.7, inner="aot_eager", scope="graph")
    compiled = torch.compile(model(), backend=backend)
    inputs = torch.randn(256, 8)
    compiled(inputs).sum().backward()
    with profile(activities=[ProfilerActivity.CPU]) as seen:
        compiled(inputs).sum().backward()
    records = sorted(event.name for event in seen.events() if event.name.startswith(PREFIX))
    (plan,) = backend.plans
    assert plan.schedule and records == sorted(PREFIX + run.name for run in plan.schedule)


def test_records_need_a_profiler(monkeypatch: pytest.MonkeyPatch) -> None:
    """No records are made without a profiler."""
    compiled = torch.compile(
        model(), backend=fxckpt.Backend(budget=0.7, inner="aot_eager", scope="graph")
    )
    inputs = torch.randn(256, 8)
    taken: list[str] = []
    monkeypatch.setattr(
        RECORD_FUNCTION, lambda name: taken.append(name) or contextlib.nullcontext()
    )
    for is_profiled in (False, True, False):
        taken.clear()
        with (
            profile(activities=[ProfilerActivity.CPU]) if is_profiled else contextlib.nullcontext()
        ):
            compiled(inputs).sum().backward()
        assert bool(taken) is is_profiled


def test_printed_graph_marks_recomputed_ops() -> None:
    """A printed graph marks the recomputed ops."""
    halves: list[fx.GraphModule] = []

    def keep(half: fx.GraphModule, inputs: object) -> object:
        halves.append(half)
        return half.forward

    backend = fxckpt.Backend(budget=0.7, inner=keep, scope="graph")
    torch.compile(model(), backend=backend)(torch.randn(256, 8)).sum().backward()
    printed = halves[1].print_readable(print_output=False)
    again = backend.plans[0].recomputed
    assert again and all(f"'recompute_of': '{name}'" in printed for name in again)
    assert "recompute_of" not in halves[0].print_readable(print_output=False)


def test_log_has_figures_and_reasons(caplog: pytest.LogCaptureFixture) -> None:
    """The log has figures with INFO, and reasons with DEBUG."""
    caplog.set_level(logging.DEBUG, "fxckpt")
    backend = fxckpt.Backend(budget=0.7, inner="aot_eager", scope="graph")
    torch.compile(model(), backend=backend)(torch.randn(256, 8)).sum().backward()
    by_level = {
        level: [r.getMessage() for r in caplog.records if r.levelno == level]
        for level in (logging.INFO, logging.DEBUG)
    }
    assert any("uncheckpointed peak" in m for m in by_level[logging.INFO])
    assert any(m.startswith("plan took ") for m in by_level[logging.DEBUG])
    assert any("recomputing it needs" in m for m in by_level[logging.DEBUG])
    assert not any("recomputing it needs" in m for m in by_level[logging.INFO])


def eager(policy: object = None, budget: object = None) -> None:
    block, inputs = model(), torch.randn(256, 8)
    for _ in range(2):
        fxckpt.checkpoint(block, inputs, policy=policy, budget=budget).sum().backward()


DOORS = {
    "plan": lambda: fxckpt.plan(model(), torch.randn(256, 8), budget=0.7),
    "frontier": lambda: fxckpt.frontier(model(), torch.randn(256, 8), points=2),
    "rewrite": lambda: (
        fxckpt.rewrite(fx.symbolic_trace(model()), budget=0.7)(torch.randn(256, 8)).sum().backward()
    ),
    "eager policy": lambda: eager(policy=fxckpt.policies.save_matmuls),
    "eager budget": lambda: eager(budget=0.7),
    "compile": lambda: torch.compile(
        model(), backend=fxckpt.Backend(budget=0.7, inner="aot_eager", scope="graph")
    )(torch.randn(256, 8)),
}


@pytest.mark.parametrize("door", DOORS)
def test_every_entry_point_logs_once(door: str, caplog: pytest.LogCaptureFixture) -> None:
    """Every entry point logs its plan once."""
    caplog.set_level(logging.INFO, "fxckpt")
    DOORS[door]()
    said = [r.getMessage() for r in caplog.records if r.name == "fxckpt"]
    (made,) = [m for m in said if "made in" in m]
    assert re.match(r"(plan \w{16}|frontier) of a graph of \d+ nodes", made)
    assert re.search(
        r"peak [\d.]+ KiB, (no budget|budget [\d.]+ KiB), \d+ recomputes", "\n".join(said)
    )


def test_given_plan_is_logged_as_applied(caplog: pytest.LogCaptureFixture) -> None:
    """A plan that the user gives is logged as applied."""
    step, inputs = model(), torch.randn(256, 8)
    plan = fxckpt.plan(step, inputs, budget=0.7)
    caplog.set_level(logging.INFO, "fxckpt")
    torch.compile(step, backend=fxckpt.Backend(policy=plan, inner="aot_eager"))(inputs)
    (said,) = [r.getMessage() for r in caplog.records if r.name == "fxckpt"]
    assert said.startswith(f"plan {plan.digest} of a graph of ") and " is applied: peak " in said


def test_torch_logs_variable(tmp_path: Path) -> None:
    """TORCH_LOGS shows the log on the command line."""
    (tmp_path / "step.py").write_text(
        "import torch\n\ndef make():\n    return torch.nn.Linear(8, 8), torch.randn(4, 8)\n"
    )
    command = [sys.executable, "-m", "fxckpt", "plan", "step.py:make", "--json", "--cost", "flops"]
    done = subprocess.run(
        command,
        cwd=tmp_path,
        env={**os.environ, "TORCH_LOGS": "fxckpt"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert json.loads(done.stdout)["runs"] == 0
    assert done.stderr.count(" nodes: peak ") == 1 and "uncheckpointed peak: " in done.stderr
