"""Run the notebooks and keep what they print: ``python notebooks/run.py``, or ``python notebooks/run.py NOTEBOOK...``.

The tests run them too, with ``--out FOLDER``, which leaves the notebooks themselves alone. Warnings are errors in both.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import nbformat
from nbclient import NotebookClient

FOLDER = Path(__file__).parent
SECONDS = 300
"""For one cell."""
STRICT = """
import os, warnings
os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # the profiler that measures peaks writes a line whenever it starts or stops
warnings.simplefilter("error")
warnings.filterwarnings("ignore", category=DeprecationWarning)
warnings.filterwarnings("ignore", category=PendingDeprecationWarning)
warnings.filterwarnings("ignore", category=FutureWarning)
warnings.filterwarnings("ignore", message=".*an autograd kernel was not registered.*")
warnings.filterwarnings("ignore", message=".*Profiler clears events.*")
"""
"""Run before the first cell; torch and transformers warn about themselves."""


def execute(path: Path) -> nbformat.NotebookNode:
    """Run a notebook and return it with its outputs. Raises ``nbclient.exceptions.CellExecutionError`` with the cell that failed."""
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
    # What the machine is called and which patch of Python it runs is no news to a reader.
    book.metadata = nbformat.from_dict(
        {"kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"}}
    )
    return book


def main() -> None:
    """Run notebooks, all by default."""
    parser = argparse.ArgumentParser(description="Run the notebooks and keep what they print.")
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
