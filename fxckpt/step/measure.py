"""Measure of a step: bytes in use on its device, and their peak between two boundaries."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from fxckpt.memory_meter import meter_of, take_library_memory


class StepMeter:
    """Bytes that a step allocates on one device, beyond those allocated before it."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        take_library_memory(device)
        self._meter = meter_of(device)
        self._watch = self._meter.watch()
        self.base: int | None = None
        """Bytes allocated before the step; None until one began."""
        self.was_seen = True
        """Whether the latest peak is that of the step, and not only a bound from below."""
        self._is_polluted = False
        self.most = 0
        """Upper bound on the latest peak; the peak itself where none is known."""

    @property
    def is_exact(self) -> bool:
        """Whether measured bytes are exact, so that they may be taken at their word."""
        return self._meter.exact

    @property
    def describes(self) -> str:
        """Allocations that the figures count or do not see."""
        return self._meter.describes

    @property
    def start(self) -> int:
        """Bytes allocated before the step."""
        assert self.base is not None
        return self.base

    def allocated(self) -> int:
        """Return the bytes allocated now."""
        return self._meter.allocated()

    def refused(self) -> int:
        """Return how often memory ran out so far."""
        return self._meter.refused()

    def seen(self) -> int:
        """Return the greatest bytes allocated since the latest boundary, or a lower bound."""
        return self._watch.seen()

    def peak(self) -> int:
        """Return the greatest bytes allocated since the latest boundary.

        An accelerator has one peak for all, and it is the user's: one that is not above it goes
        unseen, unless the boundary was one of a step that is learned.
        """
        # What compiling allocated is not the step's, and hides what was.
        peak = self._meter.allocated() if self._is_polluted else self._watch.seen()
        self.was_seen = self._watch.exact and not self._is_polluted
        self.most = peak if self._is_polluted else max(peak, self._watch.peak())
        return peak

    def hides(self, limit: int) -> bool:
        """Return whether a step of more than ``limit`` bytes could go unseen from now on."""
        return self._watch.hidden() > self.start + limit

    def restart(self, *, is_learning: bool) -> int:
        """Forget the peak so far; return the bytes allocated now.

        An accelerator's is reset only while a step is learned.
        """
        self._is_polluted = False
        if is_learning:
            self._watch.restart()
        else:
            self._watch.reset()
        return self._meter.allocated()

    def pollute(self) -> None:
        """Note a compile, whose allocations are not the step's."""
        self._is_polluted = True

    @contextmanager
    def unmeasured(self, version: Callable[[], int]) -> Iterator[None]:
        """Leave out of the step what planning and a compile allocate.

        ``version`` counts the compiles: without one, the peak so far is kept as far as it can be.
        """
        assert self.base is not None
        before, begun = self._meter.allocated(), version()
        try:
            yield
        finally:
            self.base += self._meter.allocated() - before
            if version() == begun:
                self._watch.reset()
            else:
                self._watch.restart()
