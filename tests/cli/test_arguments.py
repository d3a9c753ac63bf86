"""Parsed options."""

from __future__ import annotations

import pytest
import torch

from fxckpt.cli.arguments import USAGE, build_parser, parse
from fxckpt.errors import InvalidOption
from fxckpt.planner.planned_device import planned_device


@pytest.mark.parametrize(
    ("text", "budget"),
    [("4096", 4096), ("0.6", 0.6), ("2GiB", "2GiB"), ("auto", "auto"), ("None", None)],
)
def test_budget_has_the_type_of_its_text(text: str, budget: object) -> None:
    """Bytes are integers, fractions are floats, and all else is text or None."""
    found = parse(["plan", "train.py:make", "--budget", text]).budget
    assert found == budget and type(found) is type(budget)


def test_defaults() -> None:
    """A command has defaults for all of its options."""
    options = vars(parse(["bench", "train.py:make"]))
    assert options == {
        "command": "bench",
        "target": "train.py:make",
        "json": False,
        "traceback": False,
        "policy": None,
        "cost": "roofline",
        "budget": None,
        "steps": 5,
        "inner": "aot_eager",
    }


@pytest.mark.parametrize(
    "name", ["plan", "explain", "frontier", "html", "bench", "calibrate", "doctor"]
)
def test_command_help_has_an_example(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    """The help of each command ends with an example."""
    with pytest.raises(SystemExit) as stop:
        build_parser().parse_args([name, "--help"])
    assert stop.value.code == 0
    assert f"example:\n  fxckpt {name}" in capsys.readouterr().out


def test_options_without_effect_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    """An option of ``explain`` without effect on the answer exits with an error that names it."""
    with pytest.raises(SystemExit) as stop:
        parse(["explain", "train.py:make", "--why", "gelu", "--top", "3", "--op", "mm"])
    assert stop.value.code == USAGE
    assert "--top, --op and --why: they have no effect on the other" in capsys.readouterr().err


def test_unknown_option_gets_the_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    """An option that a command lacks exits with an error that names the nearest one."""
    with pytest.raises(SystemExit) as stop:
        parse(["plan", "train.py:make", "--budgte", "3"])
    assert stop.value.code == USAGE
    assert "plan has no --budgte 3. Did you mean --budget?" in capsys.readouterr().err


def test_unknown_device_gets_the_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    """A device that is not known exits with an error that names the nearest ones."""
    with pytest.raises(SystemExit) as stop:
        parse(["plan", "train.py:make", "--device", "H10"])
    assert stop.value.code == USAGE
    printed = capsys.readouterr().err
    assert "device='H10' is not a device that fxckpt knows. Did you mean 'H100'" in printed


@pytest.mark.parametrize("name", ["plan", "explain", "frontier", "html"])
def test_commands_that_plan_take_a_device(name: str) -> None:
    """The commands that only plan take a device, by any of its names."""
    assert parse([name, "train.py:make", "--device", "rtx 4090"]).device == "rtx 4090"
    assert parse([name, "train.py:make", "--device", "cpu"]).device == "cpu"


@pytest.mark.parametrize("command", [["plan", "train.py:make"], ["calibrate"]])
def test_device_is_checked_as_by_plan(
    command: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A device of this machine may have a number; one too many has the error of ``plan``."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert str(parse([*command, "--device", "cuda:1"]).device) == "cuda:1"
    with pytest.raises(SystemExit) as stop:
        parse([*command, "--device", "cuda:2"])
    assert stop.value.code == USAGE
    with pytest.raises(InvalidOption) as error:
        planned_device("cuda:2", is_on_meta=True)
    assert str(error.value) in capsys.readouterr().err
