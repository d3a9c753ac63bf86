"""Tier: memory off the device that saved values are sent to, and its link.

A tier lends blocks of bytes that no device allocator counts. A block is taken when a send begins
and given back when the last tensor over it is gone, so that an exception, a second backward or a
backward that never runs leaks nothing. Blocks that were given back are lent again to requests of
the same size, and go, the oldest first, where a tier would hold more than was ever in use at once.

A process that forks shares the memory of a file with its child, so that neither lends again what
was in use then, and the child leaves what was idle to its parent.
"""

from __future__ import annotations

import ctypes
import hashlib
import math
import os
import sys
import threading
import time
import weakref
from abc import ABC, abstractmethod
from collections import Counter, deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from fxckpt import budgets
from fxckpt.errors import InvalidBudget, InvalidOption, TierFull
from fxckpt.tiers import streams
from fxckpt.tiers.streams import Block, Copy, Stream, StreamCopy, copy_on, start_copy, wait_on
from fxckpt.torch_private import outside_trace

MEASURED_BYTES = 2**25
"""Bytes of a copy that a link's rate is measured by, as DeepSpeed does."""
MEASURED_RUNS = 5
"""Number of such copies each way; the fastest counts."""

_numbered: Counter[str] = Counter()
"""Tiers that have a number, by what they are."""
_numbering = threading.Lock()
_tiers: weakref.WeakValueDictionary[int, Tier] = weakref.WeakValueDictionary()
_alive: weakref.WeakSet[Tier] = weakref.WeakSet()
"""All tiers, for a fork of the process."""


def tier_numbered(number: int) -> Tier:
    """Return the tier that graphs name by a number.

    Raises :class:`InvalidOption` where this process has none of that number.
    """
    try:
        return _tiers[number]
    except KeyError:
        raise InvalidOption(
            f"a compiled graph sends values to tier {number}, which this process does not have: it "
            "was compiled for the tier of another process, or its tier is gone. Compile the model "
            "again, with offload=."
        ) from None


class Tier(ABC):
    """Memory off the device, and the link to it."""

    _locks_pages = True
    """Whether its memory can be page-locked for copies of a GPU."""
    _is_shared_by_forks = False
    """Whether a forked child that writes to its memory writes to that of its parent."""

    def __init__(
        self, limit: int | str, bytes_per_second: float | tuple[float, float] | None = None
    ) -> None:
        self.limit_bytes = parse_limit(limit)
        """Most bytes that are in use at once."""
        self._given_rates = None if bytes_per_second is None else parse_rates(bytes_per_second)
        self._rates: dict[torch.device, tuple[float, float]] = {}
        """Rates that were measured, by the device."""
        self._given = limit, bytes_per_second
        self._lock = threading.Lock()
        self._returned: deque[tuple[Block, int, int]] = deque()
        """Blocks whose last tensor is gone; a collector may add to it at any moment."""
        self._idle: dict[int, list[Block]] = {}
        """Blocks that were given back, by their bytes; the size that came last is the last."""
        self._idle_bytes = self._used_bytes = self._peak_bytes = 0
        self._most_bytes = 0
        """Most bytes that were ever in use at once, which bound those that are held."""
        self._blocks: dict[int, Block] = {}
        """Blocks in use, by their address."""
        self.copies: dict[int, Copy] = {}
        """The latest copy to or from a block in use, by its address."""
        self.sources: dict[int, int] = {}
        """Address of what was sent to a block in use, by the block's."""
        self._streams: dict[torch.device, tuple[Stream, Stream]] = {}
        """A stream for each way, by the device."""
        self._ways: tuple[int, ThreadPoolExecutor, ThreadPoolExecutor] | None = None
        _alive.add(self)

    @cached_property
    def number(self) -> int:
        """Number that graphs name the tier by.

        It is the same in each process for the first of equal tiers that is used, and so on, as it
        becomes a part of compiled code, which caches keep.
        """
        text = f"{type(self).__module__} {self!r}"
        with _numbering:
            place = _numbered[text]
            _numbered[text] += 1
        digest = hashlib.sha256(text.encode()).digest()
        number = int.from_bytes(digest[:5], "big") * 2**16 + place
        _tiers[number] = self
        return number

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the tier as what makes an equal one."""
        return (type(self), self._given)

    def __deepcopy__(self, memo: dict[int, Any]) -> Tier:
        return self  # Copies of a model share the place.

    @abstractmethod
    def _new_block(self, nbytes: int) -> Any:
        """Return a writable buffer of new memory, or raise :class:`TierFull`."""

    def __repr__(self) -> str:
        limit, rate = self._given
        given = "" if rate is None else f", bytes_per_second={rate!r}"
        return f"fxckpt.tiers.{type(self).__name__}({limit!r}{given})"

    @property
    def used_bytes(self) -> int:
        """Bytes in use."""
        with self._lock:
            self._collect()
            return self._used_bytes

    @property
    def peak_bytes(self) -> int:
        """Most bytes that were in use at once, since the tier was made or :meth:`restart_peak`."""
        return self._peak_bytes

    @property
    def reserved_bytes(self) -> int:
        """Bytes that the tier holds, in use or idle."""
        with self._lock:
            self._collect()
            return self._used_bytes + self._idle_bytes

    def restart_peak(self) -> None:
        """Begin anew with :attr:`peak_bytes`."""
        with self._lock:
            self._collect()
            self._peak_bytes = self._used_bytes

    @property
    def has_given_rates(self) -> bool:
        """Whether the rates were given."""
        return self._given_rates is not None

    def rates(self, device: torch.device | None = None) -> tuple[float, float]:
        """Return the bytes per second from a device to the tier and back; None is the CPU.

        If they were not given, they are measured once a device, by a few copies of 32 MiB each way.
        """
        if self._given_rates is not None:
            return self._given_rates
        if device is None or device.type != "cuda" or not torch.cuda.is_available():
            device = torch.device("cpu")  # A device that is not here is planned for by what is.
        if device not in self._rates:
            # It is asked for while a graph is traced.
            with outside_trace(), torch.no_grad():
                self._rates[device] = self._measure(device)
        return self._rates[device]

    def _measure(self, device: torch.device) -> tuple[float, float]:
        nbytes = min(MEASURED_BYTES, self.limit_bytes)
        value = torch.zeros(nbytes, dtype=torch.uint8, device=device)
        # It is there for a moment, and neither asks for room nor counts as sent.
        block = self._fresh_block(nbytes)
        block.is_lent_again = False
        held = self._lend(block, nbytes, is_counted=False)
        del block
        away, back = [], []
        for _ in range(MEASURED_RUNS):
            away.append(_seconds(self.send, value, held))
            back.append(_seconds(self.fetch, held, value))
        return nbytes / min(away), nbytes / min(back)

    def take(self, nbytes: int) -> Tensor:
        """Return new bytes, which are in use until the last tensor over them is gone.

        Raises :class:`TierFull` where less is left.
        """
        with self._lock:
            self._collect()
            if self._used_bytes + nbytes > self.limit_bytes:
                raise TierFull(
                    f"{self!r} was asked for {budgets.format_bytes(nbytes)}, and "
                    f"{budgets.format_bytes(self._used_bytes)} of it are in use, by values whose "
                    "backward is still to come. Raise its limit, send less, or run the backward "
                    "of each forward before the next."
                )
            self._used_bytes += nbytes
            block = self._idle_of(nbytes)
            dropped: list[Block] = []
            if block is None:
                most = max(self._most_bytes, self._used_bytes)
                dropped = self._drop_idle(most - self._used_bytes)
        del dropped
        try:
            if block is None:
                block = self._fresh_block(nbytes)
        except BaseException:
            with self._lock:
                self._used_bytes -= nbytes
            raise
        with self._lock:
            self._peak_bytes = max(self._peak_bytes, self._used_bytes)
            self._most_bytes = max(self._most_bytes, self._used_bytes)
        return self._lend(block, nbytes)

    def _lend(self, block: Block, nbytes: int, *, is_counted: bool = True) -> Tensor:
        """Return the bytes of a block, which is given back with the last tensor over them."""
        # A tensor keeps the array, and the array the buffer.
        array = (ctypes.c_char * nbytes).from_buffer(block.buffer)
        address = ctypes.addressof(array)
        self._blocks[address] = block
        counted = nbytes if is_counted else 0
        ended = weakref.finalize(array, self._give_back, block, counted, address)
        ended.atexit = False
        return torch.frombuffer(array, dtype=torch.uint8)

    def _fresh_block(self, nbytes: int) -> Block:
        """Return a new block; where there is no room, those that are idle go first."""
        try:
            return Block(self._new_block(nbytes))
        except TierFull:
            with self._lock:
                dropped = self._drop_idle(0)
            if not dropped:
                raise
        del dropped
        return Block(self._new_block(nbytes))

    def _idle_of(self, nbytes: int) -> Block | None:
        """Return an idle block of some bytes, which is so no more; the lock is held."""
        blocks = self._idle.get(nbytes)
        if blocks is None:
            return None
        block = blocks.pop()
        if not blocks:
            del self._idle[nbytes]
        self._idle_bytes -= nbytes
        return block

    def _drop_idle(self, most: int) -> list[Block]:
        """Return idle blocks, the oldest first, without which the rest is within some bytes.

        The lock is held: the caller lets them go without it, since pages are unlocked then.
        """
        dropped = []
        while self._idle_bytes > most:
            nbytes, blocks = next(iter(self._idle.items()))
            dropped.append(blocks.pop(0))
            if not blocks:
                del self._idle[nbytes]
            self._idle_bytes -= nbytes
        return dropped

    def lends(self, held: Tensor) -> bool:
        """Return whether a tensor is over memory of the tier, and no copy that others made."""
        return held.untyped_storage().data_ptr() in self._blocks

    def prepare_fork(self) -> None:
        """Lend no memory again that a child of the process may still read."""
        if self._is_shared_by_forks:
            with self._lock:
                self._collect()
                for block in list(self._blocks.values()):
                    block.is_lent_again = False

    def become_child(self) -> None:
        """Leave all memory to the parent of the process; what is in use is read, and no more."""
        self._lock = threading.Lock()  # A thread of the parent may have held it.
        self._collect()
        self._drop_idle(0)
        for block in self._blocks.values():
            block.is_lent_again = False

    def _give_back(self, block: Block, nbytes: int, address: int) -> None:
        """Note a block whose last tensor is gone.

        A copy of a GPU may still read it: what is lent it next waits for that. One that nobody
        waits for, after an error, is waited for here, so that it holds memory of the GPU no longer.
        """
        # The lock may be held: a collector runs wherever memory is allocated.
        block.latest = self.copies.pop(address, None) or block.latest
        self.sources.pop(address, None)
        if isinstance(block.latest, StreamCopy):
            block.latest.abandon()
        self._returned.append((block, nbytes, address))

    def _collect(self) -> None:
        """Take the blocks that were given back; the lock is held."""
        while self._returned:
            block, nbytes, address = self._returned.popleft()
            self._blocks.pop(address, None)
            self._used_bytes -= nbytes
            if block.is_lent_again:
                blocks = self._idle.pop(nbytes, [])
                blocks.append(block)
                self._idle[nbytes] = blocks
                self._idle_bytes += nbytes

    def send(self, value: Tensor, held: Tensor) -> Copy:
        """Begin to copy the storage of a value to that of a tensor of the tier."""
        return self._start(0, value, held)

    def fetch(self, held: Tensor, value: Tensor) -> Copy:
        """Begin to copy the storage of a tensor of the tier to that of a value."""
        return self._start(1, value, held)

    def _start(self, way: int, value: Tensor, held: Tensor) -> Copy:
        """Begin a copy of a way, 0 to send and 1 to fetch."""
        target, source = (held, value) if way == 0 else (value, held)
        storage, pace = held.untyped_storage(), self._pace(way)
        block = self._blocks.get(storage.data_ptr())
        earlier = self.copies.get(storage.data_ptr(), None if block is None else block.latest)
        if not streams.CUDA.has(value.device):
            if isinstance(earlier, StreamCopy):
                earlier.synchronize()
            return ThreadCopy(self._threads()[way], _Move(target, source, pace))
        if streams.CUDA.is_capturing():
            raise InvalidOption(
                f"offload={self!r} in a capture of a CUDA graph: a replay cannot send values away. "
                "Leave one of them out."
            )
        stream = self._streams_of(value.device)[way]
        if (
            self._locks_pages
            and pace == math.inf
            and block is not None
            and block.lock_pages(storage.data_ptr(), storage.nbytes(), stream)
        ):
            copy = start_copy(target, source, value, stream, earlier)
            self.copies[storage.data_ptr()] = copy  # Whoever begins it: the next one follows it.
            return copy
        # The host has to wait for the copy: a thread does, until its result is asked for.
        wait_on(stream, earlier)
        return ThreadCopy(self._threads()[way], _Move(target, source, pace, stream))

    def _streams_of(self, device: torch.device) -> tuple[Stream, Stream]:
        """Return the stream of each way on a device."""
        with self._lock:
            if device not in self._streams:
                self._streams[device] = streams.CUDA.new(device), streams.CUDA.new(device)
            return self._streams[device]

    def _pace(self, way: int) -> float:
        """Return the most bytes per second of a way, 0 to send and 1 to fetch."""
        return math.inf

    def _threads(self) -> tuple[ThreadPoolExecutor, ThreadPoolExecutor]:
        """Return the thread of each way; a forked child has its own."""
        with self._lock:
            if self._ways is None or self._ways[0] != os.getpid():
                self._ways = (
                    os.getpid(),
                    ThreadPoolExecutor(1, f"fxckpt-send-{self.number}"),
                    ThreadPoolExecutor(1, f"fxckpt-fetch-{self.number}"),
                )
            return self._ways[1:]


class ThreadCopy:
    """A copy that a thread of a tier makes."""

    def __init__(self, thread: ThreadPoolExecutor, move: _Move) -> None:
        self._process, self._move = os.getpid(), move
        self._future = thread.submit(move)

    def result(self) -> None:
        """Wait until the copy is complete; raise its error.

        A forked child has no thread that ends it, and makes it again.
        """
        if self._process == os.getpid():
            self._future.result()
        elif self._move.tensors:
            self._move()


class _Move:
    """One copy of a storage to another, run by a thread of the tier."""

    def __init__(
        self,
        target: Tensor,
        source: Tensor,
        bytes_per_second: float,
        stream: Stream | None = None,
    ) -> None:
        self.tensors: tuple[Tensor, ...] = target, source
        self.bytes_per_second = bytes_per_second
        self.stream = stream
        """The stream that copies; None where both storages are the host's."""

    def __call__(self) -> None:
        begin = time.perf_counter()
        if self.stream is not None:
            copy_on(self.stream, *self.tensors)
            self.stream.synchronize()
        target, source = (t.untyped_storage() for t in self.tensors)
        nbytes = source.nbytes()
        if self.stream is None:
            ctypes.memmove(target.data_ptr(), source.data_ptr(), nbytes)
        # The value may be freed as soon as the copy counts as complete.
        self.tensors = ()
        del target, source
        left = nbytes / self.bytes_per_second - (time.perf_counter() - begin)
        if left > 0:
            time.sleep(left)


def _prepare_fork() -> None:
    for tier in list(_alive):
        tier.prepare_fork()


def _become_child() -> None:
    for tier in list(_alive):
        tier.become_child()


os.register_at_fork(before=_prepare_fork, after_in_child=_become_child)


def _seconds(copy: Callable[[Tensor, Tensor], Copy], source: Tensor, target: Tensor) -> float:
    for tensor in (source, target):
        if tensor.device.type == "cuda":
            torch.cuda.synchronize(tensor.device)
    begin = time.perf_counter()
    copied = copy(source, target)
    if isinstance(copied, StreamCopy):
        copied.synchronize()
    copied.result()
    return time.perf_counter() - begin


def parse_limit(limit: int | str) -> int:
    """Return a limit in bytes.

    Raises :class:`InvalidOption` for anything but a number of bytes.
    """
    try:
        found = budgets.parse(limit)
    except InvalidBudget:
        found = None
    if not isinstance(found, int):
        raise InvalidOption(
            f"a tier of {limit!r}: its limit is a number of bytes, more than 0. "
            "Examples: fxckpt.tiers.Host('64GiB'), fxckpt.tiers.Host(64 * 2**30)."
        )
    return found


def parse_rates(rate: float | tuple[float, float]) -> tuple[float, float]:
    """Return the rates to a tier and back.

    Raises :class:`InvalidOption` for anything but rates.
    """
    both = rate if isinstance(rate, tuple) else (rate, rate)
    if len(both) != 2 or not all(
        isinstance(r, (int, float)) and not isinstance(r, bool) and 0 < r <= sys.float_info.max
        for r in both
    ):
        raise InvalidOption(
            f"bytes_per_second={rate!r} is not a rate, or a pair of rates to the tier and back. "
            "Examples: 50e9, (52e9, 35e9)."
        )
    return float(both[0]), float(both[1])
