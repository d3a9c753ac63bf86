"""What runs again can be told apart: in the profiler, in printed graphs, in the log."""

from __future__ import annotations

import logging
import os
import subprocess
import sys

import pytest
import torch
from torch import fx, nn
from torch.profiler import ProfilerActivity, profile

import fxckpt
from fxckpt.profiling import PREFIX


def model() -> nn.Module:
    return nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.1), nn.GELU()) for _ in range(6)))


def test_the_profiler_names_every_run_that_repeats_the_forward() -> None:
    backend = fxckpt.Backend(budget=0.7, inner="aot_eager")
    compiled = torch.compile(model(), backend=backend)
    inputs = torch.randn(256, 8)
    compiled(inputs).sum().backward()
    with profile(activities=[ProfilerActivity.CPU]) as seen:
        compiled(inputs).sum().backward()
    records = sorted(event.name for event in seen.events() if event.name.startswith(PREFIX))
    (plan,) = backend.plans
    assert plan.schedule and records == sorted(PREFIX + run.name for run in plan.schedule)


def test_printed_graphs_say_what_is_repeated() -> None:
    halves: list[fx.GraphModule] = []

    def keep(half: fx.GraphModule, inputs: object) -> object:
        halves.append(half)
        return half.forward

    backend = fxckpt.Backend(budget=0.7, inner=keep)
    torch.compile(model(), backend=backend)(torch.randn(256, 8)).sum().backward()
    printed = halves[1].print_readable(print_output=False)
    again = backend.plans[0].recomputed
    assert again and all(f"'recompute_of': '{name}'" in printed for name in again)
    assert "recompute_of" not in halves[0].print_readable(print_output=False)


def test_the_log_has_figures_and_with_debug_reasons(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, "fxckpt")
    backend = fxckpt.Backend(budget=0.7, inner="aot_eager")
    torch.compile(model(), backend=backend)(torch.randn(256, 8)).sum().backward()
    by_level = {level: [r.getMessage() for r in caplog.records if r.levelno == level] for level in (logging.INFO, logging.DEBUG)}
    assert any("uncheckpointed peak" in m for m in by_level[logging.INFO])
    assert any(m.startswith("plan took ") for m in by_level[logging.DEBUG])
    assert any("recomputing it needs" in m for m in by_level[logging.DEBUG])
    assert not any("recomputing it needs" in m for m in by_level[logging.INFO])


def test_torch_logs_turns_it_on() -> None:
    code = "import fxckpt, logging; print(logging.getLogger('fxckpt').getEffectiveLevel())"
    done = subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, "TORCH_LOGS": "+fxckpt"}, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == str(logging.DEBUG)
