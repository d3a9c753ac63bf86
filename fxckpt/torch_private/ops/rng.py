"""States of random number generators in graphs."""

from __future__ import annotations

import operator
from collections.abc import Callable
from functools import partial
from typing import Any

import torch.utils._pytree
import torch.utils.checkpoint
from torch import fx
from torch._prims.rng_prims import run_and_save_rng_state, run_with_rng_state
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode


def fake_rng_state(drawn: torch.Tensor) -> torch.Tensor:
    """Return a fake tensor for the state of the generator that produced ``drawn``.

    It belongs to the trace of ``drawn`` if that is a fake tensor.
    """
    mode = drawn.fake_mode if isinstance(drawn, FakeTensor) else FakeTensorMode()
    with mode:
        return torch.empty(5056 if drawn.device.type == "cpu" else 16, dtype=torch.uint8)


def default_generator(device: torch.device) -> torch.Generator | None:
    """Return the default generator of a device, or None if it has none that can be copied."""
    if device.type == "cpu":
        return torch.default_generator
    found = getattr(torch.get_device_module(device), "default_generators", ())
    index = device.index
    if index is None and found:
        index = torch.accelerator.current_device_index()
    return found[index] if found else None


def _generator_of(
    device: torch.device,
) -> tuple[Callable[[], torch.Tensor], Callable[[torch.Tensor], Any]]:
    """Return the getter and the setter of the state of a device's default generator."""
    if device.type in ("cpu", "mps"):
        module = torch if device.type == "cpu" else torch.mps
        return module.get_rng_state, module.set_rng_state
    module = torch.get_device_module(device)
    return partial(module.get_rng_state, device), partial(module.set_rng_state, device=device)


def _run_and_save(
    device: torch.device, op: Callable[..., Any], /, *args: Any, **kwargs: Any
) -> tuple[torch.Tensor, Any]:
    """Run a random op and return the generator state before it, and the op's result.

    Does the work of ``run_and_save_rng_state``.
    """
    get, _ = _generator_of(device)
    state = get()
    return state, op(*args, **kwargs)


def _run_with(
    device: torch.device, state: torch.Tensor, op: Callable[..., Any], /, *args: Any, **kwargs: Any
) -> Any:
    """Run a random op under a given generator state and restore the generator.

    Does the work of ``run_with_rng_state``.
    """
    get, put = _generator_of(device)
    now = get()
    put(state)
    try:
        return op(*args, **kwargs)
    finally:
        put(now)


def lower_rng(graph: fx.Graph) -> None:
    """Replace torch's higher-order RNG ops by plain functions, for graphs that run op by op.

    The higher-order ops refuse dispatch modes that are not registered with them, so that a step
    under a FLOP counter would fail.
    """
    plain = {run_and_save_rng_state: _run_and_save, run_with_rng_state: _run_with}
    for node in graph.nodes:
        if node.target in plain:
            node.args = (_device_of(node), *node.args)
            node.target = plain[node.target]


def _device_of(node: fx.Node) -> torch.device:
    """Return the device that an op draws on.

    torch's partitioner leaves out what such a node returns: it is told by the node's items, or
    by what the op is given.
    """
    saves = node.target is run_and_save_rng_state
    state = None if saves else node.args[0]
    items = [user for user in node.users if user.target is operator.getitem]
    given = [arg for arg in node.all_input_nodes if arg is not state]
    results = node.meta.get("val")
    found = (
        results[1] if saves and results is not None else results,
        [item.meta.get("val") for item in items if not saves or item.args[1] == 1],
        node.kwargs.get("device"),
        [arg.meta.get("val") for arg in given],
    )
    for value in torch.utils._pytree.tree_leaves(found):
        if isinstance(value, torch.Tensor):
            return value.device
        if isinstance(value, torch.device):
            return value
    return torch.get_default_device()
