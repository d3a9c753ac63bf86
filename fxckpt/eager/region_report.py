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

KEPT, AGAIN, UNUSED = "kept", "runs again", "not needed"


@dataclass(frozen=True)
class RegionRow:
    """One op of a region, views left out."""

    op: str
    shape: tuple[int, ...]
    dtype: str
    bytes: int
    """Of its first result, as a tensor of its own."""
    module: str
    source: str
    what: str
    """``"kept"``, ``"runs again"`` in the backward, or ``"not needed"`` by it."""


@dataclass(frozen=True)
class Region:
    """One call of :func:`fxckpt.checkpoint`."""

    name: str
    """Of the function or module."""
    graph: fx.GraphModule
    """The region's ATen ops as a graph; its inputs are the tensors from outside the region.

    Each node's ``meta["fxckpt"]`` says whether its result is kept, recomputed or not needed."""
    rows: tuple[RegionRow, ...]
    plan: Plan | None
    """The plan it follows, if it was given a policy or a budget."""

    def __str__(self) -> str:
        kept = sum(row.bytes for row in self.rows if row.what == KEPT)
        again = sum(row.what == AGAIN for row in self.rows)
        head = (
            f"region {self.name}: {len(self.rows)} ops; {format_bytes(kept)} kept beside its "
            f"inputs, {again} ops run again"
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
    """Collect what eager regions do, in the order in which they end; recording takes time.

    Examples
    --------
    >>> import torch, fxckpt
    >>> with fxckpt.record_regions() as regions:
    ...     x = torch.ones(3, requires_grad=True)
    ...     loss = fxckpt.checkpoint(lambda x: x.sin().exp().sum(), x)
    >>> [row.what for row in regions[0].rows]
    ['runs again', 'runs again', 'not needed']
    """
    found: list[Region] = []
    token = _WATCHED.set(found)
    try:
        yield found
    finally:
        _WATCHED.reset(token)


def watched() -> list[Region] | None:
    """Return where regions are collected; None where nobody does."""
    return _WATCHED.get()


def region_of(
    function: Callable[..., Any], recorder: Recorder, outputs: Sequence[Tensor], plan: Plan | None
) -> Region:
    """Return what a recorder has recorded; to be asked before it is finished."""
    needed, _ = slice_of(handle.place for handle in recorder.tape.live())
    graph = graph_of(recorder.calls, recorder.places_of(outputs))
    became = {call.number: _became(call, needed) for call in recorder.calls}
    for node in graph.module.graph.nodes:
        if "custom" in node.meta:
            node.meta["fxckpt"] = became[node.meta["custom"][CALL]]
    rows = tuple(
        _row(call, became[call.number])
        for call in recorder.calls
        if traits_of(call.op).reads and call.outputs
    )
    name = getattr(function, "__qualname__", type(function).__name__)
    return Region(name, graph.module, rows, plan)


def _became(call: Call, needed: set[Call]) -> str:
    places = [place for ref in call.outputs if (place := ref()) is not None]
    if any(place.kept is not None and not place.is_view for place in places):
        return KEPT
    return AGAIN if call in needed else UNUSED


def _row(call: Call, what: str) -> RegionRow:
    place: TensorVersion | None = call.outputs[0]()
    geometry = place.geometry if place is not None else None
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
