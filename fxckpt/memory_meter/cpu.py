"""Meters of the CPU: an allocator that counts, else what the C library or the kernel says.

The first that works is taken:

- The counting allocator, which needs a C++ compiler, knows the bytes requested from torch's CPU
  allocator by all threads, and their exact peak.
- ``mallinfo2`` (glibc 2.33 or newer) tells the C library's heap in use, when it is read.
- ``/proc/self/statm`` tells the resident pages, when it is read.

The counting allocator wraps the present one, which still makes every block, so that alignment,
errors and the profiler's events are unchanged. It replaces each block's deleter and keeps its
requested size in a table, which adds some 60 ns to the life of a block, whatever the number of
watches. When it is set, at the first call of ``meter_of``, it takes over the blocks of all tensors
that Python can see. It also knows which thread took a block: threads that take buffers side by side
overlap differently in each run, and the sum of their own peaks does not vary.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import threading
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

from fxckpt.errors import FxckptError
from fxckpt.memory_meter.library import load_library
from fxckpt.memory_meter.meter import CounterMeter
from fxckpt.torch_private import storage_addresses

log = logging.getLogger("fxckpt")

NO_LIMIT = (1 << 63) - 1
"""Value that the library takes as no limit."""

_installing = threading.Lock()


class CountingMeter(CounterMeter):
    """The bytes requested from torch's CPU allocator, counted block by block."""

    def __init__(self, library: ctypes.PyDLL) -> None:
        self._library = library
        super().__init__(_LibraryCounter(library))

    @property
    def exact(self) -> bool:
        """Whether the counting allocator is still the one that torch asks, and missed no block."""
        return bool(self._library.fxckpt_is_exact())

    def refused(self) -> int:
        """Return how many blocks could not be had so far."""
        return int(self._library.fxckpt_refused())

    def peak_of_threads(self, call: Callable[[], object]) -> tuple[int, int]:
        """Return the most bytes a call can have in use, and those still in use after it.

        Threads that take buffers side by side overlap more or less from run to run. The peaks of
        the single threads do not vary; their sum is the most that any run can need. The result of
        the call counts as in use after it.
        """
        self._library.fxckpt_watch_threads()
        before = self.allocated()
        result = call()
        live, peak = self.allocated() - before, self._library.fxckpt_peak_of_threads()
        del result
        return peak, live

    @property
    def describes(self) -> str:
        """Allocations that the figures count, and those that they do not see."""
        text = (
            "bytes requested from torch's CPU allocator, by any thread. Not seen: memory of NumPy, "
            "of shared and mapped files and of libraries with buffers of their own, and blocks "
            "that only autograd or C++ held when the meter was first used."
        )
        return text if self.exact else f"{text} Nor are blocks of an allocator that was set since."


class _LibraryCounter:
    def __init__(self, library: ctypes.PyDLL) -> None:
        self.allocated: Callable[[], int] = library.fxckpt_allocated
        self.peak: Callable[[], int] = library.fxckpt_peak
        self.take_peak: Callable[[], int] = library.fxckpt_take_peak


class ProcessMeter(CounterMeter):
    """A figure of the whole process that knows no peak: that of the moments when it was read."""

    def __init__(self, read: Callable[[], int], describes: str) -> None:
        super().__init__(_ReadCounter(read))
        self._describes = describes

    @property
    def exact(self) -> bool:
        """False."""
        return False

    @property
    def describes(self) -> str:
        """Allocations that the figures count, and those that they do not see."""
        return (
            f"{self._describes}, whoever took them. Not seen: a peak between two readings of the "
            "meter. The allocator that counts every block could not be set; fxckpt's log says why."
        )


class _ReadCounter:
    def __init__(self, read: Callable[[], int]) -> None:
        self._read, self._peak = read, 0

    def allocated(self) -> int:
        now = self._read()
        self._peak = max(self._peak, now)
        return now

    def peak(self) -> int:
        self.allocated()
        return self._peak

    def take_peak(self) -> int:
        before = self.peak()
        self._peak = self._read()
        return before


@cache
def cpu_meter() -> CounterMeter:
    """Return the meter of the CPU, the best that this machine has.

    Raises
    ------
    FxckptError
        There is neither a C++ compiler nor a C library or kernel that tells the bytes in use.
    """
    meter = counting_meter() or _process_meter()
    if meter is None:
        raise FxckptError(
            "The memory in use on the CPU was asked for, and this machine has no way to tell it: "
            "no C++ compiler, no mallinfo2 in the C library, no /proc/self/statm. "
            "Install a C++ compiler."
        )
    return meter


def counting_meter() -> CountingMeter | None:
    """Install the counting allocator, once, and return its meter, or None where there is none."""
    with _installing:
        return _counting_meter()


@cache
def _counting_meter() -> CountingMeter | None:
    library = load_library()
    if library is None:
        return None
    if not library.fxckpt_install():
        log.warning(
            "memory in use on the CPU is not counted to the byte: the CPU allocator that is set "
            "has no raw_deleter(), and its blocks cannot be told apart."
        )
        return None
    # New blocks are counted from here on; those of the tensors that exist are added.
    for address in storage_addresses():
        library.fxckpt_adopt(address)
    return CountingMeter(library)


def _renew_locks() -> None:
    """Forget who holds a lock: threads of the parent that are not in a forked child."""
    global _installing
    _installing = threading.Lock()
    if cpu_meter.cache_info().currsize:
        cpu_meter().renew_lock()


os.register_at_fork(after_in_child=_renew_locks)


def _process_meter() -> ProcessMeter | None:
    c_library = ctypes.PyDLL(None)
    with contextlib.suppress(AttributeError):  # glibc before 2.33, or another C library
        mallinfo2 = c_library.mallinfo2
        mallinfo2.restype = _MallInfo
        return ProcessMeter(lambda: _in_use(mallinfo2()), "bytes in use in the C library's heap")
    resident = Path("/proc/self/statm")
    if resident.exists():
        page = os.sysconf("SC_PAGE_SIZE")
        return ProcessMeter(
            lambda: int(resident.read_text().split()[1]) * page, "bytes resident in memory"
        )
    return None


class _MallInfo(ctypes.Structure):
    """``struct mallinfo2`` of glibc's malloc.h."""

    _fields_ = [
        (name, ctypes.c_size_t)
        for name in (
            *("arena", "ordblks", "smblks", "hblks", "hblkhd"),
            *("usmblks", "fsmblks", "uordblks", "fordblks", "keepcost"),
        )
    ]


def _in_use(info: _MallInfo) -> int:
    """Return the bytes of blocks in use, in arenas and in mappings of their own."""
    return int(info.uordblks + info.hblkhd)


@contextlib.contextmanager
def allocation_limit(bytes_above_now: int) -> Iterator[None]:
    """Let torch's CPU allocator fail as if memory were short, to test what happens then.

    A block that would lift the bytes in use more than ``bytes_above_now`` above the present raises
    the ``RuntimeError`` that torch raises when memory is short. The limit holds for all threads;
    inside another one, the lower of the two holds.

    Raises
    ------
    FxckptError
        The counting allocator cannot be compiled on this machine.

    Examples
    --------
    >>> import torch
    >>> from fxckpt.memory_meter import allocation_limit
    >>> with allocation_limit(1000):
    ...     a = torch.empty(900, dtype=torch.uint8)
    ...     b = torch.empty(200, dtype=torch.uint8)
    Traceback (most recent call last):
        ...
    RuntimeError: ...DefaultCPUAllocator: can't allocate memory: you tried to allocate 200 bytes...
    """
    meter = counting_meter()
    if meter is None or not meter.exact:
        raise FxckptError(
            "allocation_limit() needs the allocator that counts bytes, and it is not in use: "
            "install a C++ compiler, and set no other CPU allocator."
        )
    library = meter._library
    before: int = library.fxckpt_set_limit(NO_LIMIT)
    library.fxckpt_set_limit(min(before, meter.allocated() + bytes_above_now))
    try:
        yield
    finally:
        library.fxckpt_set_limit(before)
