"""Normalize: names, dead code and common subexpressions, random ops left alone.

Classic local value numbering on the joint graph: two calls of one pure op on the same arguments are one value. Random, mutating and
effectful ops, outputs, reads of storages that are written later, and ops of different checkpoint regions or names are never merged. What
:func:`fxckpt.name` left in the graph becomes metadata of the op, or the input, whose value it names. ``getitem`` nodes move
right behind their tuple, so that a tuple dies at once.

Expects a joint graph. Leaves a joint graph that computes the same outputs and draws the same random numbers in the same order.
"""

from __future__ import annotations

import operator
from typing import Any

from torch import Tensor, fx, strided
from torch.utils import _pytree as pytree

from fxckpt.ops.properties import has_hidden_effect, is_known_pure, is_mutating, is_random, tensors
from fxckpt.passes.analysis.placement import graph_outputs
from fxckpt.passes.meta import NAME
from fxckpt.passes.transforms.storage_copies import retie
from fxckpt.torch_private import OpOverload, name_op, storage_id


def take_names(graph: fx.Graph) -> None:
    """Move names to the ops that fill the named storages, or the inputs that hold them, and remove the nodes that told them."""
    for node in graph.find_nodes(op="call_function", target=name_op):
        owner, label = _owner(node.args[0]), node.args[1]
        owner.meta[NAME] = tuple(dict.fromkeys((*owner.meta.get(NAME, ()), label)))
        graph.erase_node(node)


def _owner(node: fx.Node) -> fx.Node:
    """Return what fills the storage of a value: its own op, or the op or input that it is a view or an item of."""
    held = {storage_id(t) for t in tensors(node.meta.get("val"))}
    for arg in node.all_input_nodes if node.op == "call_function" and is_known_pure(node) else ():
        if any(storage_id(t) in held for t in tensors(arg.meta.get("val"))):
            return _owner(arg)
    return node


def eliminate_dead_code(graph: fx.Graph) -> None:
    """Remove nodes nobody uses; random ops stay, because they move their generator."""
    graph.eliminate_dead_code()


def merge_common_subexpressions(graph: fx.Graph) -> None:
    """Merge equal calls of pure ops.

    What a user gets stays its own tensor: one in-place op on a merged output would change the other, or what the backward saved. So does what
    holds a sparse tensor, which cannot be laid over another storage.
    """
    written = [
        a
        for n in graph.nodes
        if n.op == "call_function" and is_mutating(n)
        for a in n.all_input_nodes[:1]
    ]
    kept = (*written, *filter(_is_sparse, graph.nodes), *graph_outputs(graph))
    apart = {
        storage_id(t) for n in kept if isinstance(n, fx.Node) for t in tensors(n.meta.get("val"))
    }
    apart -= {
        storage_id(t)
        for n in graph.find_nodes(op="placeholder")
        if n not in written
        for t in tensors(n.meta.get("val"))
    }
    seen: dict[Any, fx.Node] = {}
    moved: dict[int, tuple[Tensor, Tensor]] = {}
    """Merged values, and those that stand for them, by the storages of the merged."""
    for node in list(graph.nodes):
        if moved and node.op == "call_function":
            retie(node, moved)
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


def _is_sparse(node: fx.Node) -> bool:
    value = node.meta.get("val")
    return isinstance(value, Tensor) and value.layout is not strided


def _can_merge(node: fx.Node, apart: set[int]) -> bool:
    if (
        node.op != "call_function"
        or not is_known_pure(node)
        or is_random(node)
        or is_mutating(node)
    ):
        return False
    if has_hidden_effect(node):
        return False
    related = [node, *node.all_input_nodes]
    return not any(storage_id(t) in apart for n in related for t in tensors(n.meta.get("val")))


def _key(node: fx.Node) -> Any:
    leaves, spec = pytree.tree_flatten((node.args, node.kwargs))
    # The type is part of the key: 1, 1.0 and True are equal to Python and not to an op.
    typed = tuple(
        (type(leaf), leaf if not isinstance(leaf, float) else repr(leaf)) for leaf in leaves
    )
    place = (node.meta.get("recompute"), node.meta.get("ac_graph_id"), node.meta.get(NAME))
    return node.target, typed, spec, place


def raise_getitems(graph: fx.Graph) -> None:
    """Move every ``getitem`` of an op's tuple right behind the op."""
    for node in list(graph.nodes):
        if node.target is operator.getitem and isinstance(node.args[0], fx.Node):
            parent = node.args[0]
            if isinstance(parent.target, OpOverload):
                parent.append(node)
