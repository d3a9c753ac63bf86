"""Roofline: the time of an op from its FLOPs, its bytes, and the rates of a device.

Williams, Waterman and Patterson 2009, https://doi.org/10.1145/1498765.1498785.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from fxckpt.costs.calibration import calibrated
from fxckpt.costs.devices import LAUNCH_SECONDS, Device, device_named, find_device
from fxckpt.costs.measured import Records, cpu_figures
from fxckpt.costs.op_counts import node_bytes, node_draws, node_flops
from fxckpt.ops.properties import is_collective, tensors
from fxckpt.torch_private import size_hint


@dataclass(frozen=True)
class Roofline:
    """Cost model of max(FLOPs / rate, bytes / bandwidth, random numbers / rate) + launch."""

    flops_per_second: float
    """Peak arithmetic rate, in FLOP/s."""

    bytes_per_second: float
    """Memory bandwidth, in bytes/s."""

    launch_seconds: float
    """Seconds added to every op."""

    name: str = "roofline"

    draws_per_second: float = math.inf
    """Rate of the random number generator, in numbers/s."""

    def flops(self, node: fx.Node) -> int:
        """Return the FLOPs of one run."""
        return node_flops(node)

    def seconds(self, node: fx.Node) -> float:
        """Return the seconds of one run."""
        return self.seconds_of(node, node_flops(node))

    def seconds_of(self, node: fx.Node, flops: int) -> float:
        """Return the seconds of one run of ``node``, given its FLOPs."""
        seconds = max(
            flops / self.flops_per_second,
            node_bytes(node) / self.bytes_per_second,
            node_draws(node) / self.draws_per_second,
        )
        return seconds + link_seconds(node) + self.launch_seconds


@dataclass(frozen=True)
class DeviceRoofline:
    """Cost model of max(FLOPs / rate of the dtype, bytes / bandwidth) + launch, on one device.

    Rates and bandwidth are those that kernels reach.

    >>> from fxckpt.costs import DeviceRoofline
    >>> DeviceRoofline.of("H100").name
    'roofline of H100'
    """

    device: Device
    name: str
    matmul_tf32: bool
    """Whether float32 matmuls take TF32."""
    convolution_tf32: bool
    """Whether float32 convolutions take TF32."""

    @classmethod
    def of(cls, device: Device | str) -> DeviceRoofline:
        """Return the roofline of a device, with torch's present settings of TF32.

        Raises :class:`InvalidOption` for a name that is not known, and for anything else.
        """
        figures = device if isinstance(device, Device) else device_named(device)
        return cls(figures, f"roofline of {figures.name}", *_takes_tf32())

    def flops(self, node: fx.Node) -> int:
        """Return the FLOPs of one run."""
        return node_flops(node)

    def seconds(self, node: fx.Node) -> float:
        """Return the seconds of one run."""
        return self.seconds_of(node, node_flops(node))

    def seconds_of(self, node: fx.Node, flops: int) -> float:
        """Return the seconds of one run of ``node``, given its FLOPs."""
        device = self.device
        arithmetic = flops / self._rate(node) if flops else 0.0
        traffic = node_bytes(node) / (device.bytes_per_second * device.bandwidth_share)
        return max(arithmetic, traffic) + link_seconds(node) + device.launch_seconds

    def _rate(self, node: fx.Node) -> float:
        """Return the FLOP/s that an op with FLOPs reaches."""
        name, device = str(node.target), self.device
        tf32 = self.convolution_tf32 if "convolution" in name else self.matmul_tf32
        share = device.attention_share if "attention" in name else device.matmul_share
        if str(node.target).startswith(_MATMULS) and not _is_aligned(node):
            share *= UNALIGNED_SHARE
        return share * device.rate(_operand_dtype(node), tf32=tf32)


_MATMULS = ("aten.mm.", "aten.addmm.", "aten.bmm.", "aten.baddbmm.", "fxckpt.accumulate_mm.")
ALIGNED_BYTES = 16
"""Rows of a matrix in half precision begin at multiples of it, or tensor cores idle."""
UNALIGNED_SHARE = 1 / 6
"""Share of a matmul's rate that is left then, measured on an H200 at a vocabulary of 50,257."""


def _is_aligned(node: fx.Node) -> bool:
    """Return whether rows of all matrices of an op begin where tensor cores can read them."""
    for each in (node, *node.all_input_nodes):
        for tensor in tensors(each.meta.get("val")):
            if tensor.element_size() != 2 or tensor.dim() < 2:
                continue
            steps = [step for step in map(size_hint, tensor.stride()[-2:]) if step != 1]
            if any(step * tensor.element_size() % ALIGNED_BYTES for step in steps):
                return False
    return True


CPU_LINK, LINK = 1e9, 50e9
"""Bytes/s between two processes on CPUs, and between two accelerators; guess."""


def link_seconds(node: fx.Node) -> float:
    """Return the seconds in which a collective's bytes cross the link between ranks; 0 for others.

    To wait for a collective takes no time of its own.
    """
    if not is_collective(node) or node.target._opname == "wait_tensor":  # type: ignore[union-attr]
        return 0.0
    values = (node.meta.get("val"), *(arg.meta.get("val") for arg in node.all_input_nodes))
    largest, rate = 0, LINK
    for tensor in (tensor for value in values for tensor in tensors(value)):
        largest = max(largest, size_hint(tensor.numel()) * tensor.element_size())
        rate = CPU_LINK if tensor.device.type == "cpu" else rate
    return largest / rate


def _operand_dtype(node: fx.Node) -> torch.dtype:
    """Return the dtype of an op's first tensor argument, else of its result.

    Of a matrix product it is that of the last one: what the product is added to comes first.
    """
    inputs = node.all_input_nodes
    if str(node.target).startswith(_MATMULS):
        inputs = inputs[::-1]
    for value in (*(arg.meta.get("val") for arg in inputs), node.meta.get("val")):
        for tensor in tensors(value):
            return tensor.dtype
    return torch.float32


def _takes_tf32() -> tuple[bool, bool]:
    """Return whether torch lets float32 matmuls, and convolutions, take TF32.

    ``allow_tf32`` and ``torch.set_float32_matmul_precision`` set what is read here.
    """
    backends: Any = torch.backends
    settings = backends.cuda.matmul.fp32_precision, backends.cudnn.conv.fp32_precision
    return settings[0] == "tf32", settings[1] == "tf32"


GENERIC_GPU = Roofline(100e12, 1.5e12, LAUNCH_SECONDS)
"""Roofline of every other GPU, in FLOP/s, bytes/s and seconds; guess."""


def device_roofline(device: torch.device) -> Roofline | DeviceRoofline:
    """Return the roofline of a device of this machine.

    A CPU's is measured in about a second and cached. A GPU's is that of ``fxckpt calibrate``, else
    that of :data:`~fxckpt.costs.devices.DEVICES`, else :data:`GENERIC_GPU`.
    """
    if device.type == "cpu":
        flops, bandwidth, launch, draws_per_second = cpu_figures(Records.of_machine())
        return Roofline(flops, bandwidth, launch, draws_per_second=draws_per_second)
    if device.type != "cuda" or not torch.cuda.is_available():
        return GENERIC_GPU
    figures = calibrated(device, Records.of_machine()) or find_device(
        torch.cuda.get_device_name(device)
    )
    return GENERIC_GPU if figures is None else DeviceRoofline.of(figures)
