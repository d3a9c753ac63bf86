"""Meters of the bytes in use on a device, and watches of their peak."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from types import TracebackType
from typing import Protocol, Self
from weakref import WeakSet


class Watch(ABC):
    """The peak of a meter since the watch was made or last reset; a context manager.

    Watches are independent of one another.
    """

    @property
    @abstractmethod
    def exact(self) -> bool:
        """Whether :meth:`peak` is the true peak and not a bound."""

    @abstractmethod
    def peak(self) -> int:
        """Return the most bytes in use at once since the start, or until the watch was closed."""

    def seen(self) -> int:
        """Return the most bytes that were surely in use at once, a lower bound on the peak."""
        return self.peak()

    def hidden(self) -> int:
        """Return the most bytes that could be in use from now on without being seen."""
        return 0

    @abstractmethod
    def reset(self) -> None:
        """Start anew at what is in use now. A closed watch is open again."""

    def restart(self) -> None:
        """Start anew, so that the next peak is exact: a device's only peak is reset for it."""
        self.reset()

    @abstractmethod
    def close(self) -> None:
        """Keep the peak so far and cost nothing from now on."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


class Meter(ABC):
    """The bytes in use on one device, of the whole process, whichever thread takes them."""

    @property
    @abstractmethod
    def exact(self) -> bool:
        """Whether every block of torch's allocator is counted, to the byte, when it is taken."""

    @property
    @abstractmethod
    def describes(self) -> str:
        """Allocations that the figures count or do not see, in a sentence or two."""

    @abstractmethod
    def allocated(self) -> int:
        """Return the bytes in use now."""

    @abstractmethod
    def watch(self) -> Watch:
        """Return a watch that starts now."""

    def refused(self) -> int:
        """Return how often the device had no memory left so far, 0 where that is not told."""
        return 0


class Counter(Protocol):
    """A number of bytes that remembers one peak, from which a meter serves many watches."""

    def allocated(self) -> int:
        """Return the bytes in use now."""

    def peak(self) -> int:
        """Return the peak since :meth:`take_peak` was last called."""

    def take_peak(self) -> int:
        """Return :meth:`peak`, and start the next one at what is in use now."""


class CounterMeter(Meter):
    """A meter with watches over one counter.

    The counter remembers the peak of the latest segment only, so that a block costs the same
    whatever the number of watches. A segment ends where a watch starts, and every open watch then
    takes its peak over.
    """

    def __init__(self, counter: Counter) -> None:
        self._counter = counter
        self._watches: WeakSet[_CounterWatch] = WeakSet()
        self.renew_lock()

    def renew_lock(self) -> None:
        """Forget who holds the lock: after a fork, a thread that is not in the child."""
        # Garbage collection inside the lock may close a watch of the same thread.
        self._lock = threading.RLock()

    def allocated(self) -> int:
        """Return the bytes in use now."""
        return self._counter.allocated()

    def watch(self) -> Watch:
        """Return a watch that starts now."""
        return _CounterWatch(self)


class _CounterWatch(Watch):
    def __init__(self, meter: CounterMeter) -> None:
        self._meter = meter
        self._earlier = 0
        self._is_open = False
        self.reset()

    @property
    def exact(self) -> bool:
        return self._meter.exact

    def peak(self) -> int:
        meter = self._meter
        with meter._lock:
            return max(self._earlier, meter._counter.peak()) if self._is_open else self._earlier

    def reset(self) -> None:
        meter = self._meter
        with meter._lock:
            earlier = meter._counter.take_peak()
            if not self._is_open or len(meter._watches) > 1:
                for watch in meter._watches:
                    watch._earlier = max(watch._earlier, earlier)
                meter._watches.add(self)
            self._earlier, self._is_open = 0, True

    def close(self) -> None:
        with self._meter._lock:
            self._earlier, self._is_open = self.peak(), False
            self._meter._watches.discard(self)
