"""Peak memory of one call."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import cast

import torch
from torch.profiler import ProfilerActivity, profile

from fxckpt.memory_meter import AcceleratorMeter, meter_of


def measure_peak(fn: Callable[[], object]) -> int:
    """Return the most bytes allocated at once above the start while ``fn()`` runs.

    On CUDA the bytes are those of the current device's caching allocator, whose peak statistic is
    reset. Otherwise they are the bytes requested from torch's CPU allocator, by any thread of the
    process.

    On a machine without a C++ compiler they come from events of ``torch.profiler``, which miss
    what other threads free and report the release of a block only if they saw its allocation: the
    result is too high if ``fn`` frees blocks allocated before.

    Parameters
    ----------
    fn:
        What is called, once.

    Returns
    -------
    int
        Bytes.

    Examples
    --------
    >>> import torch, fxckpt
    >>> fxckpt.measure_peak(lambda: torch.ones(250).exp().sum())
    2000
    """
    # Garbage in reference cycles of earlier calls would be freed during this one.
    gc.collect()
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        return _cuda_peak(fn)
    meter = meter_of("cpu")
    if not meter.exact:
        return _profiled_peak(fn)
    with meter.watch() as watch:
        start = meter.allocated()
        fn()
        return watch.peak() - start


def _cuda_peak(fn: Callable[[], object]) -> int:
    meter = cast(AcceleratorMeter, meter_of("cuda"))
    torch.cuda.synchronize()
    start = meter.allocated()
    meter.restart_peak()
    with meter.watch() as watch:
        fn()
        torch.cuda.synchronize()
        return watch.peak() - start


def _profiled_peak(fn: Callable[[], object]) -> int:
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as prof:
        fn()
    live = peak = 0
    results = prof.profiler.kineto_results  # type: ignore[union-attr]
    events = [e for e in results.events() if e.name() == "[memory]"]
    for event in sorted(events, key=lambda e: e.start_ns()):
        live += event.nbytes()
        peak = max(peak, live)
    return int(peak)
