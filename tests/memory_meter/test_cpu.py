"""The counting allocator, against blocks whose sizes and lives are known."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from fxckpt.memory_meter import allocation_limit, counting_meter, meter_of
from fxckpt.memory_meter.meter import Meter

CPU = torch.device("cpu")


@pytest.fixture
def meter() -> Iterator[Meter]:
    found = meter_of(CPU)
    assert found.exact
    yield found


def block(nbytes: int) -> torch.Tensor:
    return torch.empty(nbytes, dtype=torch.uint8)


def test_counts_requested_bytes(meter: Meter) -> None:
    """Sizes are those asked for, not those that malloc rounds them up to."""
    start = meter.allocated()
    held = [block(n) for n in (0, 1, 24, 63, 1000, 1 << 20)]
    assert meter.allocated() - start == 1088 + (1 << 20)
    del held
    assert meter.allocated() == start


def test_watches_are_independent(meter: Meter) -> None:
    start = meter.allocated()
    outer = meter.watch()
    large = block(1000)
    del large
    with meter.watch() as inner:
        small = block(10)
        outer_peak, inner_peak = outer.peak() - start, inner.peak() - start
        inner.reset()
        del small
        after_reset = inner.peak() - start
        outer.reset()
    huge = block(5000)
    assert (outer_peak, inner_peak, after_reset) == (1000, 10, 10)
    assert (inner.peak() - start, outer.peak() - start) == (10, 5000)
    outer.close()
    del huge


def test_counts_frees_of_other_threads(meter: Meter) -> None:
    start = meter.allocated()
    mine = [block(1 << 16)]
    theirs: list[torch.Tensor] = []

    def swap() -> None:
        mine.clear()
        theirs.append(block(1 << 10))

    thread = threading.Thread(target=swap)
    thread.start()
    thread.join()
    assert meter.allocated() - start == 1 << 10
    theirs.clear()
    assert meter.allocated() == start


def test_threads_lose_no_byte(meter: Meter) -> None:
    start = meter.allocated()

    def churn(seed: int) -> None:
        for i in range(2000):
            torch.empty((seed * 31 + i) % 4096, dtype=torch.uint8)

    threads = [threading.Thread(target=churn, args=(n,)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert meter.allocated() == start


@pytest.mark.parametrize("overlap", [False, True])
def test_peaks_of_threads_add_up(overlap: bool) -> None:
    """Buffers of two threads count as held at once, whether or not they were in this run."""
    counting = counting_meter()
    assert counting is not None
    both_hold = threading.Barrier(2 if overlap else 1)

    def work() -> None:
        for _ in range(3):  # one after another: they are never held at once
            buffer = torch.empty(1000, dtype=torch.uint8)
            both_hold.wait()
            del buffer

    def call() -> torch.Tensor:
        threads = [threading.Thread(target=work) for _ in range(2)]
        for thread in threads:
            thread.start()
            if not overlap:
                thread.join()
        for thread in threads:
            thread.join()
        return torch.empty(10, dtype=torch.uint8)

    assert counting.peak_of_threads(call) == (2010, 10)
    assert counting.peak_of_threads(lambda: None) == (0, 0)


def test_storage_that_grows(meter: Meter) -> None:
    start = meter.allocated()
    tensor = block(100)
    with meter.watch() as watch:
        tensor.resize_(1000)
    assert (watch.peak() - start, meter.allocated() - start) == (1100, 1000)
    tensor.untyped_storage().resize_(0)
    assert meter.allocated() == start


def test_memory_of_others_is_not_counted(meter: Meter) -> None:
    """NumPy's memory and shared memory are not torch's allocator's."""
    start = meter.allocated()
    borrowed = torch.from_numpy(np.zeros(1000))
    assert meter.allocated() == start
    shared = block(1000)
    shared.share_memory_()
    assert meter.allocated() == start
    del borrowed, shared
    assert meter.allocated() == start


def test_blocks_are_aligned_as_before(meter: Meter) -> None:
    assert all(block(n).data_ptr() % 64 == 0 for n in (1, 100, 1 << 20))


def test_profiler_still_sees_blocks(meter: Meter) -> None:
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as prof:
        block(1000)
    events = prof.profiler.kineto_results.events()  # type: ignore[union-attr]
    assert [e.nbytes() for e in events if e.name() == "[memory]"] == [1000, -1000]


def test_limit_raises_what_torch_raises(meter: Meter) -> None:
    start = meter.allocated()
    with allocation_limit(1000):
        first = block(900)
        with pytest.raises(RuntimeError, match="can't allocate memory: you tried to allocate 101"):
            block(101)
        block(100)
        with allocation_limit(1 << 20), pytest.raises(RuntimeError):
            block(101)
    with pytest.raises(RuntimeError, match="DefaultCPUAllocator: can't allocate memory"):
        block(1 << 50)
    assert block(2000).numel() == 2000
    assert meter.allocated() - start == first.numel()


def test_fork_counts_on_its_own(meter: Meter) -> None:
    """A child goes on from the parent's figures, also where another thread held a lock."""
    held = [block(1000)]
    start, watch = meter.allocated(), meter.watch()
    locked, done = threading.Event(), threading.Event()

    def hold_the_lock() -> None:
        with meter._lock:  # type: ignore[attr-defined]
            locked.set()
            done.wait()

    thread = threading.Thread(target=hold_the_lock)
    thread.start()
    locked.wait()
    if (child := os.fork()) == 0:
        signal.alarm(30)  # a lock that is never given back
        held.clear()
        kept = block(7)
        is_right = (start - meter.allocated(), watch.peak() - start) == (1000 - kept.numel(), 0)
        os._exit(0 if is_right else 1)
    _, status = os.waitpid(child, 0)
    done.set()
    thread.join()
    assert status == 0
    assert meter.allocated() == start
