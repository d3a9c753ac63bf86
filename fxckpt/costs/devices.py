"""Devices: rates, memory and links of GPUs, by name.

Rates are dense: half of what NVIDIA's datasheets give with 2:4 sparsity. Where no link was measured
the figure is a guess from its PCIe generation.

=========  =====================================================================================
A100       NVIDIA's datasheet (SXM, 80 GB; SXM and PCIe, 40 GB; PCIe, 80 GB), compared with
           https://www.thundercompute.com/blog/nvidia-a100-specs-full-guide; link: developer
           forum 352186
H100       NVIDIA's datasheets (SXM, PCIe, NVL); PCIe compared with its table in
           https://archive-lib.hpctech.co.jp/gpuproduct/nvidia-h100.html, bfloat16 of NVL with
           torchtitan's ``get_peak_flops``, its FP32 with 132 SMs of 128 cores at 1.785 GHz, TF32
           and FP8 as half and twice bfloat16; link: NVIDIA/nvbandwidth#24
H200       NVIDIA's datasheet (SXM); link: measured by ``fxckpt calibrate``
B200, B300 NVIDIA's HGX sheets (https://glennklockwood.com/garden/processors/B200, .../B300);
           bandwidth of B200: pytorch/ao#4002
GB200      NVIDIA's GB200 sheet (same pages); link: torchtitan's notes on C2C, in its cpu_offload.py
L40S       NVIDIA's datasheet
A10G       NVIDIA's datasheet for AWS
RTX 4090   NVIDIA's Ada white paper; FP8 with FP32 accumulation
RTX 5090   NVIDIA's RTX Blackwell white paper, and torchao
MI300X     AMD's datasheet
=========  =====================================================================================

torch's own table (``torch/_inductor/analysis/device_info.py``) agrees on A100, H100 and MI300X.

The shares are what kernels reach: 0.78 of a matmul's rate and 0.92 of the bandwidth were measured
on an H100 (torchao, ``testing/training/roofline_utils.py``), and are guesses for the others.
FlashAttention-2 reaches 50 to 73 % on an A100 (https://arxiv.org/abs/2307.08691) and 35 % on an
H100, FlashAttention-3 and cuDNN 75 % (https://arxiv.org/abs/2407.08608); torch has the former, and
cuDNN's on devices of compute capability 9.0 and 10.0.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from difflib import get_close_matches

import torch

from fxckpt.errors import InvalidOption

LAUNCH_SECONDS = 2e-6
"""Seconds of one kernel launch on a GPU, measured on an H100 (torchao, ``roofline_utils.py``)."""

CUDNN_SHARE = 0.65
"""Share that cuDNN's causal attention reaches, whose FLOPs count as if it were not causal.

Measured on an H200 in bfloat16, forward and backward, of 32 heads of 64 (Llama in
``bench/results/h200/ops.txt``; GPT-2's 24 heads of 32 reach 0.30). A guess for the others.
"""

PCIE_4 = 25e9
"""Bytes/s of a PCIe 4 x16 link in one direction, measured on an A100."""

PCIE_5 = 50e9
"""Bytes/s of a PCIe 5 x16 link in one direction, as torch's own offloading assumes."""


@dataclass(frozen=True)
class Device:
    """Figures of one device: FLOP/s by dtype, bytes/s, bytes, and seconds of a launch."""

    name: str
    fp64: float
    """FLOP/s of float64 matmuls."""
    fp32: float
    """FLOP/s of float32 matmuls without TF32."""
    tf32: float
    """FLOP/s of float32 matmuls in TF32."""
    bf16: float
    """FLOP/s of bfloat16 and float16 matmuls."""
    fp8: float
    """FLOP/s of matmuls in one byte; that of bfloat16 where the device has no such units."""
    bytes_per_second: float
    """Peak memory bandwidth."""
    memory_bytes: int
    """Memory of the device, by its datasheet in decimal gigabytes."""
    to_host: float
    """Bytes/s from the device to pinned memory of the host."""
    from_host: float
    """Bytes/s from pinned memory of the host to the device."""
    matmul_share: float = 0.78
    """Share of a rate that large matmuls reach."""
    bandwidth_share: float = 0.92
    """Share of the bandwidth that pointwise kernels reach."""
    attention_share: float = 0.5
    """Share of a rate that fused attention reaches."""
    launch_seconds: float = LAUNCH_SECONDS
    """Seconds of one kernel launch; 0 where a CUDA graph replays it."""
    cudnn_first: bool = field(default=False, kw_only=True, repr=False)
    """Whether torch prefers cuDNN's attention: at compute capability 9.0 and 10.0."""
    forms: str = field(default="", kw_only=True, repr=False)
    """Words that a driver may add to the name, and that leave the figures as they are.

    With any other word ("Laptop", "D", a size of memory, a part of a device) it is another device.
    """

    def rate(self, dtype: torch.dtype, *, tf32: bool) -> float:
        """Return the FLOP/s of matmuls of a dtype; ``tf32`` says whether float32 takes TF32.

        >>> device_named("H100").rate(torch.bfloat16, tf32=False)
        989000000000000.0
        """
        if dtype in (torch.float64, torch.complex128):
            return self.fp64
        if dtype in (torch.float32, torch.complex64):
            return self.tf32 if tf32 else self.fp32
        return self.fp8 if dtype.itemsize == 1 else self.bf16


T, GB = 1e12, 10**9

A100 = Device(
    "A100",
    19.5 * T,
    19.5 * T,
    156 * T,
    312 * T,
    312 * T,
    2.039 * T,
    80 * GB,
    PCIE_4,
    PCIE_4,
    attention_share=0.65,
    forms="SXM SXM4 80GB",
)

DEVICES = {
    device.name: device
    for device in (
        A100,
        replace(
            A100,
            name="A100 40GB",
            bytes_per_second=1.555 * T,
            memory_bytes=40 * GB,
            forms="SXM SXM4 PCIE",
        ),
        replace(A100, name="A100 PCIe", bytes_per_second=1.935 * T, forms="80GB"),
        Device(
            "H100",
            67 * T,
            67 * T,
            495 * T,
            989 * T,
            1979 * T,
            3.35 * T,
            80 * GB,
            52.8e9,
            35e9,
            attention_share=CUDNN_SHARE,
            cudnn_first=True,
            forms="SXM SXM5 80GB HBM3",
        ),
        Device(
            "H100 PCIe",
            51 * T,
            51 * T,
            378 * T,
            756 * T,
            1513 * T,
            2.0 * T,
            80 * GB,
            PCIE_5,
            PCIE_5,
            attention_share=CUDNN_SHARE,
            cudnn_first=True,
            forms="80GB HBM2E",
        ),
        Device(
            "H100 NVL",
            60 * T,
            60 * T,
            417.5 * T,
            835.5 * T,
            1670.5 * T,
            3.9 * T,
            94 * GB,
            PCIE_5,
            PCIE_5,
            attention_share=CUDNN_SHARE,
            cudnn_first=True,
            forms="94GB HBM3",
        ),
        Device(
            "H200",
            67 * T,
            67 * T,
            495 * T,
            989 * T,
            1979 * T,
            4.8 * T,
            141 * GB,
            54.5e9,
            54.4e9,
            attention_share=CUDNN_SHARE,
            cudnn_first=True,
            forms="SXM SXM5 141GB HBM3E",
        ),
        Device(
            "B200",
            40 * T,
            80 * T,
            1100 * T,
            2250 * T,
            4500 * T,
            7.67 * T,
            180 * GB,
            PCIE_5,
            PCIE_5,
            attention_share=CUDNN_SHARE,
            cudnn_first=True,
            forms="SXM SXM6 180GB HBM3E",
        ),
        Device(
            "B300",
            1.25 * T,
            75 * T,
            1125 * T,
            2250 * T,
            4500 * T,
            8.0 * T,
            288 * GB,
            PCIE_5,
            PCIE_5,
            forms="SXM SXM6 AC 288GB HBM3E",
        ),
        Device(
            "GB200",
            45 * T,
            90 * T,
            1250 * T,
            2500 * T,
            5000 * T,
            8.0 * T,
            186 * GB,
            350e9,
            350e9,
            attention_share=CUDNN_SHARE,
            cudnn_first=True,
            forms="186GB HBM3E",
        ),
        Device(
            "L40S",
            1.43 * T,
            91.6 * T,
            183 * T,
            362 * T,
            733 * T,
            0.864 * T,
            48 * GB,
            PCIE_4,
            PCIE_4,
            forms="48GB",
        ),
        Device(
            "A10G",
            0.49 * T,
            31.5 * T,
            35 * T,
            70 * T,
            70 * T,
            0.6 * T,
            24 * GB,
            PCIE_4,
            PCIE_4,
            forms="24GB",
        ),
        Device(
            "RTX 4090",
            1.29 * T,
            82.6 * T,
            82.6 * T,
            165.2 * T,
            330.3 * T,
            1.008 * T,
            24 * GB,
            PCIE_4,
            PCIE_4,
            forms="24GB",
        ),
        Device(
            "RTX 5090",
            1.64 * T,
            104.8 * T,
            104.8 * T,
            209.5 * T,
            419 * T,
            1.792 * T,
            32 * GB,
            PCIE_5,
            PCIE_5,
            forms="32GB",
        ),
        Device(
            "MI300X",
            163.4 * T,
            163.4 * T,
            653.7 * T,
            1307.4 * T,
            2614.9 * T,
            5.3 * T,
            192 * GB,
            PCIE_5,
            PCIE_5,
            forms="OAM VF 192GB HBM3",
        ),
    )
}
"""Devices by name."""

REFERENCE = "H100"
"""The device that a model on the meta device is planned for where none is named or present."""


BRANDS = {"NVIDIA", "AMD", "INSTINCT", "TESLA", "GEFORCE", "RTX", "TENSOR", "CORE", "GPU"}
"""Words of a driver's names that tell no device from another."""


def _words(text: str) -> tuple[str, ...]:
    """Return the words of a name that tell a device from others, a size of memory as one word."""
    joined = re.sub(r"(\d)\s*GI?B\b", r"\1GB", text.upper())
    joined = re.sub(r"\bRTX(?=\d)", "RTX ", joined)
    return tuple(w for w in re.split(r"[^A-Z0-9.]+", joined) if w and w not in BRANDS)


def find_device(text: str) -> Device | None:
    """Return the device of the table that a text names, or None.

    The text is a name of the table, or a driver's name for the device. Every word of it has to be
    of that device: a laptop's RTX 4090 is another one.

    >>> [find_device(t).name for t in ("h100", "NVIDIA GeForce RTX 4090", "rtx4090", "GB200")]
    ['H100', 'RTX 4090', 'RTX 4090', 'GB200']
    >>> find_device("NVIDIA A100-SXM4-40GB").name, find_device("NVIDIA GeForce RTX 4090 Laptop GPU")
    ('A100 40GB', None)
    """
    words = set(_words(text))
    for name, device in DEVICES.items():
        needed = set(_words(name))
        if needed <= words <= needed.union(_words(device.forms)):
            return device
    return None


def _near(text: str) -> Iterator[str]:
    """Yield names of the table: first those with a word of the text, then those spelled alike."""
    words = _words(text)
    yield from (name for name in DEVICES if set(_words(name)) <= set(words))
    known = {" ".join(_words(name)): name for name in DEVICES}
    yield from (known[n] for n in get_close_matches(" ".join(words), known, 3, cutoff=0.4))


def device_named(name: str) -> Device:
    """Return the device of a name; raise :class:`InvalidOption` for one that is not known."""
    found = find_device(name) if isinstance(name, str) else None
    if found is None:
        near = list(dict.fromkeys(_near(name)))[:3] if isinstance(name, str) else []
        hint = f"Did you mean {' or '.join(map(repr, near))}? " if near else ""
        raise InvalidOption(
            f"device={name!r} is not a device that fxckpt knows. {hint}Known: "
            f"{', '.join(DEVICES)}; 'cpu' and 'cuda' are this machine's own. Of another one: "
            "cost=Roofline(FLOP/s, bytes/s, launch seconds)."
        )
    return found
