"""The device of the GPU benchmark and of tests/gpu, which the CPU can stand in for."""

from __future__ import annotations

import os

import torch

from fxckpt.planner.planned_device import built_for

VARIABLE = "FXCKPT_TEST_DEVICE"
"""The environment variable that chooses the device: ``cuda`` or ``cpu``."""


class NoDevice(Exception):
    """The device that was asked for is not here; the text is one line."""


def chosen_device() -> str:
    """Return ``"cuda"`` or ``"cpu"``: what :data:`VARIABLE` says, else the GPU that is here.

    Nothing falls back to the CPU. Raises :class:`NoDevice` without a GPU, and for other values.
    """
    asked = os.environ.get(VARIABLE, "")
    if asked not in ("", "cpu", "cuda"):
        raise NoDevice(
            f"{VARIABLE}={asked!r} is no device to test: use cuda or cpu. "
            "CUDA_VISIBLE_DEVICES chooses among several GPUs."
        )
    if asked == "cpu":
        return asked
    if not torch.cuda.is_available():
        raise NoDevice(
            f"{VARIABLE + '=cuda: ' if asked else ''}there is no CUDA device here (torch "
            f"{torch.__version__}, {built_for()}). {VARIABLE}=cpu runs the same code on the CPU, "
            "at tiny sizes."
        )
    return "cuda"
