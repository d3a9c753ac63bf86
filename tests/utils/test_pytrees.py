"""Pytrees with dataclasses as nodes."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

from torch.utils import _pytree as pytree

from fxckpt.utils.pytrees import flatten, unflatten


@dataclass
class Batch:
    tokens: Any
    mask: Any = None


@dataclass(frozen=True)
class Frozen:
    inner: Batch
    label: str = "x"
    derived: int = field(init=False, default=7)


class Pair(NamedTuple):
    first: Any
    second: Any


def test_dataclasses_are_opened() -> None:
    """The leaves of a dataclass come in the order of its fields, nested ones too."""
    leaves, _ = flatten({"a": Frozen(Batch([1, 2], 3)), "b": (4,)})
    assert leaves == [1, 2, 3, "x", 7, 4]


def test_round_trip_keeps_types() -> None:
    """Unflattened values have their types and other leaves in place."""
    value = Pair([Frozen(Batch(1))], {"k": Batch((2, 3), None)})
    leaves, spec = flatten(value)
    doubled = unflatten([v * 2 if isinstance(v, int) else v for v in leaves], spec)
    assert isinstance(doubled, Pair) and type(doubled.first[0]) is Frozen
    assert doubled.first[0].inner.tokens == 2 and doubled.second["k"].tokens == (4, 6)
    assert doubled.first[0].derived == 14, "a field that __init__ does not take is set too"


def test_plain_values_are_as_in_torch() -> None:
    """Without dataclasses, leaves and spec are those of torch's own pytrees."""
    value = {"a": [1, (2, None)], "b": 3}
    assert flatten(value) == pytree.tree_flatten(value)


def test_a_class_is_a_leaf() -> None:
    """A dataclass type, which is no instance, is a leaf."""
    assert flatten([Batch])[0] == [Batch]


def test_equal_structures_have_equal_specs() -> None:
    """Specs compare by structure, and tell dataclasses of other types apart."""
    assert flatten(Batch(1, 2))[1] == flatten(Batch(3, 4))[1]
    assert flatten(Batch(1, 2))[1] != flatten(Pair(1, 2))[1]
