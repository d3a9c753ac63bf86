"""Merge common subexpressions: classic local value numbering on the joint graph.

Two calls of one pure op on the same arguments are one value, and so are two equal collectives, as
all ranks merge them alike. Random, mutating and effectful ops, outputs, reads of storages that are
written later, and ops of different checkpoint regions, budget regions or names stay apart.

Expects a joint graph. Leaves a joint graph that computes the same outputs and draws the same random
numbers in the same order.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor, fx, strided
from torch.utils import _pytree as pytree

from fxckpt.ops.properties import (
    has_hidden_effect,
    is_functional_collective,
    is_known_pure,
    is_mutating,
    is_random,
    tensors,
)
from fxckpt.passes.analysis.placement import graph_outputs
from fxckpt.passes.meta import NAME
from fxckpt.passes.transforms.storage_copies import share_storages
from fxckpt.torch_private import region_keys, storage_id, stream_of


def merge_common_subexpressions(graph: fx.Graph) -> None:
    """Merge equal calls of pure ops.

    Outputs stay apart: an in-place op of the user on a merged output would change the other one, or
    a saved value. Sparse tensors stay apart because their fake values cannot share a storage.
    """
    apart = _storages_apart(graph)
    seen: dict[Any, fx.Node] = {}
    moved: dict[int, tuple[Tensor, Tensor]] = {}
    """Fake values of merged nodes with their replacements, by the storage id of the former."""
    for node in list(graph.nodes):
        if moved and node.op == "call_function":
            share_storages(node, moved)
        if not _can_merge(node, apart):
            continue
        key = _key(node)
        first = seen.setdefault(key, node)
        if first is not node:
            merged = zip(tensors(node.meta.get("val")), tensors(first.meta.get("val")), strict=True)
            moved.update(
                (storage_id(old), (old, new))
                for old, new in merged
                if storage_id(old) != storage_id(new)
            )
            node.replace_all_uses_with(first)
            graph.erase_node(node)


def _storages_apart(graph: fx.Graph) -> set[int]:
    """Return the storages of outputs, of sparse tensors and of what is written in place."""
    written = [
        a
        for n in graph.nodes
        if n.op == "call_function" and is_mutating(n)
        for a in n.all_input_nodes[:1]
    ]
    kept = (*written, *filter(_is_sparse, graph.nodes), *graph_outputs(graph))
    read_only = [n for n in graph.find_nodes(op="placeholder") if n not in written]
    return _storages(kept) - _storages(read_only)


def _storages(nodes: Iterable[object]) -> set[int]:
    """Return the storages of the values of those that are nodes."""
    return {
        storage_id(t) for n in nodes if isinstance(n, fx.Node) for t in tensors(n.meta.get("val"))
    }


def _is_sparse(node: fx.Node) -> bool:
    value = node.meta.get("val")
    return isinstance(value, Tensor) and value.layout is not strided


def _can_merge(node: fx.Node, apart: set[int]) -> bool:
    """Return whether a node is a pure op that neither reads nor fills a storage of ``apart``."""
    if (
        node.op != "call_function"
        or not (is_known_pure(node) or is_functional_collective(node))
        or is_random(node)
        or is_mutating(node)
    ):
        return False
    if has_hidden_effect(node):
        return False
    related = [node, *node.all_input_nodes]
    return not any(storage_id(t) in apart for n in related for t in tensors(n.meta.get("val")))


def _key(node: fx.Node) -> Any:
    """Return a key that is equal for calls of one value only."""
    leaves, spec = pytree.tree_flatten((node.args, node.kwargs))
    # The type is part of the key: 1, 1.0 and True are equal in Python, but not as arguments.
    typed = tuple(
        (type(leaf), leaf if not isinstance(leaf, float) else repr(leaf)) for leaf in leaves
    )
    group = (
        node.meta.get("recompute"),
        node.meta.get("ac_graph_id"),
        node.meta.get(NAME),
        region_keys(node),
        stream_of(node),
    )
    return node.target, typed, spec, group
