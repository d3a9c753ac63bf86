"""Pytrees: arguments and results as flat lists of leaves, and back.

Dataclasses that are not registered with torch's pytrees are nodes too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

from torch.utils import _pytree as pytree


@dataclass(frozen=True)
class _Opened:
    """A dataclass as its type and the values of its fields."""

    kind: type
    values: tuple[Any, ...]


pytree.register_pytree_node(
    _Opened,
    lambda opened: (list(opened.values), opened.kind),
    lambda values, kind: _Opened(kind, tuple(values)),
    serialized_type_name="fxckpt.utils.pytrees._Opened",
)


def flatten(value: Any) -> tuple[list[Any], pytree.TreeSpec]:
    """Return the leaves of nested tuples, lists, dicts and dataclasses, and their spec.

    :func:`unflatten` takes the spec.
    """
    leaves, spec = pytree.tree_flatten(value)
    if any(_is_closed(leaf) for leaf in leaves):
        return flatten(pytree.tree_map(_open, value))
    return leaves, spec


def unflatten(leaves: Sequence[Any], spec: pytree.TreeSpec) -> Any:
    """Return the value of these leaves; the inverse of :func:`flatten`."""
    return _close(pytree.tree_unflatten(list(leaves), spec))


def _is_closed(value: Any) -> bool:
    return is_dataclass(value) and not isinstance(value, type)


def _open(value: Any) -> Any:
    if not _is_closed(value):
        return value
    return _Opened(type(value), tuple(getattr(value, f.name) for f in fields(value)))


def _close(value: Any) -> Any:
    """Return ``value`` with its dataclasses restored, nested ones too."""
    return pytree.tree_map(
        lambda v: _close_one(v) if isinstance(v, _Opened) else v,
        value,
        is_leaf=lambda v: isinstance(v, _Opened),
    )


def _close_one(opened: _Opened) -> Any:
    made: Any = object.__new__(opened.kind)
    for f, value in zip(fields(opened.kind), opened.values, strict=True):
        object.__setattr__(made, f.name, _close(value))
    return made
