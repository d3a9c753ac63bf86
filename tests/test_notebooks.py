"""The notebooks run from a fresh kernel with warnings as errors, and read without being run."""

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

FOLDER = Path(__file__).parent.parent / "notebooks"
BOOKS = sorted(FOLDER.glob("*.ipynb"))
AT_A_TIME = 2
"""Much of the time of a notebook goes into importing, on one core."""
ONE_THREAD = {**os.environ, "OMP_NUM_THREADS": "1"}
"""Threads of kernels that run beside each other would wait for each other."""


@pytest.fixture(scope="module")
def executed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Mapping[Path, str]]:
    """Where the notebooks went that ran, and what was said of those that failed."""
    pytest.importorskip("nbclient")
    out = tmp_path_factory.mktemp("notebooks")

    def run(path: Path) -> str:
        command = [sys.executable, FOLDER / "run.py", "--out", out, path]
        done = subprocess.run(command, env=ONE_THREAD, capture_output=True, text=True, check=False)
        return "" if done.returncode == 0 else done.stderr

    with ThreadPoolExecutor(AT_A_TIME) as pool:
        return out, dict(zip(BOOKS, pool.map(run, BOOKS), strict=True))


@pytest.mark.parametrize("path", BOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs_and_shows_what_was_kept_of_it(
    path: Path, executed: tuple[Path, Mapping[Path, str]]
) -> None:
    out, failed = executed
    assert not failed[path], failed[path]
    assert kinds(out / path.name) == kinds(path)


def kinds(path: Path) -> list[set[str]]:
    """What sorts of output each cell has."""
    cells: list[dict[str, Any]] = json.loads(path.read_text())["cells"]
    return [{output["output_type"] for output in cell.get("outputs", ())} for cell in cells]


@pytest.mark.parametrize("path", BOOKS, ids=lambda path: path.stem)
def test_what_is_kept_names_no_machine(path: Path) -> None:
    text = path.read_text()
    assert '"output_type"' in text
    assert not re.search(r"/(?:root|home|tmp|Users)/|site-packages", text)
