"""PlannedDevice: the device that a step is planned for, which need not be this machine's."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from fxckpt.costs.devices import REFERENCE, Device, device_named
from fxckpt.errors import InvalidOption


@dataclass(frozen=True)
class PlannedDevice:
    """Where a graph's values are, and whose rates price its ops."""

    place: torch.device | None = None
    """Device of every value; None leaves each where the caller has it."""
    named: Device | None = None
    """The device whose roofline is taken; None for that of the machine."""

    @property
    def trace_on(self) -> torch.device | None:
        """Device to trace on: that of the values, or the CPU where no GPU is present."""
        return torch.device("cpu") if self.is_away else self.place

    @property
    def is_away(self) -> bool:
        """Whether the graph is of a GPU that this machine has none of."""
        is_gpu = self.place is not None and self.place.type == "cuda"
        return is_gpu and not torch.cuda.is_available()


GPU = torch.device("cuda", 0)
"""Device of the values of a graph that is planned for a GPU elsewhere."""


def planned_device(device: str | torch.device | None, *, is_on_meta: bool) -> PlannedDevice:
    """Return the target that a user asked for.

    None is where the model is; for one on the meta device it is the accelerator of this machine,
    else :data:`~fxckpt.costs.devices.REFERENCE`. Raises :class:`InvalidOption` for a name that is
    not known, and for ``"cuda"`` on a machine without a CUDA device.
    """
    if device is None:
        if not is_on_meta or torch.accelerator.current_accelerator(check_available=True):
            return PlannedDevice()
        named = device_named(REFERENCE)
        name = f"{REFERENCE}, the reference for the meta device"
        return PlannedDevice(GPU, replace(named, name=name))
    name = str(device)
    if name == "cpu":
        return PlannedDevice(torch.device("cpu"))
    if name.partition(":")[0] == "cuda":
        if not torch.cuda.is_available():
            raise InvalidOption(
                f"device={name!r}: there is no CUDA device here (torch "
                f"{torch.__version__}). Name the one to plan for: device='H100'."
            )
        return PlannedDevice(GPU)
    return PlannedDevice(GPU, device_named(name))
