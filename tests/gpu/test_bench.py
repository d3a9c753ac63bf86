"""The GPU benchmark, whole, on the CPU at tiny sizes: what it writes, and what it survives."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[2] / "bench"))
import gpu

FEW = ["--points", "2", "--rounds", "1", "--seconds", "200"]


@pytest.fixture(autouse=True)
def on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "DEVICE", "cpu")


def run(folder: Path, *arguments: str) -> dict[str, Any]:
    """Run the benchmark and return its JSON."""
    gpu.main([*FEW, "--out", str(folder), *arguments])
    found: dict[str, Any] = json.loads((folder / "gpu.json").read_text())
    return found


def test_a_case_is_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every way of a case has a peak and a time; each budget is kept, each peak predicted.

    There are more ways than Dynamo compiles of one function by default.
    """
    monkeypatch.setattr(gpu, "TORCH_BUDGETS", ())
    with torch._dynamo.config.patch(recompile_limit=1):
        found = run(tmp_path, "--only", "gpt2/float32/aot_eager")
    (case,) = found["cases"]
    assert case["error"] is None
    assert [way["error"] for way in case["ways"]] == [None] * 4
    assert all(way["peak_bytes"] > 0 and way["seconds"] > 0 for way in case["ways"])
    assert found["verdict"] == {
        "budgets": 2,
        "measured": 2,
        "kept": 2,
        "predicted": 2,
        "failed_cases": [],
        "failed_ways": [],
    }
    assert "stock, checkpoint by block" in (tmp_path / "gpu.txt").read_text()


def test_a_failure_is_recorded_the_rest_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A model that fails is one row; the cases after it are run, until the time is over."""
    seen = []

    def broken(*_: Any, **__: Any) -> None:
        seen.append("broken")
        raise RuntimeError("CUDA error: an illegal memory access")

    monkeypatch.setattr(gpu, "MODELS", {"gpt2": broken, "vit": broken})
    found = run(tmp_path, "--only", "*/bfloat16/aot_eager")
    errors = [case["error"] for case in found["cases"]]
    assert errors == ["RuntimeError: CUDA error: an illegal memory access"] * 2
    assert len(seen) == 2 and len(found["verdict"]["failed_cases"]) == 2


def test_time_that_is_over_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A case that the time cuts short, and those after it, say so."""

    def endless(*_: Any, **__: Any) -> None:
        while True:
            pass

    monkeypatch.setattr(gpu, "MODELS", {"gpt2": endless, "vit": endless})
    found = run(tmp_path, "--only", "*/bfloat16/aot_eager", "--seconds", "1.2")
    assert [case["error"] for case in found["cases"]] == [
        "cut short: out of time",
        "skipped: out of time",
    ]


def test_least_peak_of_an_error() -> None:
    """The least peak is read from the error of an infeasible budget."""
    text = "BudgetInfeasible: ... Raise the budget to at least '4096B', or make the batch smaller."
    assert gpu.least_peak(text) == 4096
    assert gpu.least_peak("RuntimeError: no") is gpu.least_peak(None) is None
