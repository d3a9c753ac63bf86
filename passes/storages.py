"""Storages: fake values share them, and have them of a size, as real ones will.

Some ops copy the whole storage of the view that they are given, and return a view of the copy: what is written into a slice by ``x[i] = y``
becomes one. Their traces are smaller. A compiler that makes kernels of such ops copies the slice alone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

import torch
from torch import Tensor, fx
from torch.utils import _pytree as pytree

from fxckpt.passes.kinds import tensors
from fxckpt.torch_private import fake_like, laid_over, shown, size_hint, storage_id

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
    """Let the values of ops that copy the storage of their first argument have storages as large as it."""
    _store(graph, lambda node: _whole(node.all_input_nodes[0].meta["val"]), lambda value: 0)


def copy_views_alone(graph: fx.Graph) -> None:
    """Let the values of those ops have storages as large as what they show, and begin where these do.

    Traces differ in it: one that finds the op in the cache of fake tensors has a smaller storage than the first of its kind.
    """
    # What is read by its place in the storage stays in its place.
    placed = {storage_id(t) for n in graph.find_nodes(op="call_function", target=as_strided) for t in tensors(n.meta.get("val"))}

    def stored(node: fx.Node) -> Tensor | None:
        return None if storage_id(node.meta["val"]) in placed else _alone(node.meta["val"])

    _store(graph, stored, lambda value: value.storage_offset() * value.element_size())


def _store(graph: fx.Graph, stored: Callable[[fx.Node], Tensor | None], start: Callable[[Tensor], int | torch.SymInt]) -> None:
    moved: dict[int, Tensor] = {}
    starts: dict[int, int | torch.SymInt] = {}
    replaced = []
    """Values whose storages' places must not be given to new ones here."""
    for node in graph.nodes:
        if node.op != "call_function":
            continue
        if moved:
            retie(node, moved, starts)
        new = stored(node) if node.target in COPIES_STORAGE else None
        if new is not None:
            value = node.meta["val"]
            replaced.append(value)
            moved[storage_id(value)], starts[storage_id(value)] = new, start(value)
            retie(node, moved, starts)


def retie(node: fx.Node, moved: Mapping[int, Tensor], starts: Mapping[int, int | torch.SymInt] = MappingProxyType({})) -> None:
    """Let the fake values of a node share storages with what stands for those they lie in, as ``moved`` has it by storage.

    ``starts`` tells where in the old storage the new one begins, in bytes.
    """
    value = node.meta.get("val")
    if any(storage_id(t) in moved for t in tensors(value)):

        def laid(t: Tensor) -> Tensor:
            place = storage_id(t)
            return laid_over(moved[place], t, starts.get(place, 0)) if place in moved else t

        node.meta["val"] = pytree.tree_map_only(Tensor, laid, value)


def _alone(value: Tensor) -> Tensor | None:
    """Return a row as long as what a value shows; None if its storage is no larger."""
    count = shown(value)
    is_larger = size_hint(value.untyped_storage().nbytes()) > size_hint(count) * value.element_size()
    return fake_like(value, (count,), value.dtype) if is_larger else None


def _whole(view: Tensor) -> Tensor | None:
    """Return a copy of the storage of a view, as a row; None if the view alone is copied, as one that shows an element twice."""
    if view.layout is not torch.strided:
        return None
    count = view.untyped_storage().nbytes() // view.element_size()
    shows_twice = any(stride == 0 and size_hint(size) != 1 for size, stride in zip(view.shape, view.stride(), strict=True))
    return None if shows_twice or size_hint(count) == size_hint(view.numel()) else fake_like(view, (count,), view.dtype)
