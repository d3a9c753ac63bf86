"""The command line: what it prints, what it returns, and what it says to mistakes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from fxckpt.cli import main

STEP = """
import torch
from torch import nn

def make():
    print("the user's own print")
    blocks = (nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)) for _ in range(4))
    return nn.Sequential(*blocks), torch.randn(512, 64)

def keywords():
    model = nn.Linear(8, 8)
    return model, {"input": torch.randn(4, 8)}

def on_meta():
    with torch.device("meta"):
        return nn.Linear(8, 8), (torch.empty(4, 8),)

def raises():
    raise ValueError("no data here")

def needs(size):
    return size

def wrong():
    return 3

def nothing_to_learn():
    return torch.sin, torch.randn(3)

def save_all(ctx, op, *args, **kwargs):
    from torch.utils.checkpoint import CheckpointPolicy
    return CheckpointPolicy.MUST_SAVE

number = 3
"""


@pytest.fixture
def step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "step_of_test.py").write_text(STEP)
    monkeypatch.chdir(tmp_path)
    return "step_of_test.py"


def test_plan_prints_figures_and_json(step: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", f"{step}:make", "--budget", "0.7", "--cost", "flops"]) == 0
    printed = capsys.readouterr()
    assert "uncheckpointed peak" in printed.out and "- budget" in printed.out
    assert "own print" in printed.err and "own print" not in printed.out
    assert main(["plan", f"{step}:make", "--budget", "0.7", "--cost", "flops", "--json"]) == 0
    figures = json.loads(capsys.readouterr().out)
    assert figures["peak_bytes"] <= figures["budget_bytes"] < figures["baseline_peak_bytes"]


def test_inputs_by_name_and_a_policy(step: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", f"{step}:keywords", "--policy", f"{step}:save_all", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["runs"] == 0


def test_an_infeasible_budget_is_1_and_tells_the_floor(step: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", f"{step}:make", "--budget", "1KiB", "--json"]) == 1
    printed = capsys.readouterr()
    assert "Raise the budget to at least" in printed.err
    assert json.loads(printed.out)["floor_bytes"] > 1024


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["plan", "no_such_module:make"], "there is no module 'no_such_module'"),
        (["plan", "no_such_file.py:make"], "Python files there: step_of_test.py"),
        (["plan", "step_of_test.py:mak"], "Its functions: make, keywords"),
        (["plan", "step_of_test.py"], "no name after a colon"),
        (["plan", "step_of_test.py:raises"], "raised ValueError: no data here\n  at "),
        (["plan", "step_of_test.py:needs"], "needs arguments (size)"),
        (["plan", "step_of_test.py:wrong"], "returned an int"),
        (["plan", "step_of_test.py:number"], "is an int, not a function"),
        (["plan", "step_of_test.py:make", "--budget", "lots"], "budget='lots' does not parse"),
        (["plan", "step_of_test.py:make", "--budget", "1.5"], "not a fraction in (0, 1]"),
        (["plan", "step_of_test.py:make", "--polcy", "x"], "--polcy"),
        (["plan", "step_of_test.py:make", "--policy", "step_of_test.py:nope"], "has no 'nope'"),
        (["frontier", "step_of_test.py:make", "--points", "many"], "'many' is not a whole number"),
        (["frontier", "step_of_test.py:make", "--points", "1"], "at least 2 points"),
        (["explain", "step_of_test.py:keywords", "--why", "nobody"], "neither saved nor recomputed"),
        (["bogus"], "invalid choice: 'bogus'"),
        ([], "COMMAND"),
    ],
)
def test_mistakes_are_2_without_a_traceback(step: str, arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == 2
    printed = capsys.readouterr()
    assert said in printed.err and "Traceback" not in printed.err
    assert not printed.out


@pytest.mark.parametrize(("factory", "command"), [("nothing_to_learn", "plan"), ("on_meta", "bench")])
def test_what_cannot_be_planned_or_run_is_3(step: str, factory: str, command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([command, f"{step}:{factory}"]) == 3
    assert "Traceback" not in capsys.readouterr().err


def test_explain_in_every_form(step: str, capsys: pytest.CaptureFixture[str]) -> None:
    base = ["explain", f"{step}:make", "--budget", "0.7", "--cost", "flops"]
    for more, said in (
        (["--top", "2"], "more rows (--top 0 prints all)"),
        (["--why", "gelu"], "read in the backward by: "),
        (["--peak"], "held as"),
        (["--format", "markdown"], "| value"),
        (["--module", "nowhere"], "no value matches"),
    ):
        assert main([*base, *more]) == 0
        assert said in capsys.readouterr().out
    assert main([*base, "--json", "--decision", "saved"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert sum(row["bytes"] for row in answer["rows"]) == answer["figures"]["saved_bytes"]


def test_frontier_prints_points_and_draws(step: str, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib").use("Agg")
    base = ["frontier", f"{step}:make", "--points", "3", "--cost", "flops"]
    assert main([*base, "--plot", "curve.png", "--json"]) == 0
    assert len(json.loads(capsys.readouterr().out)) == 3
    assert Path("curve.png").read_bytes().startswith(b"\x89PNG")
    assert main([*base, "--plot", "curve.doc"]) == 2
    assert main([*base, "--plot", "no/such/folder.png"]) == 2
    assert "cannot write 'no/such/folder.png'" in capsys.readouterr().err


def test_bench_measures_what_was_predicted(step: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", f"{step}:make", "--budget", "0.7", "--steps", "1", "--json"]) == 0
    before, after = json.loads(capsys.readouterr().out)
    # The loss of this model is summed up outside of the plan.
    assert abs(after["peak_bytes"] - after["predicted_bytes"]) < 1024 < before["peak_bytes"] - after["peak_bytes"]
    assert after["gradients"] == "equal, bitwise"


def test_doctor_examines_itself(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    assert main(["doctor", "--json"]) == 0
    found = {f["what"]: f for f in json.loads(capsys.readouterr().out)}
    assert found["self-test"]["state"] == "ok" and "bitwise" in found["self-test"]["found"]
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setattr("torch.cuda.is_available", lambda: 1 / 0)
    assert main(["doctor", "--quick"]) == 0
    printed = capsys.readouterr().out
    assert 'use inner="aot_eager"' in printed and "ZeroDivisionError" in printed


def test_help_has_examples_and_runs_as_a_module() -> None:
    done = subprocess.run([sys.executable, "-m", "fxckpt", "--help"], capture_output=True, text=True, check=False)
    assert done.returncode == 0
    assert "fxckpt plan train.py:make_step --budget 2GiB" in done.stdout and "exit codes" in done.stdout
