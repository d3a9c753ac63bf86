"""Storage copies: give fake values storages of the size that real values have.

Some ops clone the whole storage of their first argument and return a view of the clone; a write
into a slice, ``x[i] = y``, becomes one of them. Traces show a smaller storage. What a compiler with
kernels of its own does is :mod:`~fxckpt.passes.inductor.copy_views_alone`.

Expects a graph with ``meta["val"]``. Leaves its ops alone, and replaces fake values.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping

import torch
from torch import Tensor, fx
from torch.utils import _pytree as pytree

from fxckpt.ops.properties import tensors
from fxckpt.torch_private import fake_like, seen_in, size_hint, storage_id

COPIES_STORAGE = frozenset(
    (
        torch.ops.aten.copy.default,
        torch.ops.aten.select_scatter.default,
        torch.ops.aten.slice_scatter.default,
        torch.ops.aten.diagonal_scatter.default,
        torch.ops.aten.as_strided_scatter.default,
    )
)
"""Ops that clone the storage of their first argument (``clone_preserve_strides``) and write it."""


def copy_whole_storages(graph: fx.Graph) -> None:
    """Give ops that clone their first argument's storage an output storage of that size."""
    replace_values(graph, COPIES_STORAGE, _in_whole_storage)


def replace_values(
    graph: fx.Graph,
    targets: Collection[object],
    replacement: Callable[[fx.Node], Tensor | None],
) -> None:
    """Replace the fake values of some ops, and all values in the same storages.

    ``replacement`` returns the new value of an op, or None to leave it.
    """
    moved: dict[int, tuple[Tensor, Tensor]] = {}
    for node in graph.nodes:
        if node.op != "call_function":
            continue
        if moved:
            share_storages(node, moved)
        new = replacement(node) if node.target in targets else None
        if new is not None:
            moved[storage_id(node.meta["val"])] = node.meta["val"], new
            share_storages(node, moved)


def share_storages(node: fx.Node, moved: Mapping[int, tuple[Tensor, Tensor]]) -> None:
    """Move the fake values of a node into the storages that replace their own.

    ``moved`` maps the id of a replaced storage to a value that had it and the value that replaces
    this one. It keeps both alive, so that no new storage gets the id of an old one.
    """
    value = node.meta.get("val")
    if any(storage_id(t) in moved for t in tensors(value)):
        node.meta["val"] = pytree.tree_map_only(
            Tensor,
            lambda t: seen_in(t, *moved[storage_id(t)]) if storage_id(t) in moved else t,
            value,
        )


def _in_whole_storage(node: fx.Node) -> Tensor | None:
    """Return a fake value for the view that an op copies, in a clone of the view's whole storage.

    Return None if the op copies the view alone, which it does for a view that repeats an element.
    """
    view = node.all_input_nodes[0].meta["val"]
    if view.layout is not torch.strided:
        return None
    count = view.untyped_storage().nbytes() // view.element_size()
    repeats = any(
        stride == 0 and size_hint(size) != 1
        for size, stride in zip(view.shape, view.stride(), strict=True)
    )
    if repeats or size_hint(count) == size_hint(view.numel()):
        return None
    return fake_like(view, (count,), view.dtype).as_strided(
        view.shape, view.stride(), view.storage_offset()
    )
