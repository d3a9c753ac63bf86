"""Peak memory of one call."""

from __future__ import annotations

import gc
from collections.abc import Callable

import torch
from torch.profiler import ProfilerActivity, profile


def measure_peak(fn: Callable[[], object]) -> int:
    """Return the most bytes allocated at once above the start while ``fn()`` runs.

    On CUDA the bytes come from the allocator's statistics of the current device, otherwise from the
    CPU allocator's events in ``torch.profiler``.

    On the CPU, torch reports the release of a block only if it saw the allocation, in this
    measurement or an earlier one. The result is too high if ``fn`` frees blocks allocated before
    that: drop old gradients before the call.
    """
    # Garbage in reference cycles of earlier calls would be freed during this one.
    gc.collect()
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        torch.cuda.synchronize()
        start = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        fn()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - start
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as prof:
        fn()
    live = peak = 0
    results = prof.profiler.kineto_results  # type: ignore[union-attr]
    events = [e for e in results.events() if e.name() == "[memory]"]
    for event in sorted(events, key=lambda e: e.start_ns()):
        live += event.nbytes()
        peak = max(peak, live)
    return int(peak)
