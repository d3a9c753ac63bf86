"""Roofline: the time of an op from its FLOPs, its bytes, and the rates of a device."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import fx

from fxckpt.costs.measured import Records, cpu_figures
from fxckpt.costs.op_counts import node_bytes, node_draws, node_flops


@dataclass(frozen=True)
class Roofline:
    """max(FLOPs / rate, bytes / bandwidth, random numbers / rate) + launch."""

    flops_per_second: float
    bytes_per_second: float
    launch_seconds: float
    name: str = "roofline"
    draws_per_second: float = math.inf

    def flops(self, node: fx.Node) -> int:
        """FLOPs of one run."""
        return node_flops(node)

    def seconds(self, node: fx.Node) -> float:
        """Seconds of one run."""
        return self.seconds_of(node, node_flops(node))

    def seconds_of(self, node: fx.Node, flops: int) -> float:
        """Seconds of one run of so many FLOPs."""
        seconds = max(
            flops / self.flops_per_second,
            node_bytes(node) / self.bytes_per_second,
            node_draws(node) / self.draws_per_second,
        )
        return seconds + self.launch_seconds


LAUNCH_SECONDS = 2e-6

DEVICES = {
    "H200": Roofline(989e12, 4.8e12, LAUNCH_SECONDS),
    "H100": Roofline(989e12, 3.35e12, LAUNCH_SECONDS),
    "A100": Roofline(312e12, 2.0e12, LAUNCH_SECONDS),
}
"""Dense bf16 rate and memory bandwidth of the vendor's datasheets (SXM; the A100 of 80 GB), by what is in the device's name."""

GENERIC_GPU = Roofline(100e12, 1.5e12, LAUNCH_SECONDS)


def device_roofline(device: torch.device) -> Roofline:
    """Return the roofline of a device: the table's, a generic GPU's for one that is not in it, for a CPU what a second's micro-benchmark found."""
    if device.type == "cpu":
        flops, bandwidth, launch, draws_per_second = cpu_figures(Records.of_machine())
        return Roofline(flops, bandwidth, launch, draws_per_second=draws_per_second)
    if device.type == "cuda" and torch.cuda.is_available():
        name = torch.cuda.get_device_name(device)
        return next((roofline for key, roofline in DEVICES.items() if key in name), GENERIC_GPU)
    return GENERIC_GPU
