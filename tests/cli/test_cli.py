"""The command line: its output, exit codes and error messages."""

from __future__ import annotations

import csv
import io
import json
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._inductor import config as inductor_config

import fxckpt
from fxckpt.cli import main
from fxckpt.reports import html

STEP = """
import torch
from fxckpt.policies import offload
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

def mismatched():
    return lambda x: x @ torch.ones(8, 8), torch.randn(4, 7, requires_grad=True)

def reads_a_file():
    return Reads(), torch.randn(4, 8)

class Reads(nn.Linear):
    def __init__(self):
        super().__init__(8, 8)

    def forward(self, x):
        raise FileNotFoundError(2, "No such file or directory", "weights.bin")

def brackets():
    return Keyed(), torch.randn(4, 8)

class Keyed(nn.Module):
    def __init__(self):
        super().__init__()
        head = lambda: nn.Sequential(nn.Linear(8, 8), nn.Softmax(-1))
        self.heads = nn.ModuleDict({name: head() for name in ("a[0]", "a[1]")})

    def forward(self, x):
        return self.heads["a[0]"](x) + self.heads["a[1]"](x)

def checkpointed():
    return Dropped(True), torch.randn(64, 8)

def plain():
    return Dropped(False), torch.randn(64, 8)

class Dropped(nn.Sequential):
    def __init__(self, is_on):
        super().__init__(nn.Linear(8, 8), nn.Dropout(0.5))
        self.is_on = is_on

    def forward(self, x):
        from torch.utils.checkpoint import checkpoint
        forward = super().forward
        if not self.is_on:
            return forward(x)
        return checkpoint(forward, x, use_reentrant=False, preserve_rng_state=False)

def broken():
    return Broken(), torch.randn(64, 8)

class Broken(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))

    def forward(self, x):
        for layer in self.layers[:2]:
            x = layer(x).tanh().exp()
        torch._dynamo.graph_break()
        for layer in self.layers[2:]:
            x = layer(x).tanh().exp()
        return x.sum()

away = offload("layers")

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
    """The command prints figures and a memory bar, or JSON; prints of the model go to stderr."""
    assert main(["plan", f"{step}:make", "--budget", "0.7", "--cost", "flops"]) == 0
    printed = capsys.readouterr()
    assert "uncheckpointed peak" in printed.out and "- budget" in printed.out
    assert "own print" in printed.err and "own print" not in printed.out
    assert main(["plan", f"{step}:make", "--budget", "0.7", "--cost", "flops", "--json"]) == 0
    figures = json.loads(capsys.readouterr().out)
    assert figures["peak_bytes"] <= figures["budget_bytes"] < figures["baseline_peak_bytes"]


def test_step_of_two_graphs(step: str, capsys: pytest.CaptureFixture[str]) -> None:
    """A graph break gives a step of two graphs: as a table, a frontier, a page and reasons."""
    target = f"{step}:broken"
    flops = ["--cost", "flops"]
    assert main(["plan", target, "--budget", "0.8", "--json", *flops]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["peak_bytes"] <= found["budget_bytes"]
    assert [row["graph"] for row in found["rows"]] == [1, 2]
    assert main(["frontier", target, "--points", "3", *flops]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 5
    assert main(["html", target, "--budget", "0.8", "--out", "step.html", *flops]) == 0
    assert "graph of the step" in Path("step.html").read_text()
    capsys.readouterr()
    assert main(["explain", target, "--graph", "2", "--format", "csv", *flops]) == 0
    assert "tanh" in capsys.readouterr().out


def test_explain_names_the_graphs_of_a_step(step: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Without a graph that exists, or with a target in time, the error says what to give."""
    assert main(["explain", f"{step}:broken"]) == 2
    assert "1 (step_of_test.py:" in capsys.readouterr().err
    assert main(["explain", f"{step}:make", "--graph", "2"]) == 2
    assert "one graph" in capsys.readouterr().err
    assert main(["plan", f"{step}:broken", "--max-slowdown", "0.1"]) == 2
    assert "--budget" in capsys.readouterr().err


def test_values_are_planned_to_a_host(step: str, capsys: pytest.CaptureFixture[str]) -> None:
    """--offload is of each command that plans, in one graph and in a step of several."""
    flops = ["--cost", "flops", "--json"]
    budget = ["--budget", "0.6", "--device", "GB200"]

    def answer(*arguments: str) -> Any:
        assert main([*arguments, *flops]) == 0
        return json.loads(capsys.readouterr().out)

    alone = answer("plan", f"{step}:make", *budget)
    found = answer("plan", f"{step}:make", *budget, "--offload", "host")
    assert alone["away_bytes"] == alone["stall_seconds"] == 0 < found["away_bytes"]
    assert found["peak_bytes"] <= found["budget_bytes"]
    small = answer("plan", f"{step}:make", *budget, "--offload", "600KiB")
    assert 0 < small["away_bytes"] <= 600 * 1024
    rows = answer("frontier", f"{step}:make", *budget, "--offload", "600KiB")
    assert [row["away_bytes"] for row in rows] == [small["away_bytes"]]
    explained = answer(
        "explain", f"{step}:make", *budget, "--offload", "host", "--decision", "offloaded"
    )
    assert sum(row["bytes"] for row in explained["rows"]) == found["away_bytes"]
    policy = ["--policy", f"{step}:away"]
    two = answer("plan", f"{step}:broken", *policy, "--offload", "host")
    assert 0 < two["away_bytes"] == sum(row["calls"] * row["away_bytes"] for row in two["rows"])
    assert main(["plan", f"{step}:broken", *policy]) == 2
    assert "there is no offload" in capsys.readouterr().err


def test_page_sends_on_all_of_its_slider(
    step: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every plan of a page with --offload may send values away."""
    drawn: list[fxckpt.Plan] = []
    monkeypatch.setattr(
        html, "render", lambda plans, **options: drawn.extend(plans) or "<title></title>"
    )
    command = ["html", f"{step}:make", "--device", "GB200", "--offload", "1GiB", "--points", "3"]
    assert main([*command, "--budget", "0.6", "--out", "away.html"]) == 0
    assert "wrote away.html" in capsys.readouterr().out
    assert len(drawn) == 4 and [bool(plan.away_bytes) for plan in drawn] == [True] * 3 + [False]


def test_tiles_are_planned(step: str, capsys: pytest.CaptureFixture[str]) -> None:
    """--tile is of models of one graph, and of values that stay on the device."""
    plan = ["plan", f"{step}:make", "--cost", "flops", "--budget", "0.7"]
    assert main([*plan, "--tile", "4"]) == 0
    assert re.search(r"tiles +4 ", capsys.readouterr().out)
    assert main([*plan, "--tile", "auto", "--offload", "1GiB"]) == 2
    assert "not allowed with argument" in capsys.readouterr().err
    assert main(["html", f"{step}:broken", "--tile", "auto"]) == 2
    assert "--tile auto is of a model of one graph" in capsys.readouterr().err


def test_plan_for_a_device_elsewhere(step: str, capsys: pytest.CaptureFixture[str]) -> None:
    """The plan and the frontier are of the device that is named, and JSON says which."""
    costs = []
    for name in ("H100", "A100"):
        assert main(["plan", f"{step}:make", "--device", name, "--json"]) == 0
        costs.append(json.loads(capsys.readouterr().out))
    assert [c["cost"] for c in costs] == ["roofline of H100", "roofline of A100"]
    assert costs[0]["step_seconds"] < costs[1]["step_seconds"]
    points = ["--points", "2", "--device", "H100", "--json"]
    assert main(["frontier", f"{step}:make", *points]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert rows[-1]["peak_bytes"] == costs[0]["baseline_peak_bytes"]


def test_verify_finds_masks_drawn_anew(step: str, capsys: pytest.CaptureFixture[str]) -> None:
    """The step is compared with a reference's, or fxckpt's own plan with the step as it is."""
    arguments = ["verify", f"{step}:checkpointed", "--reference", f"{step}:plain"]
    assert main([*arguments, "--json"]) == 3
    found = json.loads(capsys.readouterr().out)["findings"]
    assert found[0]["kind"] == "random" and found[0]["where"] == "1"
    assert main(arguments) == 3
    assert "1: aten.bernoulli_ drew other numbers" in capsys.readouterr().out
    assert main(["verify", f"{step}:make", "--budget", "0.8", "--steps", "3"]) == 0
    assert "no finding" in capsys.readouterr().out
    assert main(["verify", f"{step}:plain"]) == 2
    assert "without a reference" in capsys.readouterr().err


def test_calibrate_prints_what_it_keeps(capsys: pytest.CaptureFixture[str]) -> None:
    """The command prints the figures of this machine's device, and where they are kept."""
    assert main(["calibrate", "--device", "cpu", "--json"]) == 0
    figures = json.loads(capsys.readouterr().out)
    assert figures.pop("device") == "cpu" and all(value > 0 for value in figures.values())
    assert main(["calibrate", "--device", "cpu"]) == 0
    printed = capsys.readouterr().out
    assert "FLOP/s" in printed and "kept in" in printed


def test_unkept_calibration_exits_2(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Figures that cannot be kept are an error, not said to be kept."""
    (tmp_path / "file").touch()
    monkeypatch.setenv("FXCKPT_CACHE_DIR", str(tmp_path / "file"))
    assert main(["calibrate", "--device", "cpu"]) == 2
    printed = capsys.readouterr()
    assert not printed.out and re.search("cannot be kept in .*file", printed.err)


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
@pytest.mark.parametrize(
    "arguments", [["calibrate", "--device", "cuda"], ["plan", "F:make", "--device", "cuda"]]
)
def test_no_gpu_exits_2(
    arguments: list[str], step: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without a GPU the error says so, and how to plan for one."""
    assert main([a.replace("F:", f"{step}:") for a in arguments]) == 2
    assert re.search("no CUDA device here.*H100", capsys.readouterr().err)


def test_keyword_inputs_and_policy(step: str, capsys: pytest.CaptureFixture[str]) -> None:
    """A factory may return keyword inputs, and a policy comes from the user's file."""
    assert main(["plan", f"{step}:keywords", "--policy", f"{step}:save_all", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["runs"] == 0


def test_infeasible_budget_exits_1(step: str, capsys: pytest.CaptureFixture[str]) -> None:
    """An infeasible budget exits with 1 and names the floor."""
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
        (
            ["explain", "step_of_test.py:keywords", "--why", "nobody"],
            "neither saved nor recomputed",
        ),
        (["plan", ".step_of_test:make"], "Name it in full, as 'step_of_test'"),
        (["plan", "step_of_test.py:make", "--policy", "nope"], "Give a policy as MODULE:NAME"),
        (["html", "step_of_test.py:keywords", "--points", "1"], "with points=0 there is none"),
        (["explain", "step_of_test.py:make", "--why", "gelu", "--top", "3"], "--top and --why"),
        (
            ["explain", "step_of_test.py:make", "--by", "op", "--depth", "2"],
            "give it with --by module",
        ),
        (["explain", "step_of_test.py:make", "--json", "--format", "csv"], "choose one"),
        (["plan", "step_of_test.py:make", "--offload", "lots"], "'lots' is no memory to send"),
        (["html", "step_of_test.py:make", "--offload", "0"], "'0' is no memory to send"),
        (["frontier", "step_of_test.py:make", "--offload", "50%"], "'50%' is no memory to send"),
        (["plan", "step_of_test.py:make", "--tile", "1"], "a number of tiles from 2"),
        (["explain", "step_of_test.py:make", "--tile", "many"], "tile='many' is no way to tile"),
        (["bogus"], "invalid choice: 'bogus'"),
        ([], "COMMAND"),
    ],
)
def test_unusable_arguments_exit_2(
    step: str, arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Unusable arguments exit with 2 and one message, without a traceback."""
    assert main(arguments) == 2
    printed = capsys.readouterr()
    assert said in printed.err and "Traceback" not in printed.err
    assert not printed.out


@pytest.mark.parametrize(
    ("factory", "command"), [("nothing_to_learn", "plan"), ("on_meta", "bench")]
)
def test_unplannable_model_exits_3(
    step: str, factory: str, command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """A model that cannot be planned or run exits with 3."""
    assert main([command, f"{step}:{factory}"]) == 3
    assert "Traceback" not in capsys.readouterr().err


def test_explain_formats(step: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Each option of the command prints its own form."""
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


def explained(capsys: pytest.CaptureFixture[str], step: str, *more: str) -> str:
    assert main(["explain", f"{step}:make", "--budget", "0.7", "--cost", "flops", *more]) == 0
    return capsys.readouterr().out


@pytest.mark.parametrize(
    "answer",
    [[], ["--saved"], ["--peak"], ["--by", "op"]],
    ids=lambda answer: "".join(answer) or "rows",
)
def test_explain_answers_take_filters_and_formats(
    step: str, answer: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    """Rows, sums, saved values and the peak take the same filters and formats."""
    found = json.loads(explained(capsys, step, *answer, "--json", "--module", "1"))
    rows = found["rows"] if isinstance(found, dict) else found
    everything = list(
        csv.DictReader(io.StringIO(explained(capsys, step, *answer, "--format", "csv")))
    )
    size = "saved_bytes" if "--by" in answer else "bytes"
    assert 0 < sum(row[size] for row in rows) < sum(int(row[size]) for row in everything)
    assert all(row.get("module", "1").split(".")[0] == "1" for row in rows)
    assert (
        list(
            csv.DictReader(
                io.StringIO(explained(capsys, step, *answer, "--format", "csv", "--top", "1"))
            )
        )
        == everything[:1]
    )
    assert explained(capsys, step, *answer, "--format", "markdown", "--top", "1").count("\n") == 3
    assert "no value matches" in explained(capsys, step, *answer, "--op", "nothing")


def test_explain_filters_hold_in_json(step: str, capsys: pytest.CaptureFixture[str]) -> None:
    """The filters and the limit hold with JSON too."""
    rows = json.loads(explained(capsys, step, "--json", "--decision", "recomputed", "--top", "2"))[
        "rows"
    ]
    assert [row["decision"] for row in rows] == ["recomputed", "recomputed"]
    held = json.loads(explained(capsys, step, "--json", "--peak", "--decision", "saved"))
    assert held and all(row["held_as"] == "saved" for row in held)


def test_module_filter_takes_brackets_literally(
    step: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """A module filter takes brackets in names literally."""
    assert main(["explain", f"{step}:brackets", "--module", "heads.a[0]", "--json"]) == 0
    assert {row["module"] for row in json.loads(capsys.readouterr().out)["rows"]} == {
        "heads.a[0].1"
    }


def test_model_error_is_printed_once(step: str, capfd: pytest.CaptureFixture[str]) -> None:
    """An error of the model is printed once, with its line."""
    assert main(["plan", f"{step}:mismatched"]) == 3
    said = capfd.readouterr().err
    assert (
        said.startswith("fxckpt: the model does not run on these inputs: RuntimeError: ")
        and "[4, 7] X [8, 8]" in said
    )
    assert (
        said.endswith(
            ": return lambda x: x @ torch.ones(8, 8), torch.randn(4, 7, requires_grad=True)\n"
        )
        and said.count("\n") == 2
    )


def test_missing_file_of_model_exits_3(step: str, capsys: pytest.CaptureFixture[str]) -> None:
    """A missing file of the model is an error of the model, not of the arguments."""
    assert main(["bench", f"{step}:reads_a_file", "--steps", "1"]) == 3
    assert (
        "the step raised FileNotFoundError: [Errno 2] No such file or directory: 'weights.bin'"
        in capsys.readouterr().err
    )


def test_least_memory_for_a_slowdown(step: str, capsys: pytest.CaptureFixture[str]) -> None:
    """--max-slowdown is a target in time, in place of a budget."""
    assert main(["plan", f"{step}:make", "--max-slowdown", "10%"]) == 2
    assert main(["plan", f"{step}:make", "--max-slowdown", "0.1", "--budget", "min"]) == 2
    capsys.readouterr()
    assert main(["plan", f"{step}:make", "--max-slowdown", "0.1", "--json"]) == 0
    made = json.loads(capsys.readouterr().out)
    assert 0 < made["recompute_seconds"] <= 0.1 * made["step_seconds"]
    assert made["floor_bytes"] < made["peak_bytes"] < made["baseline_peak_bytes"]


def test_bench_reports_infeasible_budget(step: str, capsys: pytest.CaptureFixture[str]) -> None:
    """An infeasible budget has the same message as with the plan command."""
    assert main(["bench", f"{step}:make", "--budget", "1KiB"]) == 1
    said = capsys.readouterr().err.splitlines()[-1]
    assert said.startswith("fxckpt: budget='1KiB' is 1.0 KiB")
    assert "or make the batch smaller." in said


def test_frontier_prints_and_plots(step: str, capsys: pytest.CaptureFixture[str]) -> None:
    """The command prints the points and writes a picture; other paths are refused."""
    pytest.importorskip("matplotlib").use("Agg")
    base = ["frontier", f"{step}:make", "--points", "3", "--cost", "flops"]
    assert main([*base, "--plot", "curve.png", "--json"]) == 0
    assert len(json.loads(capsys.readouterr().out)) == 3
    assert Path("curve.png").read_bytes().startswith(b"\x89PNG")
    assert main([*base, "--plot", "curve.doc"]) == 2
    assert main([*base, "--plot", "no/such/folder.png"]) == 2
    assert "cannot write 'no/such/folder.png'" in capsys.readouterr().err


def test_bench_measures_predicted_peak(step: str, capsys: pytest.CaptureFixture[str]) -> None:
    """The measured peak is the predicted one, and the gradients are equal."""
    assert (
        main(
            [
                "bench",
                f"{step}:make",
                "--budget",
                "0.7",
                "--steps",
                "1",
                "--cost",
                "flops",
                "--json",
            ]
        )
        == 0
    )
    before, after = json.loads(capsys.readouterr().out)
    # The loss of this model is summed up outside of the plan.
    assert (
        abs(after["peak_bytes"] - after["predicted_bytes"])
        < 1024
        < before["peak_bytes"] - after["peak_bytes"]
    )
    assert after["gradients"] == "equal, bitwise"


def test_doctor_runs_self_tests(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The doctor tests both inner compilers, and a failing probe becomes a finding."""
    assert main(["doctor", "--json"]) == 0
    found = {f["what"]: f for f in json.loads(capsys.readouterr().out)}
    assert found["memory meter"]["found"] == "counts every block"
    assert found["self-test"]["state"] == "ok" and "bitwise" in found["self-test"]["found"]
    assert (
        found["self-test, default"]["state"] == "ok"
        and "inductor" in found["self-test, default"]["effect"]
    )
    monkeypatch.setattr("torch.cuda.is_available", lambda: 1 / 0)
    assert main(["doctor", "--quick"]) == 3
    assert "ZeroDivisionError" in capsys.readouterr().out


def lacking(what: str, capsys: pytest.CaptureFixture[str]) -> str:
    """Return what the doctor finds of the only thing that is missing."""
    capsys.readouterr()
    assert main(["doctor", "--quick", "--json"]) == 3
    (found,) = (f for f in json.loads(capsys.readouterr().out) if f["state"] == "missing")
    assert found["what"] == what
    return f"{found['found']}; {found['effect']}"


def test_doctor_finds_an_unwritable_cache(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A cache folder that can be made is made; one that cannot is a finding."""
    monkeypatch.setenv("FXCKPT_CACHE_DIR", str(tmp_path / "new" / "folder"))
    assert main(["doctor", "--quick"]) == 0
    (tmp_path / "file").touch()
    monkeypatch.setenv("FXCKPT_CACHE_DIR", str(tmp_path / "file"))
    assert "file cannot be written: " in lacking("cache folder", capsys)


@pytest.mark.parametrize(
    ("script", "said"),
    [
        (None, "No working C++ compiler found"),
        ("exit 0", "cannot open shared object"),
        (
            '[ "$1" = --version ] || { echo "a.cpp: error: no" >&2; exit 1; }',
            "a.cpp: error: no",
        ),
    ],
    ids=["none", "writes nothing", "fails"],
)
def test_doctor_compiles_with_inductors_compiler(
    script: str | None,
    said: str,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    """Inductor's compiler is tried on a small file; a failure is one line."""
    compiler = tmp_path / "compiler"
    if script is not None:
        compiler.write_text(f"#!/bin/sh\n{script}\n")
        compiler.chmod(0o755)
    # As $CXX has it when Inductor is imported.
    with inductor_config.patch({"cpp.cxx": (None, str(compiler))}):
        found = lacking("C++ compiler", capsys)
    assert said in found and 'use inner="aot_eager"' in found and "\n" not in found


def test_help_of_module() -> None:
    """The help of the module has examples and the exit codes."""
    done = subprocess.run(
        [sys.executable, "-m", "fxckpt", "--help"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0
    assert (
        "fxckpt plan train.py:make_step --budget 2GiB" in done.stdout
        and "exit codes" in done.stdout
    )


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full, a disk without room")
@pytest.mark.parametrize("more", [[], ["--json"]], ids=["text", "json"])
def test_full_disk_exits_2(more: list[str]) -> None:
    """A full disk exits with 2 and one message."""
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "fxckpt", "doctor", "--quick", *more],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
        )
    assert done.returncode == 2
    assert done.stderr == "fxckpt: cannot write to the standard output: No space left on device\n"


def test_ascii_terminal(step: str) -> None:
    """Characters that the terminal lacks are printed as question marks."""
    done = subprocess.run(
        [sys.executable, "-X", "utf8=0", "-m", "fxckpt", "plan", f"{step}:make", "--cost", "flops"],
        env={"PYTHONIOENCODING": "ascii", "PATH": ""},
        capture_output=True,
        check=False,
    )
    assert done.returncode == 0 and b"?" in done.stdout


def restore_sigint() -> None:
    """Restore the default SIGINT, which background jobs of a shell ignore."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


SCRIPT = "import sys; from fxckpt.cli import main; sys.exit(main())"
"""The console script ``fxckpt`` as pip writes it."""


@pytest.mark.parametrize("started", [["-m", "fxckpt"], ["fxckpt"]], ids=["module", "script"])
def test_interrupt_during_imports(
    started: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An interrupt during the imports exits with 130 and one line."""
    (tmp_path / "fxckpt").write_text(SCRIPT)
    (tmp_path / "torch.py").write_text(
        "import time; print('importing', flush=True); time.sleep(60)"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with subprocess.Popen(
        [sys.executable, *started],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=restore_sigint,
    ) as running:
        assert running.stdout is not None and running.stdout.readline() == "importing\n"
        running.send_signal(signal.SIGINT)
        _, said = running.communicate()
    assert (running.returncode, said) == (130, "fxckpt: interrupted\n")


def test_import_keeps_interrupt_handler() -> None:
    """Importing the package keeps Python's interrupt handler."""
    code = (
        "import signal, fxckpt; "
        "print(signal.getsignal(signal.SIGINT) is signal.default_int_handler)"
    )
    assert (
        subprocess.run(
            [sys.executable, "-c", code],
            capture_output=True,
            text=True,
            check=True,
            preexec_fn=restore_sigint,
        ).stdout
        == "True\n"
    )


def test_interrupt_in_user_code(step: str) -> None:
    """An interrupt in the user's code exits with 130 and one line."""
    Path(step).write_text(
        "import time\ndef make():\n    print('working', flush=True)\n    time.sleep(60)"
    )
    command = [sys.executable, "-m", "fxckpt", "plan", f"{step}:make"]
    with subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=restore_sigint,
    ) as running:
        assert running.stderr is not None and running.stderr.readline() == "working\n"
        running.send_signal(signal.SIGINT)
        assert running.stderr.read() == "fxckpt: interrupted\n"
    assert running.returncode == 130


BATCHES = """
import torch
from torch import nn

def make(batch, width=64):
    with torch.device("meta"):
        blocks = (nn.Sequential(nn.Linear(width, width), nn.GELU()) for _ in range(4))
        return nn.Sequential(*blocks), torch.empty(batch, width)

def of_two(batch, length):
    return None
"""


def test_fit_prints_the_largest_batch(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The sizes tried are a table, or JSON; the least that does not fit is exit code 1."""
    path = tmp_path / "batches.py"
    path.write_text(BATCHES)
    common = ["fit", f"{path}:make", "--reserve", "0"]
    assert main([*common, "--memory", "2MiB", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert any(row["size"] == found["size"] and row["fits"] for row in found["trials"])
    assert main([*common, "--memory", "2MiB", "--optimizer", "SGD", "--multiple", "8"]) == 0
    assert "largest batch" in capsys.readouterr().out
    assert main([*common, "--memory", "20KiB"]) == 1
    assert "parameters" in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments, told",
    [
        (["--over", "length"], "called with length alone"),
        (["--memory", "0.5"], "no memory"),
        (["--optimizer", "Adamw"], "torch.optim has no such class"),
        ([], "none was named"),
    ],
)
def test_bad_fit_is_told(
    arguments: list[str], told: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Unusable arguments end with exit code 2 and what to give."""
    path = tmp_path / "batches.py"
    path.write_text(BATCHES)
    assert main(["fit", f"{path}:make", *arguments]) == 2
    assert told in capsys.readouterr().err
    assert main(["fit", f"{path}:of_two", "--memory", "1MiB"]) == 2
    assert "takes (batch, length)" in capsys.readouterr().err
