"""Signatures: what must be the same of two calls so that one plan serves both."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn

from fxckpt.torch_private import MODULE_FIELDS

Place = tuple[Any, ...]

HOOKS = MODULE_FIELDS - {
    "training",
    "_parameters",
    "_buffers",
    "_modules",
    "_non_persistent_buffers_set",
    "_is_full_backward_hook",
}
PLAIN = frozenset((bool, int, float, str, bytes, type(None), torch.dtype, torch.device))


@dataclass(frozen=True)
class Signature:
    """One kind of call. Compares and hashes; keeps no tensor and no module alive."""

    structure: str
    leaves: tuple[Place, ...]
    state: tuple[Place, ...]
    """Parameters and buffers."""
    modules: tuple[Place, ...]
    """Per module: which it is, its mode, its code if it is a graph, its hooks and its attributes (of a graph those that it reads). What changes
    inside an object that is an attribute is not seen."""
    autocast: tuple[Any, ...]


def signature_of(
    structure: str, leaves: Sequence[Any], state: Iterable[Tensor], root: nn.Module
) -> Signature:
    """Return the signature of a call with these leaves on a module of this state."""
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


class _Same:
    """An object as a key: equal to itself alone, and to nothing once it is gone."""

    def __init__(self, value: Any) -> None:
        self._hash = id(value)
        self._get: Callable[[], Any]
        try:
            self._get = weakref.ref(value)
        except TypeError:
            self._get = lambda: value

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, _Same)
            and (value := self._get()) is not None
            and value is other._get()
        )

    def __hash__(self) -> int:
        return self._hash


def _module(module: nn.Module, hooks: frozenset[str]) -> Place:
    found: list[Any] = [weakref.ref(module), module.training]
    ignored: AbstractSet[str] = MODULE_FIELDS
    if isinstance(module, fx.GraphModule):
        # The code of a graph is a new text whenever it is made, and says which attributes it reads.
        found.append(_Same(module.code))
        ignored = vars(module).keys() - {
            str(node.target).partition(".")[0] for node in module.graph.find_nodes(op="get_attr")
        }
    for name, value in vars(module).items():
        if name not in ignored:
            found.append((name, _attribute(value)))
        elif value and name in hooks:
            # A hook has a number that no other hook gets.
            found.append((name, *value))
    return tuple(found)


def _attribute(value: Any) -> Place:
    kind = type(value)
    if kind in PLAIN:
        return _constant(value)
    if kind in (list, tuple):
        return (kind, *map(_attribute, value))
    if kind is dict:
        return (kind, *((_attribute(key), _attribute(item)) for key, item in value.items()))
    return (_Same(value),)


def _tensor(tensor: Tensor, seen: dict[int, int]) -> Place:
    # Inputs that share storage, or are one tensor, are traced as such.
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


def _constant(value: Any) -> Place:
    # 1, 1.0 and True are equal to Python and not to an op.
    try:
        hash(value)
    except TypeError:
        return (type(value), repr(value))
    return (type(value), value if not isinstance(value, float) else repr(value))
