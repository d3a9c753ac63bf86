"""The notebooks run from a fresh kernel with warnings as errors, and read without being run."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent.parent / "notebooks"
BOOKS = sorted(FOLDER.glob("*.ipynb"))


@pytest.mark.parametrize("path", BOOKS, ids=lambda path: path.stem)
@pytest.mark.filterwarnings("default")
def test_a_notebook_runs(path: Path) -> None:
    pytest.importorskip("nbclient")
    spec = importlib.util.spec_from_file_location("notebooks_run", FOLDER / "run.py")
    assert spec is not None and spec.loader is not None
    run = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(run)
    book = run.execute(path)
    kept = run.nbformat.read(path, as_version=4)
    assert [len(cell.get("outputs", ())) for cell in book.cells] == [len(cell.get("outputs", ())) for cell in kept.cells]


@pytest.mark.parametrize("path", BOOKS, ids=lambda path: path.stem)
def test_what_is_kept_names_no_machine(path: Path) -> None:
    text = path.read_text()
    assert '"output_type"' in text
    assert not re.search(r"/(?:root|home|tmp|Users)/|site-packages", text)
