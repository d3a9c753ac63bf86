"""Copies between a CUDA device and memory of the host, on streams of their own.

A copy waits on its stream for what the caller's stream has queued, and the caller's stream waits
for the copy where its result is asked for: the host waits for neither. Until then the copy holds
the memory of the device that it reads or writes. Memory of the host is page-locked first, without
which a copy would hold the caller up and move a quarter of the bytes per second.

Three things order a copy: the caller's stream when it begins, the latest copy of the same memory of
the host, and whoever asks for its result. :class:`Cuda` is all that is asked of CUDA, so that a
test can take its place.
"""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any, Protocol

import torch
from torch import Tensor

from fxckpt.torch_private import outside_trace


class Copy(Protocol):
    """A copy that was begun."""

    def result(self) -> object:
        """Wait until the copy is complete, as far as later ops can tell; raise its error."""
        ...


class Event(Protocol):
    """A moment of a stream."""

    def synchronize(self) -> None:
        """Let the host wait for it."""
        ...


class Stream(Protocol):
    """A queue of work of a device."""

    @property
    def device(self) -> torch.device:
        """Device that works it off."""
        ...

    def wait_event(self, event: Any) -> None:
        """Let what is queued from now on wait for an event."""
        ...

    def record_event(self) -> Any:
        """Return the moment when what is queued so far is done."""
        ...

    def synchronize(self) -> None:
        """Let the host wait for what is queued so far."""
        ...


class Cuda:
    """Streams of CUDA, and memory of the host that it knows."""

    def __init__(self) -> None:
        self._process: int | None = None
        """The process that copies; a fork of it cannot."""

    def has(self, device: torch.device) -> bool:
        """Return whether a device is one of CUDA."""
        return device.type == "cuda"

    def current(self, device: torch.device) -> Stream:
        """Return the stream that the caller's ops run on."""
        return torch.cuda.current_stream(device)

    def new(self, device: torch.device) -> Stream:
        """Return a stream beside all others."""
        self._process = os.getpid()
        return torch.cuda.Stream(device)

    @contextmanager
    def on(self, stream: Any) -> Iterator[None]:
        """Have ops run on a stream, and on its device."""
        with torch.cuda.stream(stream):
            yield

    def copy(self, stream: Any, target: Tensor, source: Tensor) -> None:
        """Copy bytes on a stream."""
        with self.on(stream):
            target.copy_(source, non_blocking=True)

    def is_capturing(self) -> bool:
        """Return whether the caller's ops are captured to be replayed."""
        return torch.cuda.is_current_stream_capturing()

    def lock(self, address: int, nbytes: int) -> int:
        """Page-lock memory of the host, and return an error's number, or 0."""
        code = int(torch.cuda.cudart().cudaHostRegister(address, nbytes, 0))
        if code != 0:
            # CUDA tells the refusal again to the next kernel: let that be one of no use.
            with suppress(RuntimeError):
                torch.ones(1, device="cuda")
        return code

    def unlock(self, address: int, device: torch.device) -> None:
        """Unlock memory of the host."""
        with torch.cuda.device(device):
            torch.cuda.cudart().cudaHostUnregister(address)

    def is_over(self) -> bool:
        """Return whether the process must not call CUDA: it ends, or was forked from another."""
        return sys.is_finalizing() or os.getpid() != self._process


CUDA = Cuda()


class StreamCopy:
    """A copy that runs on a stream of a device."""

    def __init__(self, done: Event, caller: Stream, value: Tensor) -> None:
        self._done, self._caller = done, caller
        self._value: Tensor | None = value
        """What it reads or writes on the device, until a stream waits. It does not hold the
        memory of the host, whose end ends the copy, and which is lent again only behind it."""

    def result(self) -> None:
        """Let the caller's stream wait for the copy, and hold its memory no longer."""
        current = CUDA.current(self._caller.device)
        current.wait_event(self._done)
        if current != self._caller:
            # The value's memory goes back to the stream that it is of, which may be lent it next.
            self._caller.wait_event(self._done)
        self._value = None

    def synchronize(self) -> None:
        """Let the host wait for the copy."""
        self._done.synchronize()
        self._value = None

    def abandon(self) -> None:
        """Let the host wait for a copy that no stream waits for, and hold its memory no longer.

        That memory would be lent to others while the copy reads or writes it.
        """
        if self._value is not None and not CUDA.is_over():
            self.synchronize()

    def precede(self, stream: Stream) -> None:
        """Let a stream wait for the copy."""
        stream.wait_event(self._done)

    def __del__(self) -> None:
        self.abandon()


def wait_on(stream: Stream, earlier: Copy | None) -> Stream:
    """Let a stream wait for what the caller's has queued, and for an earlier copy; return that."""
    caller = CUDA.current(stream.device)
    stream.wait_event(caller.record_event())
    if isinstance(earlier, StreamCopy):
        earlier.precede(stream)
    return caller


def start_copy(
    target: Tensor, source: Tensor, value: Tensor, stream: Stream, earlier: Copy | None
) -> StreamCopy:
    """Begin to copy a storage to another of as many bytes; ``value`` is the one on the device.

    ``earlier`` is the latest copy of the memory on the host, which this one must follow.
    """
    caller = wait_on(stream, earlier)
    copy_on(stream, target, source)
    return StreamCopy(stream.record_event(), caller, value)


def copy_on(stream: Stream, target: Tensor, source: Tensor) -> None:
    """Copy a storage to another on a stream."""
    # A region of eager ops in progress records what is called, and no copy is one of its ops.
    with outside_trace(), torch.no_grad():
        CUDA.copy(stream, _bytes_of(target), _bytes_of(source))


def _bytes_of(tensor: Tensor) -> Tensor:
    """Return the bytes of a tensor's storage."""
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())


class Block:
    """Memory of a tier, and what CUDA knows of it."""

    def __init__(self, buffer: Any) -> None:
        self.buffer = buffer
        """Writable buffer over the memory."""
        self.latest: Copy | None = None
        """The latest copy to or from it, when it was given back."""
        self.is_lent_again = True
        """Whether it is kept for others once it was given back."""
        self._locked: tuple[int, torch.device] | None = None
        self._was_refused = False

    def lock_pages(self, address: int, nbytes: int, stream: Stream) -> bool:
        """Page-lock the memory, once, and return whether it is; a warning tells of a refusal."""
        if self._locked is not None or self._was_refused:
            return self._locked is not None
        with CUDA.on(stream):  # Of no other device than the copy's a context is made.
            code = CUDA.lock(address, nbytes)
        if code == 0:
            self._locked = address, stream.device
            return True
        self._was_refused = True
        warnings.warn(
            f"CUDA does not page-lock {nbytes} bytes of the host (error {code}): copies to and "
            "from them are several times slower, and hold the step up. Lower the tier's limit, "
            "leave more of the host's memory free, or allow the process to lock more of it "
            "(ulimit -l).",
            stacklevel=2,
        )
        return False

    def __del__(self) -> None:
        if self._locked is None or CUDA.is_over():
            return
        if isinstance(self.latest, StreamCopy):
            self.latest.synchronize()
        # Memory that goes while CUDA takes it for page-locked makes later calls of CUDA fail.
        CUDA.unlock(*self._locked)
