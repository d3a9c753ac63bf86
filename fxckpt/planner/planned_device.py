"""PlannedDevice: the device that a step is planned for, which need not be this machine's."""

from __future__ import annotations

import re
import warnings
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from fxckpt import budgets
from fxckpt.costs.devices import REFERENCE, Device, device_named
from fxckpt.errors import CaptureError, InvalidOption
from fxckpt.torch_private import GpuOps, autocasts_for_gpu


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

    def tracing(self, gm: fx.GraphModule) -> AbstractContextManager[Any]:
        """Return a context that traces a graph of Dynamo as the device would run it.

        Raises :class:`CaptureError` for CUDA's autocast in a graph that is traced without CUDA.
        """
        if not self.is_away:
            return nullcontext()
        if autocasts_for_gpu(gm):
            raise CaptureError(
                "the model enters torch.autocast('cuda'), which torch switches off where there is "
                "no CUDA device: its plan would be that of the model without autocast. To plan "
                "here, enter torch.autocast('cpu', dtype=...), which keeps fewer ops in float32, "
                "or give the model and its inputs their dtype: model.to(torch.bfloat16)."
            )
        if torch.get_autocast_dtype("cuda") != AUTOCAST_DTYPE:
            warnings.warn(
                "torch.autocast('cuda') around this call does nothing: torch switches it off where "
                "there is no CUDA device, and the plan is that of the model without autocast. To "
                "plan here, enter torch.autocast('cpu', dtype=...), or give the model its dtype.",
                stacklevel=2,
            )
        return GpuOps(prefers_cudnn=self.named is not None and self.named.cudnn_first)


AUTOCAST_DTYPE = torch.float16
"""Dtype of CUDA's autocast unless one is given; another one is left by an autocast switched off."""
GPU = torch.device("cuda", 0)
"""Device of the values of a graph that is planned for a GPU elsewhere."""


def planned_device(device: str | torch.device | None, *, is_on_meta: bool) -> PlannedDevice:
    """Return the target that a user asked for.

    None is where the model is; for one on the meta device it is the accelerator of this machine,
    else :data:`~fxckpt.costs.devices.REFERENCE`. Raises :class:`InvalidOption` for a name that is
    not known, and for a CUDA device that this machine lacks.
    """
    if device is None:
        if not is_on_meta or torch.accelerator.current_accelerator(check_available=True):
            return PlannedDevice()
        named = device_named(REFERENCE)
        name = f"{REFERENCE}, the reference for the meta device"
        return PlannedDevice(GPU, replace(named, name=name))
    here = device_here(device)
    return PlannedDevice(GPU, device_named(str(device))) if here is None else PlannedDevice(here)


def device_here(device: object) -> torch.device | None:
    """Return the device of this machine that a user means, or None for a name of another kind.

    Raises :class:`InvalidOption` for what is no name, and for a CUDA device that is not here.
    """
    if not isinstance(device, (str, torch.device)):
        raise InvalidOption(
            f"device={device!r} is of type {type(device).__name__}, not a device's name. "
            "Examples: device='H100', device='cuda', device='cpu'."
        )
    name = str(device).strip().lower()
    found = re.fullmatch(r"(cpu|cuda)(?::(\d+))?", name)
    if found is None:
        return None
    if found[1] == "cpu":
        return torch.device("cpu")
    number = int(found[2] or 0)
    if not torch.cuda.is_available():
        raise InvalidOption(
            f"device={name!r}: there is no CUDA device here (torch {torch.__version__}, "
            f"{built_for()}). Name the one to plan for: device='H100'."
        )
    if number >= torch.cuda.device_count():
        raise InvalidOption(
            f"device={name!r}: the CUDA devices here are 'cuda:0' to "
            f"'cuda:{torch.cuda.device_count() - 1}'. Name one of them, or one elsewhere: "
            "device='H100'."
        )
    return torch.device("cuda", number)


def built_for() -> str:
    """Return for which GPUs torch is built, in words."""
    if torch.version.cuda:
        return f"built for CUDA {torch.version.cuda}"
    return f"built for ROCm {torch.version.hip}" if torch.version.hip else "built without CUDA"


GIB_OF_GB = 2**30 / 10**9
"""Bytes that a card may have for each byte of its datasheet, whose GB are often GiB."""


def warn_beyond(named: Device | None, option: str, asked: budgets.Budget) -> None:
    """Warn of bytes that a named device does not have, whatever its datasheet calls a gigabyte."""
    nbytes = budgets.parse(asked)
    if named is None or not isinstance(nbytes, int) or nbytes <= named.memory_bytes * GIB_OF_GB:
        return
    warnings.warn(
        f"{option}={asked!r} is {budgets.format_bytes(nbytes)}, more than the memory of one "
        f"{named.name}, {named.memory_bytes / 1e9:g} GB: what is planned within it may not fit "
        "there.",
        stacklevel=3,
    )
