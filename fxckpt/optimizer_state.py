"""Optimizer state that is not allocated yet: what the first ``step()`` will add to the memory.

A budget of the free memory leaves room for it, for graphs are planned when the optimizer is made
and its state is not. An optimizer of torch's own is asked, by one step of a copy on the meta
device. For any other class, whose ``step()`` may do anything, the state is guessed.
"""

from __future__ import annotations

import contextlib
import copy
import gc
import inspect
from collections import defaultdict
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

GUESSED_VALUES = 2
"""Values of state of one parameter, where the optimizer is not asked: those of Adam; guess."""
META_OPTIONS = {"fused": False, "foreach": False, "capturable": False, "lr": 0.0}
"""Options of a group that the meta device needs otherwise, and that do not change the state."""


def bytes_to_come(device: torch.device) -> int:
    """Return the bytes that the first steps of all optimizers alive will allocate on ``device``.

    A parameter has no more state to come once an optimizer has state of it, and the most that one
    of several optimizers (one wraps another, say) will have of it.
    """
    to_come: dict[Tensor, int] = {}
    started: set[Tensor] = set()
    for optimizer in _optimizers_alive():
        for group in optimizer.param_groups:
            bytes_of: dict[tuple[torch.dtype, torch.Size], int] = {}
            for parameter in group["params"]:
                local = _local(parameter)
                if not parameter.requires_grad or not _is_on(local, device):
                    continue
                kind = (local.dtype, local.shape)
                if kind not in bytes_of:
                    bytes_of[kind] = state_bytes(optimizer, group, local)
                to_come[parameter] = max(to_come.get(parameter, 0), bytes_of[kind])
                if optimizer.state.get(parameter):
                    started.add(parameter)
    return sum(nbytes for parameter, nbytes in to_come.items() if parameter not in started)


def state_bytes(optimizer: Optimizer, group: Mapping[str, Any], parameter: Tensor) -> int:
    """Return the bytes of state that an optimizer will have of a parameter of one of its groups.

    >>> weight = torch.nn.Parameter(torch.empty(100, 10))
    >>> adam, sgd = torch.optim.AdamW([weight]), torch.optim.SGD([weight])
    >>> [state_bytes(each, each.param_groups[0], weight) for each in (adam, sgd)]
    [8000, 0]
    """
    step = inspect.unwrap(type(optimizer).step)
    guessed = GUESSED_VALUES * parameter.nbytes
    if not step.__module__.startswith("torch.optim."):
        return guessed
    like = torch.empty_like(parameter, device="meta", requires_grad=True)
    like.grad = torch.empty_like(like)
    meta = copy.copy(optimizer)
    options = {name: META_OPTIONS.get(name, value) for name, value in group.items()}
    meta.param_groups = [{**options, "params": [like]}]
    meta.state = defaultdict(dict)
    # A step that wants a closure fails, as LBFGS; one that wants a number, once there is state.
    is_done = False
    with contextlib.suppress(Exception), torch.no_grad():
        step(meta)
        is_done = True
    if not is_done and not meta.state[like]:
        return guessed
    return sum(
        value.nbytes
        for value in meta.state[like].values()
        if isinstance(value, Tensor) and value.is_meta
    )


def _optimizers_alive() -> list[Optimizer]:
    """Return the optimizers of this process; torch keeps no list of them."""
    # By type(): a proxy of another library may import or compute when asked for its __class__.
    return [each for each in gc.get_objects() if issubclass(type(each), Optimizer)]


def _local(parameter: Tensor) -> Tensor:
    """Return a parameter, or this rank's part of a sharded one."""
    return parameter.to_local() if hasattr(parameter, "to_local") else parameter


def _is_on(tensor: Tensor, device: torch.device) -> bool:
    return tensor.device.type == device.type and device.index in (None, tensor.device.index)
