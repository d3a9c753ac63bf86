"""Signatures of calls: two calls with equal signatures share one plan."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn

from fxckpt.torch_private import MODULE_FIELDS

Key = tuple[Any, ...]

HOOKS = MODULE_FIELDS - {
    "training",
    "_parameters",
    "_buffers",
    "_modules",
    "_non_persistent_buffers_set",
    "_is_full_backward_hook",
}
CONSTANT_TYPES = frozenset((bool, int, float, str, bytes, type(None), torch.dtype, torch.device))


@dataclass(frozen=True)
class Signature:
    """A key for the calls that share a plan; it keeps no tensor and no module alive."""

    structure: str
    """The pytree structure of the arguments."""
    leaves: tuple[Key, ...]
    """Geometry, storage and gradient flags of tensors; type and value of other arguments."""
    state: tuple[Key, ...]
    """Shape, dtype, device and gradient flag of each parameter and buffer."""
    modules: tuple[Key, ...]
    """Identity, mode, code (of graphs), hooks and attributes (of graphs, those read) per module.

    A change inside an object that is an attribute is not seen.
    """
    autocast: tuple[Any, ...]
    """Autocast's state and dtype per device type."""


def signature_of(
    structure: str, leaves: Sequence[Any], state: Iterable[Tensor], root: nn.Module
) -> Signature:
    """Return the signature of a call of ``root`` with these argument leaves and this state."""
    seen: dict[int, int] = {}
    return Signature(
        structure,
        tuple(
            _tensor(leaf, seen) if isinstance(leaf, Tensor) else _constant(leaf) for leaf in leaves
        ),
        tuple((t.shape, t.dtype, t.device, t.requires_grad) for t in state),
        # The root's hooks run around the step.
        tuple(_module(m, frozenset() if m is root else HOOKS) for m in root.modules()),
        tuple(
            (torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind))
            for kind in ("cpu", "cuda")
        ),
    )


class _IdentityKey:
    """Identity of an object: equal to itself alone, and to nothing once the object is freed."""

    def __init__(self, value: Any) -> None:
        self._hash = id(value)
        self._get: Callable[[], Any]
        try:
            self._get = weakref.ref(value)
        except TypeError:
            self._get = lambda: value

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, _IdentityKey)
            and (value := self._get()) is not None
            and value is other._get()
        )

    def __hash__(self) -> int:
        return self._hash


def _module(module: nn.Module, hooks: frozenset[str]) -> Key:
    found: list[Any] = [weakref.ref(module), module.training]
    ignored: AbstractSet[str] = MODULE_FIELDS
    if isinstance(module, fx.GraphModule):
        # Each recompile makes a new code string, and the graph tells which attributes it reads.
        found.append(_IdentityKey(module.code))
        ignored = vars(module).keys() - {
            str(node.target).partition(".")[0] for node in module.graph.find_nodes(op="get_attr")
        }
    for name, value in vars(module).items():
        if name not in ignored:
            found.append((name, _attribute(value)))
        elif value and name in hooks:
            # Hook ids are never reused.
            found.append((name, *value))
    return tuple(found)


def _attribute(value: Any) -> Key:
    kind = type(value)
    if kind in CONSTANT_TYPES:
        return _constant(value)
    if kind in (list, tuple):
        return (kind, *map(_attribute, value))
    if kind is dict:
        return (kind, *((_attribute(key), _attribute(item)) for key, item in value.items()))
    return (_IdentityKey(value),)


def _tensor(tensor: Tensor, seen: dict[int, int]) -> Key:
    # A trace specializes on inputs that share storage or are the same tensor.
    storage = seen.setdefault(tensor.untyped_storage()._cdata, len(seen))
    same = seen.setdefault(-id(tensor), len(seen))
    place = (
        type(tensor),
        tensor.shape,
        tensor.stride(),
        tensor.storage_offset(),
        tensor.dtype,
        tensor.device,
    )
    return (*place, tensor.requires_grad, tensor.is_leaf, storage, same)


def _constant(value: Any) -> Key:
    # 1, 1.0 and True are equal in Python but not to an op.
    try:
        hash(value)
    except TypeError:
        return (type(value), repr(value))
    return (type(value), value if not isinstance(value, float) else repr(value))
