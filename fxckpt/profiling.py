"""Profiling: runs of the backward that repeat the forward are named in the profiler.

In graphs that run as Python (``inner="aot_eager"``) each gets a record called ``fxckpt.recompute NAME``, in code that runs only while a profiler
does. In every graph they carry the annotation ``{"recompute_of": NAME}``, which ``print_readable()`` shows, and names that end in ``_recompute``,
which Inductor writes beside the code that it makes of them.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import fx

from fxckpt.passes.meta import IS_RECOMPUTE, RECOMPUTE_OF
from fxckpt.torch_private import RECORD_FUNCTION

PREFIX = "fxckpt.recompute "
"""How the records' names begin."""

Lines = list[str]


def record_runs(half: fx.GraphModule) -> None:
    """Let the Python code that is made of ``half`` next record every run that repeats a forward op. Leaves the graph alone."""
    again = {
        node.name: str(node.meta[RECOMPUTE_OF])
        for node in half.graph.nodes
        if node.meta.get(IS_RECOMPUTE)
    }
    if not again:
        return

    def with_records(before: Callable[[Lines], Lines] | None) -> Callable[[Lines], Lines]:
        return lambda lines: _recorded(before(lines) if before is not None else lines, again)

    half.graph.on_generate_code(with_records)


def _recorded(lines: Lines, again: dict[str, str]) -> Lines:
    """Put a record around the statement of each name; a statement is the pieces up to the end of its line."""
    found: Lines = []
    is_open = False
    for piece in lines:
        name = again.get(piece.split(" = ")[0].split(":")[0].strip()) if " = " in piece else None
        if name is not None and not is_open:
            found.append(
                f"_fxckpt_record = {RECORD_FUNCTION}({PREFIX + name!r}); _fxckpt_record.__enter__()\n"
            )
            is_open = True
        found.append(piece)
        if is_open and piece.endswith("\n"):
            found.append("_fxckpt_record.__exit__(None, None, None)\n")
            is_open = False
    return found
