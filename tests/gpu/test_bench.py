"""The GPU benchmark, whole, on the CPU at tiny sizes: what it writes, and what it survives."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch

import fxckpt
from tests import conftest

sys.path.insert(0, str(Path(__file__).parents[2] / "bench"))
import gpu
import gpu_ops

FEW = ["--points", "2", "--rounds", "1", "--seconds", "200"]


@pytest.fixture(autouse=True)
def on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FXCKPT_TEST_DEVICE", "cpu")


def run(folder: Path, *arguments: str, code: int = 0) -> dict[str, Any]:
    """Run the benchmark to its exit code, and return its JSON."""
    assert gpu.main([*FEW, "--out", str(folder), *arguments]) == code
    found: dict[str, Any] = json.loads((folder / "gpu.json").read_text())
    assert bool(found["failures"]) == bool(code)
    return found


def test_a_case_is_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every way of a case has a peak and a time; each budget is kept, each peak predicted.

    There are more ways than Dynamo compiles of one function by default.
    """
    monkeypatch.setattr(gpu, "TORCH_BUDGETS", ())
    monkeypatch.setattr(gpu, "BLOCK_SHARES", (0.8,))
    monkeypatch.setattr(gpu, "OFFLOAD_SHARES", (0.9,))
    with torch._dynamo.config.patch(recompile_limit=1):
        found = run(tmp_path, "--only", "gpt2/float32/aot_eager")
    (case,) = found["cases"]
    assert case["error"] is None
    assert [way["error"] for way in case["ways"]] == [None] * 9
    assert all(way["peak_bytes"] > 0 and way["seconds"] > 0 for way in case["ways"])
    assert found["verdict"] == {
        "budgets": 5,
        "measured": 5,
        "kept": 5,
        "predicted": 5,
        "failed_cases": [],
        "unfinished_cases": [],
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
    found = run(tmp_path, "--only", "*/bfloat16/aot_eager", code=1)
    errors = [case["error"] for case in found["cases"]]
    assert errors == ["RuntimeError: CUDA error: an illegal memory access"] * 2
    assert len(seen) == 2 and len(found["verdict"]["failed_cases"]) == 2


def endless(*_: Any, **__: Any) -> None:
    while True:
        pass


def stubborn(*_: Any, **__: Any) -> None:
    """Go on when the time is over, then call that an error of one's own, as compilers do."""
    with suppress(BaseException):
        endless()
    try:
        endless()
    except BaseException:
        raise RuntimeError("cannot compile") from None


@pytest.mark.parametrize("model", [endless, stubborn])
def test_time_that_is_over_is_said(
    model: Callable[..., None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A case that the time cuts short, and those after it, say so."""
    monkeypatch.setattr(gpu, "MODELS", {"gpt2": model, "vit": model})
    found = run(tmp_path, "--only", "*/bfloat16/aot_eager", "--seconds", "1.2", code=1)
    assert found["failures"] == [
        "no budget was measured; give more --seconds, if the time was over"
    ]
    assert [case["error"] for case in found["cases"]] == [
        "cut short: out of time",
        "skipped: out of time",
    ]


def test_least_peak_of_an_error() -> None:
    """The least peak of an infeasible budget is told beside the error's text."""

    def infeasible() -> None:
        raise fxckpt.BudgetInfeasible("too low", floor_bytes=4096, budget_bytes=1)

    assert gpu.guarded(infeasible) == gpu.Failure("BudgetInfeasible: too low", 4096)
    assert gpu.guarded(lambda: 1 / 0) == gpu.Failure("ZeroDivisionError: division by zero", None)
    assert gpu.guarded(lambda: None) is None


def made(**figures: Any) -> list[gpu.Case]:
    """Return a case of one measured way."""
    kept = {"budget_bytes": 1000, "predicted_bytes": 990, "peak_bytes": 990}
    return [gpu.Case("gpt2/bfloat16/aot_eager", [gpu.Way("fxckpt 0.5", **{**kept, **figures})])]


@pytest.mark.parametrize(
    ("cases", "tests", "said"),
    [
        (made(), None, None),
        (made(), {"code": 0}, None),
        (made(), {"code": 5}, "tests/gpu: pytest ended with 5"),
        ([*made(), gpu.Case("vit/float32/inductor", error=gpu.SKIPPED)], None, None),
        ([*made(), gpu.Case("vit/float32/inductor", error="Error:\n no")], None, "Error: no"),
        (made(error="RuntimeError: no"), None, "gpt2.*fxckpt 0.5: RuntimeError: no"),
        (made(peak_bytes=1001, predicted_bytes=1001), None, "1001 bytes is over the budget of 10"),
        (made(predicted_bytes=980), None, "990 bytes is not near the prediction of 980"),
        (made(predicted_bytes=None), None, "not near the prediction of None"),
        (made(peak_bytes=None), None, "no budget was measured"),
    ],
)
def test_what_went_wrong_is_told(
    cases: list[gpu.Case], tests: dict[str, Any] | None, said: str | None
) -> None:
    """Failed tests and rows and broken promises are a line each; a lack of time is none."""
    found = gpu.failures(cases, tests)
    assert len(found) == (said is not None)
    assert said is None or re.search(said, found[0])


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
@pytest.mark.parametrize(
    ("asked", "said"),
    [
        (None, "gpu.py: there is no CUDA device here"),
        ("cuda", "FXCKPT_TEST_DEVICE=cuda: there is no CUDA device here (torch"),
        ("tpu", "FXCKPT_TEST_DEVICE='tpu' is no device to test"),
    ],
)
def test_without_the_device_nothing_runs(
    asked: str | None,
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Without a GPU the CPU is not taken unless it is asked for."""
    monkeypatch.delenv("FXCKPT_TEST_DEVICE")
    if asked is not None:
        monkeypatch.setenv("FXCKPT_TEST_DEVICE", asked)
    assert gpu.main(["--out", str(tmp_path)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert said in line and not [*tmp_path.iterdir()]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--only", "nonsense"], "'nonsense' matches no case.*gpt2, llama.*aot_eager, inductor"),
        (["--points", "1"], "'1' is not a whole number from 2"),
        (["--rounds", "0"], "'0' is not a whole number from 1"),
        (["--seconds", "nan"], "'nan' is not a number from 1"),
    ],
)
def test_unusable_arguments_exit_2(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Arguments by which nothing can be measured are refused, with the choices."""
    with pytest.raises(SystemExit) as stop:
        gpu.main(arguments)
    assert stop.value.code == 2 and re.search(said, capsys.readouterr().err)


def test_parts_of_a_gpu_are_shown(capsys: pytest.CaptureFixture[str]) -> None:
    """Ops have planned and measured times, copies rates, and regions lower peaks than none."""
    assert gpu_ops.main([]) == 0
    printed = capsys.readouterr().out
    mm = re.search(r"aten::mm +(\d+) +(\d+) +(\d+) +(\d+)", printed)
    assert mm is not None and int(mm[1]) > 0 < int(mm[3]) and mm[2] == mm[4]
    assert len(re.findall(r"(?:page-locked|pageable) +(?:to|from)", printed)) == 4
    none, *others = map(
        float, re.findall(r"(?m)^(?:none|torch|fxckpt)[\w, ]*? +([\d.]+) ", printed)
    )
    assert len(others) == 3 and max(others) < none


def test_wrong_part_of_a_gpu_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        gpu_ops.main(["opps"])
    assert "no part 'opps'. They are libraries, link, ops" in capsys.readouterr().err


def test_unwritable_folder_is_told_first(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nothing is measured that cannot be written."""
    (tmp_path / "file").touch()
    assert gpu.main(["--out", str(tmp_path / "file" / "out")]) == 2
    assert "Not a directory" in capsys.readouterr().err


def test_suite_refuses_a_device_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """The variable of the device is checked before any test."""
    monkeypatch.setenv("FXCKPT_TEST_DEVICE", "tpu")
    with pytest.raises(pytest.UsageError, match="'tpu' is no device to test: use cuda or cpu"):
        conftest.pytest_configure()
