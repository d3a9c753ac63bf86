"""The commands that look at the machine: doctor and calibrate."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch
from torch._inductor import config as inductor_config

from fxckpt.cli import main


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
