"""Storages: fake values share them, and have them of a size, as real ones will.

Some ops copy the whole storage of the view that they are given, and return a view of the copy: what is written into a slice by ``x[i] = y``
becomes one. Their traces are as small as the slice. A compiler that makes kernels of such ops copies the slice alone.
"""

from __future__ import annotations

import torch
from torch import Tensor, fx
from torch.utils import _pytree as pytree

from fxckpt.passes.kinds import tensors
from fxckpt.torch_private import fake_like, laid_over, size_hint, storage_id

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
    moved: dict[int, Tensor] = {}
    replaced = []
    """Values whose storages' places must not be given to new ones here."""
    for node in graph.nodes:
        if node.op != "call_function":
            continue
        if moved:
            retie(node, moved)
        whole = _copied(node.args[0].meta["val"]) if node.target in COPIES_STORAGE else None
        if whole is not None:
            replaced.append(node.meta["val"])
            moved[storage_id(node.meta["val"])] = whole
            retie(node, moved)


def retie(node: fx.Node, moved: dict[int, Tensor]) -> None:
    """Let the fake values of a node share storages with what stands for those they lie in, as ``moved`` has it by storage."""
    value = node.meta.get("val")
    if any(storage_id(t) in moved for t in tensors(value)):
        node.meta["val"] = pytree.tree_map_only(
            Tensor, lambda t: laid_over(moved[storage_id(t)], t) if storage_id(t) in moved else t, value
        )


def _copied(view: Tensor) -> Tensor | None:
    """Return a copy of the storage of a view, as a row; None if the view alone is copied, as one that shows an element twice."""
    if view.layout is not torch.strided:
        return None
    count = view.untyped_storage().nbytes() // view.element_size()
    shows_twice = any(stride == 0 and size_hint(size) != 1 for size, stride in zip(view.shape, view.stride(), strict=True))
    return None if shows_twice or size_hint(count) == size_hint(view.numel()) else fake_like(view, (count,), view.dtype)
