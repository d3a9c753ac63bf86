"""Inputs of calls that other graphs made, and those of them that one call alone keeps.

A graph whose plan saves an input holds it for its backward, if the code that made it has let it go.
A plan that saves another value in its place does not. These bytes are measured, since a program
knows nothing of what is outside of it.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from fxckpt.torch_private import kept_alone

Input = weakref.ref[torch.Tensor]


def made_inputs(args: Sequence[Any]) -> dict[int, Input]:
    """Return the arguments of a call that ops made, by position: its backward may need them."""
    return {
        i: weakref.ref(arg)
        for i, arg in enumerate(args)
        if type(arg) is torch.Tensor and arg.grad_fn is not None
    }


def kept_bytes(inputs: Mapping[int, Input]) -> dict[int, int]:
    """Return the bytes of each input that is saved for the backward of one call, and held by none.

    It is to be asked once the forward has returned.
    """
    alone = {i: found() for i, found in inputs.items() if kept_alone(found)}
    return {i: x.untyped_storage().nbytes() for i, x in alone.items() if x is not None}
