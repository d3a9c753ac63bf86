"""Bytes in use on a device, and their peak, for any number of watches at once."""

from __future__ import annotations

import torch

from fxckpt.memory_meter.accelerator import (
    AcceleratorMeter,
    accelerator_meter,
    take_library_memory,
)
from fxckpt.memory_meter.cpu import allocation_limit, counting_meter, cpu_meter
from fxckpt.memory_meter.meter import Meter, Watch

__all__ = [
    "AcceleratorMeter",
    "Meter",
    "Watch",
    "allocation_limit",
    "counting_meter",
    "meter_of",
    "take_library_memory",
]


def meter_of(device: torch.device | str) -> Meter:
    """Return the meter of the bytes in use on ``device``, one for all who ask.

    The first call for the CPU sets an allocator that counts (compiled once on a machine, in a
    second or two) around the present one. Without a compiler the meter is not exact.

    Raises
    ------
    FxckptError
        The memory in use on the device cannot be told.

    Examples
    --------
    >>> import torch
    >>> from fxckpt.memory_meter import meter_of
    >>> meter = meter_of(torch.device("cpu"))
    >>> with meter.watch() as watch:
    ...     start = meter.allocated()
    ...     large = torch.empty(1000, dtype=torch.uint8)
    ...     del large
    ...     small = torch.empty(10, dtype=torch.uint8)
    >>> watch.peak() - start, meter.allocated() - start
    (1000, 10)
    """
    device = torch.device(device)
    if device.type == "cpu":
        return cpu_meter()
    return accelerator_meter(device)
