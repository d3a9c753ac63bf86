"""Meters of accelerators, from the statistics of torch's caching allocators."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import cache
from typing import Any
from weakref import WeakSet

import torch

from fxckpt.errors import FxckptError
from fxckpt.memory_meter.meter import Meter, Watch


class AcceleratorMeter(Meter):
    """The bytes in use in a device's caching allocator.

    Parameters
    ----------
    read
        Returns the bytes in use and the device's own peak, which has one start for all.
    restart
        Resets that peak.
    refused
        Returns how often the device had no memory left.
    """

    def __init__(
        self,
        read: Callable[[], tuple[int, int]],
        restart: Callable[[], None],
        refused: Callable[[], int] = lambda: 0,
    ) -> None:
        self._read, self._restart, self._refused = read, restart, refused
        self._watches: WeakSet[_AcceleratorWatch] = WeakSet()
        self._lock = threading.RLock()

    @property
    def exact(self) -> bool:
        """True."""
        return True

    @property
    def describes(self) -> str:
        """Allocations that the figures count, and those that they do not see."""
        return (
            "bytes of blocks in the device's caching allocator, rounded as it rounds them. A peak "
            "that is not above one from before the watch is a bound: the device has one peak for "
            "all. Not seen: memory that libraries take past the allocator, and a peak before "
            "somebody else resets the device's statistics."
        )

    def allocated(self) -> int:
        """Return the bytes in use now."""
        return self._read()[0]

    def watch(self) -> Watch:
        """Return a watch that starts now."""
        return _AcceleratorWatch(self)

    def refused(self) -> int:
        """Return how often the device had no memory left so far."""
        return self._refused()

    def restart_peak(self) -> None:
        """Reset the device's own peak; watches that are open keep what they know."""
        with self._lock:
            for watch in self._watches:
                watch.end_segment()
            self._restart()
            for watch in self._watches:
                watch.start_segment()


class _AcceleratorWatch(Watch):
    def __init__(self, meter: AcceleratorMeter) -> None:
        self._meter = meter
        self.reset()

    @property
    def exact(self) -> bool:
        """Whether the device's peak rose after the start, or the peak is known otherwise."""
        with self._meter._lock:
            lower, upper = self._bounds()
            return upper is not None and lower == upper

    def peak(self) -> int:
        """Return the peak, or the least upper bound that is known, or else the greatest seen."""
        with self._meter._lock:
            lower, upper = self._bounds()
            return lower if upper is None else upper

    def seen(self) -> int:
        with self._meter._lock:
            return self._bounds()[0]

    def hidden(self) -> int:
        return self._meter._read()[1]

    def reset(self) -> None:
        with self._meter._lock:
            self._lower = 0
            self._upper: int | None = 0
            self._is_open = True
            self.start_segment()
            self._meter._watches.add(self)

    def restart(self) -> None:
        with self._meter._lock:
            self._meter.restart_peak()
            self.reset()

    def close(self) -> None:
        with self._meter._lock:
            self.end_segment()
            self._is_open = False
            self._meter._watches.discard(self)

    def start_segment(self) -> None:
        """Take the device's peak as that of somebody before."""
        self._seen, self._before = self._meter._read()

    def end_segment(self) -> None:
        """Keep what is known so far."""
        self._lower, self._upper = self._bounds()

    def _bounds(self) -> tuple[int, int | None]:
        """Return a lower and an upper bound on the peak; None if there is no upper one."""
        if not self._is_open:
            return self._lower, self._upper
        now, peak = self._meter._read()
        self._seen = max(self._seen, now)
        if peak != self._before:
            # It rose, or it was reset and rose, all of it since the start.
            self._seen = max(self._seen, peak)
            if peak < self._before:
                self._upper = None
            self._before = peak
        lower = max(self._lower, self._seen)
        return lower, None if self._upper is None else max(self._upper, lower, self._before)


def accelerator_meter(device: torch.device) -> AcceleratorMeter:
    """Return the meter of an accelerator, one for each device.

    Raises
    ------
    FxckptError
        torch has no statistics of the memory of such a device.
    """
    module = getattr(torch, device.type, None)
    if not hasattr(module, "memory_stats_as_nested_dict"):
        raise FxckptError(
            f"The memory in use on {device} was asked for, and torch has no statistics of it: "
            f"torch.{device.type}.memory_stats_as_nested_dict() does not exist. "
            "Ask for a CPU, CUDA or XPU device."
        )
    index = module.current_device() if device.index is None else device.index
    return _meter(module, torch.device(device.type, index))


def take_library_memory(device: torch.device) -> None:
    """Let libraries of a CUDA device take the memory that they keep, in both threads of a step.

    cuBLAS takes 32 MiB on Hopper at the first product of each thread, which is none of a step's.
    """
    if device.type != "cuda" or torch.is_inference_mode_enabled():
        return
    with torch.enable_grad():
        x = torch.ones(16, 16, device=device, requires_grad=True)
        torch.nn.functional.linear(x, x, x[0]).sum().backward()


@cache
def _meter(module: Any, device: torch.device) -> AcceleratorMeter:
    def read() -> tuple[int, int]:
        figures = module.memory_stats_as_nested_dict(device).get("allocated_bytes")
        # Before its first block, a device has no statistics.
        return (figures["all"]["current"], figures["all"]["peak"]) if figures else (0, 0)

    def refused() -> int:
        return int(module.memory_stats_as_nested_dict(device).get("num_ooms", 0))

    return AcceleratorMeter(read, lambda: module.reset_peak_memory_stats(device), refused)
