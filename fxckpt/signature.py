"""Signatures: what must be the same of two calls so that one plan serves both."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

Place = tuple[Any, ...]


@dataclass(frozen=True)
class Signature:
    """One kind of call. Compares and hashes; holds no tensor."""

    structure: str
    leaves: tuple[Place, ...]
    state: tuple[Place, ...]
    """Parameters and buffers."""
    modules: tuple[tuple[int, bool], ...]
    """Per module: which it is, and whether it is in training mode."""
    autocast: tuple[Any, ...]


def signature_of(structure: str, leaves: Sequence[Any], state: Iterable[Tensor], modules: Iterable[nn.Module]) -> Signature:
    """Return the signature of a call with these leaves on a module of this state."""
    seen: dict[int, int] = {}
    return Signature(
        structure,
        tuple(_tensor(leaf, seen) if isinstance(leaf, Tensor) else _constant(leaf) for leaf in leaves),
        tuple((t.shape, t.dtype, t.device, t.requires_grad) for t in state),
        tuple((id(m), m.training) for m in modules),
        tuple((torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in ("cpu", "cuda")),
    )


def _tensor(tensor: Tensor, seen: dict[int, int]) -> Place:
    # Inputs that share storage, or are one tensor, are traced as such.
    storage = seen.setdefault(tensor.untyped_storage()._cdata, len(seen))
    same = seen.setdefault(-id(tensor), len(seen))
    place = (type(tensor), tensor.shape, tensor.stride(), tensor.storage_offset(), tensor.dtype, tensor.device)
    return (*place, tensor.requires_grad, tensor.is_leaf, storage, same)


def _constant(value: Any) -> Place:
    # 1, 1.0 and True are equal to Python and not to an op.
    try:
        hash(value)
    except TypeError:
        return (type(value), repr(value))
    return (type(value), value if not isinstance(value, float) else repr(value))
