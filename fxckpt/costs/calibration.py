"""Calibration: the figures of a device of this machine, measured in a minute and kept on disk."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields
from time import perf_counter
from typing import Any

import torch
from torch.nn import functional as F

from fxckpt.budgets import free_bytes
from fxckpt.costs.devices import Device
from fxckpt.costs.measured import Records, keep_measured, known, machine, refuse_unwritable
from fxckpt.errors import InvalidOption
from fxckpt.torch_private import outside_trace, scaled_mm

FIGURES = tuple(f.name for f in fields(Device) if not f.kw_only and f.name != "name")
"""The figures of a device, in order."""


@dataclass(frozen=True)
class Sizes:
    """Sizes of what is run to measure a device."""

    side: int = 8192
    """Rows and columns of a matrix."""
    vector: int = 2**28
    """Bytes of a vector that is added to itself."""
    length: int = 4096
    """Tokens of the attention, which has 32 heads of 128."""
    heads: int = 32
    copied: int = 2**25
    """Bytes of a copy between device and host, as DeepSpeed measures the link."""
    launches: int = 1000
    """Launches of a kernel over one element."""
    seconds: float = 2.0
    """Least seconds spent on each figure; guess."""


SMALL = Sizes(64, 2**16, 64, 2, 2**16, 10, 0.0)
"""Sizes for a machine that is not worth a minute; the figures say little."""


def calibrated(device: torch.device, records: Records) -> Device | None:
    """Return the figures of a device that :func:`calibrate` kept, or None."""
    found = [known(records, f"{machine(device)} {name}") for name in FIGURES]
    if any(figure is None for figure in found):
        return None
    return _device(device, dict(zip(FIGURES, found, strict=True)))


def calibrate(device: torch.device, records: Records, sizes: Sizes | None = None) -> Device:
    """Measure a device, keep its figures, and return them.

    Figures that were kept before are replaced. A dtype that the device does not multiply gets the
    rate of the next wider one. Raises :class:`InvalidOption` for a device that is not here, and
    where the figures cannot be kept, before anything is measured.
    """
    if device.type == "cuda" and not torch.cuda.is_available():
        raise InvalidOption(
            "there is no CUDA device here to calibrate: torch.cuda.is_available() is False. Run "
            "fxckpt calibrate on the machine that has it, or name a device: --device H100."
        )
    refuse_unwritable(records)
    with outside_trace(), torch.no_grad():
        figures = dict(_measure(device, sizes or Sizes()))
    keep_measured(records, {f"{machine(device)} {name}": figures[name] for name in FIGURES})
    return _device(device, figures)


def _device(device: torch.device, figures: Mapping[str, Any]) -> Device:
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    return Device(f"{name}, calibrated", **figures)


def _measure(device: torch.device, sizes: Sizes) -> Iterator[tuple[str, float]]:
    """Yield the figures of a device by name."""
    fastest = _Clock(device, sizes.seconds)
    fp32 = _matmul(fastest, torch.float32, sizes, tf32=False)
    bf16 = _matmul(fastest, torch.bfloat16, sizes) or fp32
    yield "fp64", _matmul(fastest, torch.float64, sizes) or fp32 / 2
    yield "fp32", fp32
    yield "tf32", _matmul(fastest, torch.float32, sizes, tf32=True)
    yield "bf16", bf16
    yield "fp8", _scaled_matmul(fastest, sizes) or bf16
    launch = _launch(fastest, sizes)
    vector = torch.ones(sizes.vector // 4, device=device)
    total = torch.empty_like(vector)
    # Read once and written once.
    yield (
        "bytes_per_second",
        2 * sizes.vector / fastest(lambda: torch.add(vector, 1.0, out=total)),
    )
    yield "memory_bytes", _memory(device)
    pinned = torch.empty(sizes.copied, dtype=torch.uint8, pin_memory=device.type == "cuda")
    block = torch.empty(sizes.copied, dtype=torch.uint8, device=device)
    yield "to_host", sizes.copied / fastest(lambda: pinned.copy_(block, non_blocking=True))
    yield "from_host", sizes.copied / fastest(lambda: block.copy_(pinned, non_blocking=True))
    yield "matmul_share", 1.0
    yield "bandwidth_share", 1.0
    yield "attention_share", _attention(fastest, sizes) / bf16
    yield "launch_seconds", launch


@dataclass(frozen=True)
class _Clock:
    """Times calls on a device; callable, it returns the seconds of the fastest one."""

    device: torch.device
    seconds: float
    """Least seconds to spend."""

    def __call__(self, call: Callable[[], object], runs: int = 1) -> float:
        """Return the least seconds of ``runs`` calls in a row, divided by ``runs``."""
        call()
        least, end = math.inf, perf_counter() + self.seconds
        while least == math.inf or perf_counter() < end:
            self.wait()
            begin = perf_counter()
            for _ in range(runs):
                call()
            self.wait()
            least = min(least, perf_counter() - begin)
        return max(least / runs, 1e-9)

    def wait(self) -> None:
        """Wait until the device has done all it was given."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


def _matmul(
    fastest: _Clock, dtype: torch.dtype, sizes: Sizes, *, tf32: bool | None = None
) -> float:
    """Return the FLOP/s of a square matmul; ``tf32`` sets torch's switch while it runs."""
    # A float64 matmul may run at a sixtieth of the rate of the others.
    side = sizes.side // 4 if dtype is torch.float64 else sizes.side
    matmul = torch.backends.cuda.matmul
    before = matmul.fp32_precision
    try:
        if tf32 is not None:
            matmul.fp32_precision = "tf32" if tf32 else "ieee"
        a = torch.ones(side, side, dtype=dtype, device=fastest.device)
        out = torch.empty_like(a)
        return 2 * side**3 / fastest(lambda: torch.mm(a, a, out=out))
    finally:
        matmul.fp32_precision = before


def _scaled_matmul(fastest: _Clock, sizes: Sizes) -> float:
    """Return the FLOP/s of a matmul in one byte, 0 on a device that has none."""
    device, side = fastest.device, sizes.side
    if device.type != "cuda" or torch.cuda.get_device_capability(device) < (8, 9):
        return 0.0
    a = torch.ones(side, side, device=device).to(torch.float8_e4m3fn)
    one = torch.ones((), device=device)

    def product() -> torch.Tensor:
        return scaled_mm(a, a.t(), scale_a=one, scale_b=one, out_dtype=torch.bfloat16)

    return 2 * side**3 / fastest(product)


def _attention(fastest: _Clock, sizes: Sizes) -> float:
    """Return the FLOP/s of fused attention in bfloat16."""
    shape = (1, sizes.heads, sizes.length, 128)
    q = torch.ones(shape, dtype=torch.bfloat16, device=fastest.device)
    flops = 4 * sizes.heads * sizes.length**2 * 128
    return flops / fastest(lambda: F.scaled_dot_product_attention(q, q, q))


def _launch(fastest: _Clock, sizes: Sizes) -> float:
    """Return the seconds of one launch among many."""
    one = torch.ones(1, device=fastest.device)
    return fastest(lambda: torch.add(one, one, out=one), sizes.launches)


def _memory(device: torch.device) -> float:
    """Return the bytes of a device's memory."""
    if device.type == "cuda":
        return float(torch.cuda.get_device_properties(device).total_memory)
    return float(free_bytes(device))
