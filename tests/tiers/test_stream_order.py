"""What is asked of CUDA, in order: what waits for what, without a GPU."""

from __future__ import annotations

import os
from contextlib import nullcontext
from typing import Any

import pytest
import torch

from fxckpt.tiers import streams
from fxckpt.tiers.streams import Block, StreamCopy, start_copy

log: list[str] = []
"""What was asked of the streams, in order."""


class Event:
    def __init__(self) -> None:
        self.name = ""

    def record(self, stream: Stream) -> None:
        self.name = f"{stream.name}'s"
        log.append(f"{stream.name} records")

    def synchronize(self) -> None:
        log.append(f"host waits for {self.name}")


class Stream:
    device = torch.device("cpu")

    def __init__(self, name: str) -> None:
        self.name = name

    def record_event(self) -> Event:
        event = Event()
        event.record(self)
        return event

    def wait_event(self, event: Event) -> None:
        log.append(f"{self.name} waits for {event.name}")


class Cudart:
    """Page-locks what is not larger than a page."""

    def cudaHostRegister(self, address: int, nbytes: int, flags: int) -> int:
        log.append(f"lock {nbytes}")
        return 0 if nbytes <= 4096 else 2

    def cudaHostUnregister(self, address: int) -> int:
        log.append("unlock")
        return 0


@pytest.fixture(autouse=True)
def fake_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    log.clear()
    own = Stream("step")
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: own)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    monkeypatch.setattr(streams.CUDA, "_process", os.getpid())
    monkeypatch.setattr(streams.torch, "ones", lambda *size, device: log.append("next kernel"))
    monkeypatch.setattr(torch.cuda, "cudart", Cudart)


def begun(earlier: StreamCopy | None = None) -> tuple[StreamCopy, torch.Tensor]:
    """Return a copy of random numbers that was begun, and what it writes to."""
    target, source = torch.zeros(2, 3), torch.randn(3, 2).t()
    stream: Any = Stream("copies")
    copy = start_copy(target, source, target, stream, earlier)
    assert torch.equal(target.flatten(), source.t().flatten())
    return copy, target


def test_copy_and_step_wait_for_each_other() -> None:
    copy, _ = begun()
    copy.result()
    assert log == [
        "step records",
        "copies waits for step's",
        "copies records",
        "step waits for copies's",
    ]
    log.clear()
    del copy
    assert log == []


def test_copy_follows_earlier_one_of_its_memory() -> None:
    first, _ = begun()
    first.result()
    log.clear()
    second, _ = begun(first)
    assert log[:3] == ["step records", "copies waits for step's", "copies waits for copies's"]
    second.result()


def test_copy_nobody_waits_for_holds_memory() -> None:
    """It keeps the memory of the device until the host has waited for it."""
    copy, target = begun()
    assert copy._value is target
    log.clear()
    copy.abandon()
    assert log == ["host waits for copies's"] and copy._value is None
    copy.abandon()
    assert len(log) == 1


def test_pages_are_unlocked_after_their_copies() -> None:
    block = Block(bytearray(4096))
    for _ in range(2):
        block.lock_pages(0, 4096, Stream("copies"))
    assert log == ["lock 4096"]
    block.latest, _ = begun()
    log.clear()
    del block
    assert log == ["host waits for copies's", "unlock"]


def test_refused_lock_is_told_once() -> None:
    block = Block(bytearray(1))
    with pytest.warns(UserWarning, match="does not page-lock 8192 bytes"):
        assert not block.lock_pages(0, 8192, Stream("copies"))
    assert not block.lock_pages(0, 8192, Stream("copies"))
    del block
    assert log == ["lock 8192", "next kernel"]  # CUDA tells a refusal again to that one.
