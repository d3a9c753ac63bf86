"""The command line: its output, exit codes and error messages."""

from __future__ import annotations

import csv
import io
import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest

import fxckpt
from fxckpt.cli import main
from fxckpt.reports import html


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
        (["frontier", "step_of_test.py:make", "--points=-2"], "not a whole number of 0 or more"),
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


def test_misspelled_module_lists_those_there(step: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", f"{step}:make", "--budget", "0.8", "--module", "nosuch"]) == 0
    assert "no value matches; modules: 0.0, 0.1" in capsys.readouterr().out


def test_plot_without_matplotlib_is_refused_first(
    step: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nothing is planned for a picture that cannot be drawn."""
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert main(["frontier", f"{step}:raises", "--plot", "x.png"]) == 2
    assert "pip install 'fxckpt[plot]'" in capsys.readouterr().err
