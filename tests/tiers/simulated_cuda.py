"""Streams in memory of the host that run what is queued at the last legal moment, or at once.

The caller's stream is the test itself: its ops run when they are called. A stream beside it runs
nothing until another one, or the host, waits for it.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from fxckpt.tiers import streams

DEVICE = torch.device("cpu")


class Queue:
    """A stream."""

    device = DEVICE

    def __init__(self, cuda: SimulatedCuda) -> None:
        self.cuda = cuda
        self.work: list[Callable[[], object]] = []
        self.done = 0

    def add(self, run: Callable[[], object]) -> None:
        """Queue work."""
        self.work.append(run)
        if not self.cuda.late or self is self.cuda.plain:
            self.reach(len(self.work))

    def reach(self, count: int) -> None:
        """Run what was queued first."""
        while self.done < count:
            self.done += 1
            self.work[self.done - 1]()

    def wait_event(self, event: Moment) -> None:
        """Queue a wait."""
        self.add(event.synchronize)

    def record_event(self) -> Moment:
        """Return the moment after what is queued."""
        return Moment(self, len(self.work))

    def synchronize(self) -> None:
        """Run all."""
        self.reach(len(self.work))


class Moment:
    """An event."""

    def __init__(self, queue: Queue, count: int) -> None:
        self.queue, self.count = queue, count

    def synchronize(self) -> None:
        """Run what comes before it."""
        self.queue.reach(self.count)


class SimulatedCuda(streams.Cuda):
    """Takes the place of CUDA for tensors of the CPU; ``late`` copies as late as is legal."""

    def __init__(self, *, late: bool, refuses: bool = False) -> None:
        super().__init__()
        self.late, self.refuses = late, refuses
        self.callers = self.plain = Queue(self)
        """The caller's stream; ``plain`` runs what is queued at once."""
        self.locked: dict[int, int] = {}
        self.capturing = False

    def has(self, device: torch.device) -> bool:
        """Return True."""
        return True

    def current(self, device: torch.device) -> Any:
        """Return the caller's stream."""
        return self.callers

    def new(self, device: torch.device) -> Any:
        """Return a stream."""
        return Queue(self)

    @contextmanager
    def on(self, stream: Any) -> Iterator[None]:
        """Run ops at once: none but copies are queued."""
        yield

    def copy(self, stream: Queue, target: Tensor, source: Tensor) -> None:
        """Queue a copy of what is there when it runs; it keeps no memory, as one of CUDA."""
        to, of, nbytes = target.data_ptr(), source.data_ptr(), source.nbytes
        stream.add(lambda: ctypes.memmove(to, of, nbytes))

    def is_capturing(self) -> bool:
        """Return what the test says."""
        return self.capturing

    def lock(self, address: int, nbytes: int) -> int:
        """Note the memory."""
        if self.refuses:
            return 2
        assert address not in self.locked, "already mapped"
        self.locked[address] = nbytes
        return 0

    def unlock(self, address: int, device: torch.device) -> None:
        """Forget the memory."""
        self.locked.pop(address, None)  # It may be of an earlier test.

    def is_over(self) -> bool:
        """Return False."""
        return False
