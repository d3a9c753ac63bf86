"""Events of the CPU's allocator."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fxckpt.torch_private import allocation_events


def test_events_come_in_order() -> None:
    """Each allocation and free is an event of its bytes; the result is returned alive."""
    events, result = allocation_events(lambda: torch.empty(256).new_empty(128))
    assert result.shape == (128,)
    live = peak = 0
    for event in events:
        live += event
        peak = max(peak, live)
    assert (live, peak) == (512, 1024 + 512)


def test_nothing_allocates_nothing() -> None:
    """A call without allocations has no events."""
    assert allocation_events(lambda: 3) == ([], 3)


def test_the_profiler_ends_with_an_error() -> None:
    """An error passes, and the profiler is off after it."""

    def failing() -> Any:
        raise KeyError("x")

    with pytest.raises(KeyError):
        allocation_events(failing)
    assert not torch.autograd._profiler_enabled()
