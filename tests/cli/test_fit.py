"""``fxckpt fit``: the largest batch, and what cannot be asked."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from fxckpt.cli import main

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
