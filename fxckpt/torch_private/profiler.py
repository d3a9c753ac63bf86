"""Records of torch's profilers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.utils.checkpoint

RECORD_FUNCTION = "torch._C._profiler._RecordFunctionFast"
"""Path of the profiler record that torch's own generated code uses; it is written into code."""


def allocation_events(fn: Callable[[], Any]) -> tuple[list[int], Any]:
    """Run ``fn`` and return the CPU allocator's events in order, and the result of ``fn``.

    An event is a number of bytes: positive if allocated, negative if freed.
    """
    from torch._C._profiler import _ExperimentalConfig

    profiler: Any = torch.autograd
    profiler._enable_profiler_legacy(
        profiler.ProfilerConfig(
            profiler.ProfilerState.CPU, False, True, False, False, False, _ExperimentalConfig()
        )
    )
    try:
        result = fn()
    finally:
        threads = profiler._disable_profiler_legacy()
    return [
        int(e.cpu_memory_usage())
        for events in threads
        for e in events
        if e.kind() == "memory_alloc"
    ], result
