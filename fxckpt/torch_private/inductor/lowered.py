"""Lowered half: the kernels and buffers that Inductor makes of a forward or a backward, as data."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from fxckpt.torch_private.inductor.options import Layout
from fxckpt.utils.intervals import live_bytes


@dataclass(frozen=True)
class LoweredHalf:
    """Kernels of a forward or a backward, in execution order, and their buffers.

    A buffer lives from its first kernel to its last, inclusive; ``len(kernels)`` is the end.
    """

    kernels: tuple[tuple[str, ...], ...]
    """Names of the graph's nodes in each kernel."""
    inside: dict[int, int]
    """Bytes that subgraphs (branches, loop bodies) allocate beyond their results, by kernel."""
    operands: dict[int, tuple[str, tuple[Layout, ...]]]
    """Node, and layouts of the operands, of each extern kernel."""
    allocated: tuple[tuple[str, int, int, int], ...]
    """Name, bytes, first and last kernel of each buffer that the half allocates."""
    overwritten: tuple[tuple[int, int], ...]
    """Kernel and bytes of each buffer or input that is overwritten by its last reader."""
    last_read: dict[str, int]
    """Last kernel that reads each input of the graph, -1 if none does."""
    outputs: tuple[tuple[str, tuple[int, ...]] | None, ...]
    """Buffer or input that holds each output, and its strides; None if it is no tensor."""
    freeing_early: LoweredHalf | None = None
    """The same backward if it frees buffers early (:func:`~.lowering.free_early`)."""

    def live_bytes(self) -> npt.NDArray[np.int64]:
        """Return the bytes of the half's own buffers during each kernel, and at its end."""
        intervals = ((first, last, nbytes) for _, nbytes, first, last in self.allocated)
        return live_bytes(intervals, len(self.kernels) + 1)

    def without(self, nodes: Collection[str]) -> LoweredHalf:
        """Return the half without the buffers that the extern kernels of named nodes allocate."""
        calls = {i for i, (name, _) in self.operands.items() if name in nodes}
        kept = tuple(buffer for buffer in self.allocated if buffer[2] not in calls)
        return replace(self, allocated=kept)


@dataclass(frozen=True)
class _Kept:
    """A half that was lowered to be examined, kept for its compile."""

    identity: Any
    """Identity of the graph before Inductor's own passes."""
    given: Any
    """Identity of its inputs."""
    configuration: str
    """Inductor's options when it was lowered."""
    graph: Any
    """Inductor's lowered and scheduled graph; its ``module`` is the graph after the passes."""
    counted: _Counted
    """Inductor's counts during the lowering."""


@dataclass(frozen=True)
class _Counted:
    """Inductor's counts during a lowering, to be added when the half is compiled."""

    counters: dict[str, Counter[str]] = field(default_factory=dict)
    """Differences of Dynamo's counters."""
    deltas: list[Any] = field(default_factory=list)
    """Differences of Inductor's metrics."""

    def add(self) -> None:
        """Add the differences to the counters and metrics."""
        from torch._dynamo.utils import counters
        from torch._inductor import metrics

        for name, more in self.counters.items():
            counters[name].update(more)
        for delta in self.deltas:
            metrics.CachedMetricsHelper.apply_deltas(delta)
