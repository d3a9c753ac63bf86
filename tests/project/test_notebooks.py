"""The notebooks run from a fresh kernel with warnings as errors, and are stored with outputs."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

FOLDER = Path(__file__).parents[2] / "notebooks"
BOOKS = sorted(FOLDER.glob("*.ipynb"))
OFTEN = ("1_from_zero", "5_min_cut")
"""Notebooks that run by default: the first steps, and the one on the solver. The sweep runs all."""
ONE_THREAD = {**os.environ, "OMP_NUM_THREADS": "1"}
"""Environment with one thread a kernel, as parallel kernels would compete for cores."""


@pytest.mark.parametrize(
    "path",
    [
        pytest.param(path, id=path.stem, marks=() if path.stem in OFTEN else pytest.mark.sweep)
        for path in BOOKS
    ],
)
def test_notebook_runs_with_stored_output_types(path: Path, tmp_path: Path) -> None:
    """A notebook runs from a fresh kernel, with outputs of the stored types."""
    pytest.importorskip("nbclient")
    command = [sys.executable, FOLDER / "run.py", "--out", tmp_path, path]
    done = subprocess.run(command, env=ONE_THREAD, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert kinds(tmp_path / path.name) == kinds(path)


def kinds(path: Path) -> list[set[str]]:
    """Return the types of output of each cell."""
    cells: list[dict[str, Any]] = json.loads(path.read_text())["cells"]
    return [{output["output_type"] for output in cell.get("outputs", ())} for cell in cells]


@pytest.mark.parametrize("path", BOOKS, ids=lambda path: path.stem)
def test_stored_outputs_name_no_machine(path: Path) -> None:
    """The stored outputs hold no path of a machine."""
    text = path.read_text()
    assert '"output_type"' in text
    assert not re.search(r"/(?:root|home|tmp|Users)/|site-packages", text)
