"""Lowered half of a graph: its buffers and kernels, as plain data."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from fxckpt.torch_private.inductor.options import Layout


@dataclass(frozen=True)
class LoweredHalf:
    """What Inductor makes of a forward or a backward, kernel by kernel, in the order it runs them.

    A buffer lives from its first kernel to its last, both included; ``len(kernels)`` stands for the end.
    """

    kernels: tuple[tuple[str, ...], ...]
    """Per kernel: the graph's nodes it was made from."""
    inside: dict[int, int]
    """Kernels that run graphs of their own (branches, loops): the bytes that these allocate beyond what they return."""
    operands: dict[int, tuple[str, tuple[Layout, ...]]]
    """Kernels that are calls of a library: the graph's node that is called for, and the tensors it is called with, as they are laid out then."""
    allocated: tuple[tuple[str, int, int, int], ...]
    """Buffers that the half allocates: name, bytes, first and last kernel."""
    written_over: tuple[tuple[int, int], ...]
    """Per buffer, or input, that a kernel writes over because it is the last to read it: the kernel and the bytes."""
    last_read: dict[str, int]
    """Per input of the graph: the last kernel that reads it, -1 if none does."""
    outputs: tuple[tuple[str, tuple[int, ...]] | None, ...]
    """Per output of the graph: the buffer or input it lies in, and its strides; None for what is no tensor."""
    letting_go: LoweredHalf | None = None
    """Of a backward: the same where memory that nobody reads any more is not kept for a later buffer of the same size (:func:`let_go`)."""


def live_bytes(half: LoweredHalf) -> npt.NDArray[np.int64]:
    """Return the bytes of a half's own buffers during each kernel, and at its end."""
    change = np.zeros(len(half.kernels) + 2, dtype=np.int64)
    for _, nbytes, first, last in half.allocated:
        change[first] += nbytes
        change[last + 1] -= nbytes
    return np.cumsum(change)[:-1]


@dataclass(frozen=True)
class _Kept:
    """A half that was lowered to be looked at."""

    identity: Any
    """Of the graph as it came, before Inductor's own passes."""
    given: Any
    """What identifies its inputs."""
    configuration: str
    """Inductor's when it was lowered."""
    graph: Any
    """What Inductor lowered and scheduled, its ``module`` after the passes."""
    counted: _Counted


@dataclass(frozen=True)
class _Counted:
    """What Inductor counted while it lowered what is not compiled yet."""

    counters: dict[str, Counter[str]] = field(default_factory=dict)
    deltas: list[Any] = field(default_factory=list)
    """Of Inductor's metrics."""

    def add(self) -> None:
        """Count it, as it is compiled now."""
        from torch._dynamo.utils import counters
        from torch._inductor import metrics

        for name, more in self.counters.items():
            counters[name].update(more)
        for delta in self.deltas:
            metrics.CachedMetricsHelper.apply_deltas(delta)
