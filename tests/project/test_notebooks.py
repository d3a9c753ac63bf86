"""The notebooks run from a fresh kernel with warnings as errors, and are stored with outputs."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

FOLDER = Path(__file__).parents[2] / "notebooks"
BOOKS = sorted(FOLDER.glob("*.ipynb"))
AT_A_TIME = 2
"""Number of notebooks run at once; each spends much of its time in imports, on one core."""
ONE_THREAD = {**os.environ, "OMP_NUM_THREADS": "1"}
"""Environment with one thread a kernel, as parallel kernels would compete for cores."""


@pytest.fixture(scope="module")
def executed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Mapping[Path, str]]:
    """The folder of the executed notebooks, and the error of each, empty if it ran."""
    pytest.importorskip("nbclient")
    out = tmp_path_factory.mktemp("notebooks")

    def run(path: Path) -> str:
        command = [sys.executable, FOLDER / "run.py", "--out", out, path]
        done = subprocess.run(command, env=ONE_THREAD, capture_output=True, text=True, check=False)
        return "" if done.returncode == 0 else done.stderr

    with ThreadPoolExecutor(AT_A_TIME) as pool:
        return out, dict(zip(BOOKS, pool.map(run, BOOKS), strict=True))


@pytest.mark.parametrize("path", BOOKS, ids=lambda path: path.stem)
def test_notebook_runs_with_stored_output_types(
    path: Path, executed: tuple[Path, Mapping[Path, str]]
) -> None:
    """A notebook runs from a fresh kernel, with outputs of the stored types."""
    out, failed = executed
    assert not failed[path], failed[path]
    assert kinds(out / path.name) == kinds(path)


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
