"""Properties of the ops of nodes: random, mutating, collective, pure, ...

They are read from tags, schemas and registrations; from names only if nothing else tells.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from fxckpt.ops.kernels import OWN
from fxckpt.ops.registry import registered
from fxckpt.ops.unseen import unseen
from fxckpt.torch_private import OpOverload, has_effect, parts_of

UNINITIALIZED = frozenset(
    ("empty", "empty_like", "empty_permuted", "empty_strided", "new_empty", "new_empty_strided")
)
"""Ops that return uninitialized memory."""
TORCHS = frozenset(("aten", "inductor", "prims", "quantized", "torch_nn"))
"""Namespaces of ops that come with torch."""


def tensors(value: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors in a node's ``meta["val"]``.

    A sparse tensor has no storage of its own: its component tensors are yielded.
    """
    if isinstance(value, torch.Tensor):
        return iter((value,)) if value.layout is torch.strided else parts_of(value)
    if value is None or isinstance(value, (int, float, torch.SymInt)):
        return iter(())
    return (
        tensor
        for leaf in pytree.tree_leaves(value)
        for tensor in (tensors(leaf) if isinstance(leaf, torch.Tensor) else ())
    )


def is_random(node: fx.Node) -> bool:
    """Return whether an op draws from a generator: by its tag, unless its dropout is zero."""
    if (
        not isinstance(node.target, OpOverload)
        or torch.Tag.nondeterministic_seeded not in node.target.tags
    ):
        return False
    return bool(argument(node, "dropout_p") != 0.0)


def draws(node: fx.Node) -> bool:
    """Return whether an op makes random numbers, from a generator or from a given seed."""
    return is_random(node) or (
        isinstance(node.target, OpOverload)
        and node.target._opname in ("inductor_random", "inductor_randint")
    )


def is_seed(node: fx.Node) -> bool:
    """Return whether an op draws seeds of Inductor's random numbers.

    Inductor cannot lower such an op under a generator state that was set.
    """
    return isinstance(node.target, OpOverload) and node.target._opname in (
        "inductor_seed",
        "inductor_seeds",
    )


def argument(node: fx.Node, name: str) -> Any:
    """Return a node's argument by its name in the schema, or its default.

    Returns None if the schema has no argument of that name.
    """
    if not isinstance(node.target, OpOverload):
        return None
    for position, declared in enumerate(node.target._schema.arguments):
        if declared.name == name:
            given = (
                node.args[position]
                if position < len(node.args) and not declared.kwarg_only
                else node.kwargs.get(name)
            )
            return declared.default_value if given is None else given
    return None


def is_mutating(node: fx.Node) -> bool:
    """Return whether an op writes one of its arguments, by its schema."""
    return isinstance(node.target, OpOverload) and node.target._schema.is_mutable


def written_argument(node: fx.Node) -> fx.Node | None:
    """Return the argument that an op writes and returns as its one result, or None."""
    if not is_mutating(node):
        return None
    schema = node.target._schema  # type: ignore[union-attr]
    info = schema.returns[0].alias_info if len(schema.returns) == 1 else None
    if info is None or not info.is_write:
        return None
    for declared in schema.arguments:
        if declared.alias_info is not None and declared.alias_info.before_set == info.before_set:
            found = argument(node, declared.name)
            return found if isinstance(found, fx.Node) else None
    return None


COMMUNICATING = frozenset(("_c10d_functional", "c10d", "c10d_functional"))
"""Namespaces of ops that communicate with other ranks."""


def is_collective(node: fx.Node) -> bool:
    """Return whether an op communicates with other ranks."""
    return isinstance(node.target, OpOverload) and node.target.namespace in COMMUNICATING


def is_functional_collective(node: fx.Node) -> bool:
    """Return whether an op communicates, and writes none of its arguments by its schema.

    All ranks that run it again, in one order, get the same values.
    """
    return (
        is_collective(node)
        and node.target.namespace == "_c10d_functional"  # type: ignore[union-attr]
        and not is_mutating(node)
    )


def is_gather(op: Any) -> bool:
    """Return whether an op puts the shards of all ranks together."""
    name = str(getattr(op, "_opname", ""))
    return getattr(op, "namespace", "") in COMMUNICATING and name.startswith("all_gather")


def is_torchs_own(node: fx.Node) -> bool:
    """Return whether an op is of torch's own namespaces (aten, prims, ...), ours, or getitem.

    ``torch_nn`` has the fused losses of ``torch.nn.functional``.
    """
    if node.target is operator.getitem:
        return True
    if not isinstance(node.target, OpOverload):
        return False
    return node.target.namespace in TORCHS or node.target in OWN or node.target is unseen


def is_known_pure(node: fx.Node) -> bool:
    """Return whether recomputing an op gives the same values: torch's own, or registered so."""
    return is_torchs_own(node) or registered(node.target).recompute is True


def has_hidden_effect(node: fx.Node) -> bool:
    """Return whether dropping or repeating an op is visible (asserts, registered effects, ...)."""
    return has_effect(node.target) or (
        node.op == "call_function"
        and not is_collective(node)
        and node.is_impure(impure_random=False)
    )


def is_uninitialized(node: fx.Node) -> bool:
    """Return whether an op returns uninitialized memory."""
    return isinstance(node.target, OpOverload) and node.target._opname in UNINITIALIZED


def only_computes(node: fx.Node) -> bool:
    """Return whether an op is pure whatever its arguments: no draw, write, collective or effect.

    Most ops are.
    """
    target = node.target
    if target is not operator.getitem and (
        not isinstance(target, OpOverload) or torch.Tag.nondeterministic_seeded in target.tags
    ):
        return False
    return is_known_pure(node) and not (
        is_mutating(node) or is_collective(node) or has_hidden_effect(node)
    )


# fmt: off
CHOOSING = frozenset(
    (
        "argmax", "argmin", "argsort", "bincount", "bucketize", "histc", "kthvalue", "median",
        "mode", "nanmedian", "nonzero", "nonzero_static", "searchsorted", "sort", "topk",
        "unique_consecutive", "unique_dim", "_unique", "_unique2",
    )
)
"""Ops that decide (discrete ops), whatever reads their result."""
