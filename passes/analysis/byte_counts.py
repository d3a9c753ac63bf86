"""Bytes of storages and of generator states."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import fx

from fxckpt.ops.properties import tensors
from fxckpt.torch_private import (
    SymbolicSize,
    allocated_bytes,
    run_with_rng_state,
    size_hint,
    symbolic_size,
)

RNG_STATE_BYTES = {"cpu": 5056}
"""Bytes of ``torch.get_rng_state()`` by device type (MT19937 and its cache)."""

RNG_STATE_BYTES_OTHER = 16
"""Bytes of the seed and offset that every other device type stores."""


def storage_bytes(tensor: torch.Tensor) -> int:
    """Return the bytes that the allocator hands out for a tensor's storage."""
    return allocated_bytes(size_hint(tensor.untyped_storage().nbytes()), tensor.device.type)


def gradient_bytes(tensor: torch.Tensor) -> int:
    """Return the bytes that the allocator hands out for an incoming gradient."""
    return allocated_bytes(size_hint(gradient_size(tensor)), tensor.device.type)


@dataclass(frozen=True)
class SymbolicBytes:
    """Bytes of a storage as a function of the sizes of the graph's inputs."""

    size: SymbolicSize
    device_type: str

    def at(self, sizes: Mapping[str, int]) -> int:
        """Return the bytes that the allocator hands out at these values of the symbols."""
        return allocated_bytes(self.size.at(sizes), self.device_type)


def symbolic_bytes(tensor: torch.Tensor) -> SymbolicBytes | None:
    """Return the bytes of a tensor's storage as a function of sizes, None if they are constant."""
    return _symbolic(tensor.untyped_storage().nbytes(), tensor)


def symbolic_gradient_bytes(tensor: torch.Tensor) -> SymbolicBytes | None:
    """Return the bytes of an incoming gradient as a function of sizes, None if constant."""
    return _symbolic(gradient_size(tensor), tensor)


def _symbolic(nbytes: int | torch.SymInt, tensor: torch.Tensor) -> SymbolicBytes | None:
    size = symbolic_size(nbytes)
    return None if size is None else SymbolicBytes(size, tensor.device.type)


def gradient_size(tensor: torch.Tensor) -> int | torch.SymInt:
    """Return the bytes of an incoming gradient.

    AOTAutograd traces the gradients of views of one tensor as views of one tensor, the model's
    input included; the autograd engine hands over a tensor for each. One of fixed sizes is copied
    to the strides of its output, gaps included, and any other is dense.
    """
    own, whole = tensor.numel() * tensor.element_size(), tensor.untyped_storage().nbytes()
    dims = [*zip(tensor.shape, tensor.stride(), strict=True)]
    if all(isinstance(n, int) for n in (own, *itertools.chain(*dims))) and own:
        reached = (1 + sum((size - 1) * stride for size, stride in dims)) * tensor.element_size()
        own = max(own, reached)
    return own if size_hint(own) < size_hint(whole) else whole


def rng_state_bytes(node: fx.Node) -> int:
    """Return the bytes of the generator state that a random op draws from."""
    first = next(tensors(node.meta.get("val")), None)
    device_type = "cpu" if first is None else first.device.type
    return RNG_STATE_BYTES.get(device_type, RNG_STATE_BYTES_OTHER)


def replay_bytes(node: fx.Node) -> int:
    """Return the bytes that a recomputed random op holds while it runs; 0 for any other node.

    It sets the generator's present state aside, and restores it at the end.
    """
    state = node.args[0] if node.target is run_with_rng_state else None
    if not isinstance(state, fx.Node):
        return 0
    return sum(storage_bytes(t) for t in tensors(state.meta["val"]))
