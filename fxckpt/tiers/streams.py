"""Copies between a CUDA device and memory of the host, on streams of their own.

A copy waits on its stream for what the caller's stream has queued, and the caller's stream waits
for the copy where its result is asked for: the host waits for neither. Until then the copy holds
the memory of the device. Memory of the host is page-locked first, without which a copy would hold
the caller up and move a quarter of the bytes per second.
"""

from __future__ import annotations

import sys
import warnings
from typing import Any, Protocol

import torch
from torch import Tensor


class Copy(Protocol):
    """A copy that was begun."""

    def result(self) -> object:
        """Wait until the copy is complete, as far as later ops see; raise its error, if any."""
        ...


class StreamCopy:
    """A copy that runs on a stream of a device."""

    def __init__(self, done: torch.cuda.Event, device: torch.device, value: Tensor) -> None:
        self._done, self._device = done, device
        self._value: Tensor | None = value
        """Memory of the device, until something waits for the copy."""

    def result(self) -> None:
        """Let the caller's stream wait for the copy, and hold its memory no longer."""
        torch.cuda.current_stream(self._device).wait_event(self._done)
        self._value = None

    def synchronize(self) -> None:
        """Let the host wait for the copy."""
        self._done.synchronize()
        self._value = None

    def abandon(self) -> None:
        """Let the host wait for the copy, if nothing else has, and hold its memory no longer.

        Memory that no stream waits for would be lent to others while the copy writes to it.
        """
        if self._value is not None:
            self.synchronize()

    def precede(self, stream: torch.cuda.Stream) -> None:
        """Let a stream wait for the copy."""
        stream.wait_event(self._done)

    def __del__(self) -> None:
        if not sys.is_finalizing():
            self.abandon()


def start_copy(
    target: Tensor, source: Tensor, stream: torch.cuda.Stream, earlier: Copy | None
) -> StreamCopy:
    """Begin to copy a storage to another of as many bytes, one of them on the device.

    ``earlier`` is the latest copy of the memory on the host, which this one must follow.
    """
    device = stream.device
    queued, done = torch.cuda.Event(), torch.cuda.Event()
    queued.record(torch.cuda.current_stream(device))
    stream.wait_event(queued)
    if isinstance(earlier, StreamCopy):
        earlier.precede(stream)
    with torch.no_grad(), torch.cuda.stream(stream):
        _bytes_of(target).copy_(_bytes_of(source), non_blocking=True)
    done.record(stream)
    return StreamCopy(done, device, target if target.device == device else source)


def _bytes_of(tensor: Tensor) -> Tensor:
    """Return the bytes of a tensor's storage."""
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())


class Block:
    """Memory of a tier, and what CUDA knows of it."""

    def __init__(self, buffer: Any) -> None:
        self.buffer = buffer
        """Writable buffer over the memory."""
        self.latest: Copy | None = None
        """The latest copy to or from it."""
        self._locked: int | None = None
        self._was_refused = False

    def lock_pages(self, address: int, nbytes: int) -> None:
        """Page-lock the memory, once. A machine that refuses gets a warning, and slower copies."""
        if self._locked is not None or self._was_refused:
            return
        code = int(torch.cuda.cudart().cudaHostRegister(address, nbytes, 0))
        if code == 0:
            self._locked = address
            return
        self._was_refused = True
        warnings.warn(
            f"CUDA does not page-lock {nbytes} bytes of the host (error {code}): copies to and "
            "from them are several times slower, and hold the step up. Lower the tier's limit, or "
            "leave more of the host's memory free.",
            stacklevel=2,
        )

    def __del__(self) -> None:
        if self._locked is None or sys.is_finalizing():
            return
        if isinstance(self.latest, StreamCopy):
            self.latest.synchronize()
        # Memory that goes while CUDA takes it for page-locked makes later calls of CUDA fail.
        torch.cuda.cudart().cudaHostUnregister(self._locked)
