"""Storages: fake values share them, and have them of a size, as real ones will.

Some ops copy the whole storage of the view that they are given, and return a view of the copy: what is written into a slice by ``x[i] = y``
becomes one. Their traces are smaller. A compiler that makes kernels of such ops copies the slice alone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor, fx
from torch.utils import _pytree as pytree

from fxckpt.ops.properties import tensors
from fxckpt.torch_private import fake_like, seen_in, shown, size_hint, storage_id

as_strided = torch.ops.aten.as_strided.default
COPIES_STORAGE = frozenset(
    (
        torch.ops.aten.copy.default,
        torch.ops.aten.select_scatter.default,
        torch.ops.aten.slice_scatter.default,
        torch.ops.aten.diagonal_scatter.default,
        torch.ops.aten.as_strided_scatter.default,
    )
)
"""Ops that copy the storage of their first argument as it is (ATen's ``clone_preserve_strides``), and write into the copy."""


def copy_whole_storages(graph: fx.Graph) -> None:
    """Let the values of ops that copy the storage of their first argument lie in storages as large as it, where they lay in it."""
    _store(graph, _whole)


def copy_views_alone(graph: fx.Graph) -> None:
    """Let the values of those ops lie at the beginnings of storages as large as what they show.

    Traces differ in it: one that finds the op in the cache of fake tensors has a smaller storage than the first of its kind.
    """
    # What is read by its place in the storage stays in its place.
    placed = {
        storage_id(t)
        for n in graph.find_nodes(op="call_function", target=as_strided)
        for t in tensors(n.meta.get("val"))
    }
    _store(
        graph,
        lambda node: None if storage_id(node.meta["val"]) in placed else _alone(node.meta["val"]),
    )


def _store(graph: fx.Graph, stored: Callable[[fx.Node], Tensor | None]) -> None:
    moved: dict[int, tuple[Tensor, Tensor]] = {}
    for node in graph.nodes:
        if node.op != "call_function":
            continue
        if moved:
            retie(node, moved)
        new = stored(node) if node.target in COPIES_STORAGE else None
        if new is not None:
            moved[storage_id(node.meta["val"])] = node.meta["val"], new
            retie(node, moved)


def retie(node: fx.Node, moved: Mapping[int, tuple[Tensor, Tensor]]) -> None:
    """Let the fake values of a node share storages with what stands for those that they share them with.

    ``moved`` has, by the storage of the first, pairs of a value and of what stands for it: while it lives, no new storage gets an old one's place.
    """
    value = node.meta.get("val")
    if any(storage_id(t) in moved for t in tensors(value)):
        node.meta["val"] = pytree.tree_map_only(
            Tensor,
            lambda t: seen_in(t, *moved[storage_id(t)]) if storage_id(t) in moved else t,
            value,
        )


def _alone(value: Tensor) -> Tensor | None:
    """Return the like of a value, in a storage as long as what it shows; None if its own is no longer."""
    count = shown(value)
    if size_hint(value.untyped_storage().nbytes()) <= size_hint(count) * value.element_size():
        return None
    return fake_like(value, (count,), value.dtype).as_strided(value.shape, value.stride())


def _whole(node: fx.Node) -> Tensor | None:
    """Return the like of the view that an op copies, in a copy of its storage; None if the view alone is copied, as what shows an element twice."""
    view = node.all_input_nodes[0].meta["val"]
    if view.layout is not torch.strided:
        return None
    count = view.untyped_storage().nbytes() // view.element_size()
    shows_twice = any(
        stride == 0 and size_hint(size) != 1
        for size, stride in zip(view.shape, view.stride(), strict=True)
    )
    if shows_twice or size_hint(count) == size_hint(view.numel()):
        return None
    return fake_like(view, (count,), view.dtype).as_strided(
        view.shape, view.stride(), view.storage_offset()
    )
