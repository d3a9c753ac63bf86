"""Bytes of storages and of generator states."""

from __future__ import annotations

import torch
from torch import fx

from fxckpt.ops.properties import tensors
from fxckpt.torch_private import allocated_bytes, run_with_rng_state, size_hint

RNG_STATE_BYTES = {"cpu": 5056}
"""Bytes of ``torch.get_rng_state()`` (MT19937 and its cache); every other device type stores seed and offset."""

RNG_STATE_BYTES_OTHER = 16


def storage_bytes(tensor: torch.Tensor) -> int:
    """Return the bytes the allocator hands out for a tensor's storage."""
    return allocated_bytes(size_hint(tensor.untyped_storage().nbytes()), tensor.device.type)


def replay_bytes(node: fx.Node) -> int:
    """Return what the replay of a random op sets aside while it runs: the generator's present state; 0 for any other node."""
    state = node.args[0] if node.target is run_with_rng_state else None
    return (
        sum(storage_bytes(t) for t in tensors(state.meta["val"]))
        if isinstance(state, fx.Node)
        else 0
    )


def _device_type(node: fx.Node) -> str:
    for tensor in tensors(node.meta.get("val")):
        return str(tensor.device.type)
    return "cpu"
