"""Run the notebooks and store their outputs: ``python notebooks/run.py [NOTEBOOK ...]``.

The tests run them with ``--out FOLDER``, which leaves the notebooks themselves unchanged. Warnings
are errors in both cases.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import nbformat
from nbclient import NotebookClient

FOLDER = Path(__file__).parent
SECONDS = 300
"""Timeout of a cell."""
STRICT = """
import os, warnings
os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # Kineto logs each start and stop
warnings.simplefilter("error")
warnings.filterwarnings("ignore", category=DeprecationWarning)
warnings.filterwarnings("ignore", category=PendingDeprecationWarning)
warnings.filterwarnings("ignore", category=FutureWarning)
warnings.filterwarnings("ignore", message=".*an autograd kernel was not registered.*")
warnings.filterwarnings("ignore", message=".*Profiler clears events.*")
"""
"""Code run before the first cell; the ignored warnings are of torch and transformers internals."""


def execute(path: Path) -> nbformat.NotebookNode:
    """Run a notebook and return it with its outputs.

    Raises ``nbclient.exceptions.CellExecutionError`` with the failed cell.
    """
    book = nbformat.read(path, as_version=4)
    book.cells.insert(0, nbformat.v4.new_code_cell(STRICT))
    NotebookClient(
        book,
        timeout=SECONDS,
        kernel_name="python3",
        resources={"metadata": {"path": str(FOLDER)}},
        record_timing=False,
    ).execute()
    del book.cells[0]
    for number, cell in enumerate((cell for cell in book.cells if cell.cell_type == "code"), 1):
        cell.execution_count = number
        for output in cell.outputs:
            if "execution_count" in output:
                output["execution_count"] = number
    # Drop the name of the machine's kernel and its Python patch version.
    book.metadata = nbformat.from_dict(
        {"kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"}}
    )
    return book


def main() -> None:
    """Run the notebooks on the command line, by default all."""
    parser = argparse.ArgumentParser(description="Run the notebooks and store their outputs.")
    parser.add_argument("notebooks", nargs="*", type=Path, help="which ones (all)")
    parser.add_argument(
        "--out", type=Path, metavar="FOLDER", help="write them there instead of in place"
    )
    options = parser.parse_args()
    for path in options.notebooks or sorted(FOLDER.glob("*.ipynb")):
        print(path.name, flush=True)
        nbformat.write(execute(path), path if options.out is None else options.out / path.name)


if __name__ == "__main__":
    main()
