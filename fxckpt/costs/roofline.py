"""Roofline: the time of an op from its FLOPs, its bytes, and the rates of a device.

Williams, Waterman and Patterson 2009, https://doi.org/10.1145/1498765.1498785.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import fx

from fxckpt.costs.measured import Records, cpu_figures
from fxckpt.costs.op_counts import node_bytes, node_draws, node_flops


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
        return seconds + self.launch_seconds


LAUNCH_SECONDS = 2e-6
"""Seconds of one kernel launch on a GPU; guess."""

DEVICES = {
    "H200": Roofline(989e12, 4.8e12, LAUNCH_SECONDS),
    "H100": Roofline(989e12, 3.35e12, LAUNCH_SECONDS),
    "A100": Roofline(312e12, 2.0e12, LAUNCH_SECONDS),
}
"""Rooflines by a part of the device's name.

Dense bf16 FLOP/s and memory bytes/s from NVIDIA's datasheets (SXM; the A100 of 80 GB).
"""

GENERIC_GPU = Roofline(100e12, 1.5e12, LAUNCH_SECONDS)
"""Roofline of every other GPU, in FLOP/s, bytes/s and seconds; guess."""


def device_roofline(device: torch.device) -> Roofline:
    """Return the roofline of a device.

    A CPU's is measured in about a second and cached; a GPU's is that of :data:`DEVICES`, else
    :data:`GENERIC_GPU`.
    """
    if device.type == "cpu":
        flops, bandwidth, launch, draws_per_second = cpu_figures(Records.of_machine())
        return Roofline(flops, bandwidth, launch, draws_per_second=draws_per_second)
    if device.type == "cuda" and torch.cuda.is_available():
        name = torch.cuda.get_device_name(device)
        return next((roofline for key, roofline in DEVICES.items() if key in name), GENERIC_GPU)
    return GENERIC_GPU
