"""Profiler records of recomputes in the backward.

In graphs that run as Python (``inner="aot_eager"``) each recompute gets a record called
``fxckpt.recompute NAME``, active only under a profiler. In every graph a recompute carries the
annotation ``{"recompute_of": NAME}``, shown by ``print_readable()``, and a name that ends in
``_recompute``, which Inductor writes beside its generated code.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import fx

from fxckpt.passes.meta import IS_RECOMPUTE, RECOMPUTE_OF
from fxckpt.torch_private import RECORD_FUNCTION

PREFIX = "fxckpt.recompute "
"""Prefix of the records' names."""

Lines = list[str]


def record_runs(half: fx.GraphModule) -> None:
    """Record every recompute in the Python code generated from ``half``; the graph is unchanged."""
    recomputes = {
        node.name: str(node.meta[RECOMPUTE_OF])
        for node in half.graph.nodes
        if node.meta.get(IS_RECOMPUTE)
    }
    if not recomputes:
        return

    def with_records(before: Callable[[Lines], Lines] | None) -> Callable[[Lines], Lines]:
        return lambda lines: _recorded(before(lines) if before is not None else lines, recomputes)

    half.graph.on_generate_code(with_records)


def _recorded(lines: Lines, recomputes: dict[str, str]) -> Lines:
    """Wrap the statement of each name in a record; a statement ends with its line."""
    found: Lines = []
    is_open = False
    for piece in lines:
        name = (
            recomputes.get(piece.split(" = ")[0].split(":")[0].strip()) if " = " in piece else None
        )
        if name is not None and not is_open:
            found.append(
                f"_fxckpt_record = {RECORD_FUNCTION}({PREFIX + name!r}); "
                "_fxckpt_record.__enter__()\n"
            )
            is_open = True
        found.append(piece)
        if is_open and piece.endswith("\n"):
            found.append("_fxckpt_record.__exit__(None, None, None)\n")
            is_open = False
    return found
