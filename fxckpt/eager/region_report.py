"""Report of eager regions: their ops, and what each keeps, recomputes or drops."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

from tabulate import tabulate
from torch import Tensor, fx

from fxckpt.budgets import format_bytes
from fxckpt.eager.recorder import Recorder
from fxckpt.eager.tape import Call, TensorVersion, slice_of
from fxckpt.eager.tape_to_fx import graph_of
from fxckpt.ops.traits import traits_of
from fxckpt.passes.meta import CALL
from fxckpt.plans.types import Plan

KEPT, SENT, RECOMPUTED, UNUSED = "kept", "sent away", "recomputed", "not needed"


@dataclass(frozen=True)
class RegionRow:
    """One op of a region, views left out."""

    op: str
    shape: tuple[int, ...]
    dtype: str
    bytes: int
    """Bytes of its first result."""
    module: str
    source: str
    what: str
    """``"kept"``, ``"sent away"``, ``"recomputed"`` in the backward, or ``"not needed"`` by it."""


@dataclass(frozen=True)
class Region:
    """One call of :func:`fxckpt.checkpoint`."""

    name: str
    """Name of the function, or class of the module."""
    graph: fx.GraphModule
    """The region's ATen ops as a graph; its inputs are the tensors from outside the region.

    Each node's ``meta["fxckpt"]`` says what becomes of its result, as in a row."""
    rows: tuple[RegionRow, ...]
    plan: Plan | None
    """Plan of a region with a policy or budget."""

    def __str__(self) -> str:
        kept = sum(row.bytes for row in self.rows if row.what == KEPT)
        sent = sum(row.bytes for row in self.rows if row.what == SENT)
        away = f", {format_bytes(sent)} sent away" if sent else ""
        recomputed = sum(row.what == RECOMPUTED for row in self.rows)
        head = (
            f"region {self.name}: {len(self.rows)} ops; {format_bytes(kept)} kept beside its "
            f"inputs{away}, {recomputed} ops recomputed"
        )
        table = [
            (
                r.op,
                "x".join(map(str, r.shape)),
                r.dtype,
                format_bytes(r.bytes),
                r.module,
                r.source,
                r.what,
            )
            for r in self.rows
        ]
        headers = ("op", "shape", "dtype", "bytes", "module", "source", "backward")
        return f"{head}\n{tabulate(table, headers=headers)}"


_WATCHED: ContextVar[list[Region] | None] = ContextVar("fxckpt_regions", default=None)


@contextmanager
def record_regions() -> Iterator[list[Region]]:
    """Collect a report of each eager region as it ends; recording takes time.

    Examples
    --------
    >>> import torch, fxckpt
    >>> with fxckpt.record_regions() as regions:
    ...     x = torch.ones(3, requires_grad=True)
    ...     loss = fxckpt.checkpoint(lambda x: x.sin().exp().sum(), x)
    >>> [row.what for row in regions[0].rows]
    ['recomputed', 'recomputed', 'not needed']
    """
    found: list[Region] = []
    token = _WATCHED.set(found)
    try:
        yield found
    finally:
        _WATCHED.reset(token)


def watched() -> list[Region] | None:
    """Return the list that collects regions, or None."""
    return _WATCHED.get()


def region_of(
    function: Callable[..., Any],
    recorder: Recorder,
    outputs: Sequence[Tensor],
    plan: Plan | None,
    leaving: Sequence[TensorVersion] = (),
) -> Region:
    """Return the report of a region whose recorder is not finished.

    ``leaving`` are the versions that are sent away.
    """
    needed, _ = slice_of(handle.version for handle in recorder.tape.live())
    graph = graph_of(recorder.calls, recorder.versions_of(outputs))
    decisions = {call.number: _decision(call, needed, set(leaving)) for call in recorder.calls}
    for node in graph.module.graph.nodes:
        if "custom" in node.meta:
            node.meta["fxckpt"] = decisions[node.meta["custom"][CALL]]
    rows = tuple(
        _row(call, decisions[call.number])
        for call in recorder.calls
        if traits_of(call.op).reads and call.outputs
    )
    name = getattr(function, "__qualname__", type(function).__name__)
    return Region(name, graph.module, rows, plan)


def _decision(call: Call, needed: set[Call], leaving: set[TensorVersion]) -> str:
    versions = [version for ref in call.outputs if (version := ref()) is not None]
    if leaving.intersection(versions):
        return SENT
    if any(version.kept is not None and not version.is_view for version in versions):
        return KEPT
    return RECOMPUTED if call in needed else UNUSED


def _row(call: Call, what: str) -> RegionRow:
    version: TensorVersion | None = call.outputs[0]()
    geometry = version.geometry if version is not None else None
    _, shape, _, dtype, _, _ = geometry if geometry is not None else (0, (), (), None, False, False)
    detail = call.detail
    return RegionRow(
        op=str(call.op),
        shape=tuple(shape),
        dtype=str(dtype).removeprefix("torch."),
        bytes=math.prod(shape) * (0 if dtype is None else dtype.itemsize),
        module="" if detail is None else detail.module,
        source="" if detail is None else detail.source,
        what=what,
    )
