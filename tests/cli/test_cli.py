"""The command line: what it prints, what it returns, and what it says to mistakes."""

from __future__ import annotations

import csv
import io
import json
import signal
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
        self.heads = nn.ModuleDict({name: nn.Sequential(nn.Linear(8, 8), nn.Softmax(-1)) for name in ("a[0]", "a[1]")})

    def forward(self, x):
        return self.heads["a[0]"](x) + self.heads["a[1]"](x)

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


def test_an_infeasible_budget_is_1_and_tells_the_floor(
    step: str, capsys: pytest.CaptureFixture[str]
) -> None:
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
        (["bogus"], "invalid choice: 'bogus'"),
        ([], "COMMAND"),
    ],
)
def test_mistakes_are_2_without_a_traceback(
    step: str, arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 2
    printed = capsys.readouterr()
    assert said in printed.err and "Traceback" not in printed.err
    assert not printed.out


@pytest.mark.parametrize(
    ("factory", "command"), [("nothing_to_learn", "plan"), ("on_meta", "bench")]
)
def test_what_cannot_be_planned_or_run_is_3(
    step: str, factory: str, command: str, capsys: pytest.CaptureFixture[str]
) -> None:
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


def explained(capsys: pytest.CaptureFixture[str], step: str, *more: str) -> str:
    assert main(["explain", f"{step}:make", "--budget", "0.7", "--cost", "flops", *more]) == 0
    return capsys.readouterr().out


@pytest.mark.parametrize(
    "answer",
    [[], ["--saved"], ["--peak"], ["--by", "op"]],
    ids=lambda answer: "".join(answer) or "rows",
)
def test_every_answer_takes_filters_and_formats(
    step: str, answer: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
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


def test_decision_and_top_hold_in_json_too(step: str, capsys: pytest.CaptureFixture[str]) -> None:
    rows = json.loads(explained(capsys, step, "--json", "--decision", "recomputed", "--top", "2"))[
        "rows"
    ]
    assert [row["decision"] for row in rows] == ["recomputed", "recomputed"]
    held = json.loads(explained(capsys, step, "--json", "--peak", "--decision", "saved"))
    assert held and all(row["held_as"] == "saved" for row in held)


def test_modules_with_brackets_are_found_by_their_names(
    step: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["explain", f"{step}:brackets", "--module", "heads.a[0]", "--json"]) == 0
    assert {row["module"] for row in json.loads(capsys.readouterr().out)["rows"]} == {
        "heads.a[0].1"
    }


def test_a_mistake_in_the_model_is_told_once(step: str, capfd: pytest.CaptureFixture[str]) -> None:
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


def test_a_file_that_the_model_misses_is_the_models(
    step: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", f"{step}:reads_a_file", "--steps", "1"]) == 3
    assert (
        "the step raised FileNotFoundError: [Errno 2] No such file or directory: 'weights.bin'"
        in capsys.readouterr().err
    )


def test_bench_says_of_a_budget_what_plan_says(
    step: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", f"{step}:make", "--budget", "1KiB"]) == 1
    said = capsys.readouterr().err.splitlines()[-1]
    assert said.startswith("fxckpt: budget='1KiB' is 1024 bytes") and said.endswith(
        "or make the batch smaller."
    )


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


def test_doctor_examines_itself(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert main(["doctor", "--json"]) == 0
    found = {f["what"]: f for f in json.loads(capsys.readouterr().out)}
    assert found["self-test"]["state"] == "ok" and "bitwise" in found["self-test"]["found"]
    assert (
        found["self-test, default"]["state"] == "ok"
        and "inductor" in found["self-test, default"]["effect"]
    )
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setattr("torch.cuda.is_available", lambda: 1 / 0)
    assert main(["doctor", "--quick"]) == 0
    printed = capsys.readouterr().out
    assert 'use inner="aot_eager"' in printed and "ZeroDivisionError" in printed


def test_help_has_examples_and_runs_as_a_module() -> None:
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
def test_a_full_disk_is_2(more: list[str]) -> None:
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "fxckpt", "doctor", "--quick", *more],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
        )
    assert done.returncode == 2
    assert done.stderr == "fxckpt: cannot write to the standard output: No space left on device\n"


def test_a_terminal_without_the_characters_is_no_error(step: str) -> None:
    done = subprocess.run(
        [sys.executable, "-X", "utf8=0", "-m", "fxckpt", "plan", f"{step}:make", "--cost", "flops"],
        env={"PYTHONIOENCODING": "ascii", "PATH": ""},
        capture_output=True,
        check=False,
    )
    assert done.returncode == 0 and b"?" in done.stdout


def heed_ctrl_c() -> None:
    """Undo what a background job of a shell inherits: it ignores Ctrl-C."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


SCRIPT = "import sys; from fxckpt.cli import main; sys.exit(main())"
"""What pip writes into the file that it calls ``fxckpt``."""


@pytest.mark.parametrize("started", [["-m", "fxckpt"], ["fxckpt"]], ids=["module", "script"])
def test_ctrl_c_during_the_imports_is_quiet(
    started: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
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
        preexec_fn=heed_ctrl_c,
    ) as running:
        assert running.stdout is not None and running.stdout.readline() == "importing\n"
        running.send_signal(signal.SIGINT)
        _, said = running.communicate()
    assert (running.returncode, said) == (130, "fxckpt: interrupted\n")


def test_importing_the_package_leaves_ctrl_c_alone() -> None:
    code = "import signal, fxckpt; print(signal.getsignal(signal.SIGINT) is signal.default_int_handler)"
    assert (
        subprocess.run(
            [sys.executable, "-c", code],
            capture_output=True,
            text=True,
            check=True,
            preexec_fn=heed_ctrl_c,
        ).stdout
        == "True\n"
    )


def test_ctrl_c_in_the_users_code_is_quiet(step: str) -> None:
    Path(step).write_text(
        "import time\ndef make():\n    print('working', flush=True)\n    time.sleep(60)"
    )
    command = [sys.executable, "-m", "fxckpt", "plan", f"{step}:make"]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, preexec_fn=heed_ctrl_c
    ) as running:
        assert running.stderr is not None and running.stderr.readline() == "working\n"
        running.send_signal(signal.SIGINT)
        assert running.stderr.read() == "fxckpt: interrupted\n"
    assert running.returncode == 130
