"""Sink reshapes: move a view that merges dimensions behind the element-wise ops that follow it.

A loss over all but the last token of each sequence merges batch and sequence for its softmax; its
gradient is split again, and padded. In the merged shape a compiler indexes the logits by
``x // 255`` and ``x % 255``, unlike their gradient, and so allocates the gradient beside them in
place of overwriting them. Those are the largest values of many language models. MLIR calls the
rewrite sinking of collapsing reshapes.

Expects a normalized joint graph. Leaves one that computes the same, element by element, under the
same names.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from fxckpt.ops.properties import only_computes
from fxckpt.passes.meta import NAME
from fxckpt.torch_private import OpOverload, is_surely_equal

VIEWS = (torch.ops.aten.view.default, torch.ops.aten._unsafe_view.default)
"""Ops that merge or split dimensions."""
TAGS = ("recompute", "ac_graph_id")
"""Metadata of a user's decisions about saving an op."""
COPIES = (torch.ops.aten.clone.default, torch.ops.prims.convert_element_type.default)
"""Ops that copy a slice before it is merged."""


def sink_reshapes(graph: fx.Graph) -> None:
    """Move views that merge the dimensions of a slice behind element-wise ops.

    Only the ops between them and a view that splits the dimensions again are affected.
    """
    place = {node: i for i, node in enumerate(graph.nodes)}
    merged: set[fx.Node] = set()
    for node in place:
        if _merges_slice(node):
            merged.add(node)
        elif sources := merged.intersection(node.all_input_nodes):
            if _is_elementwise(node) and any(
                _has_shape(source, node.meta["val"].shape) for source in sources
            ):
                merged.add(node)
            elif node.target in VIEWS and (region := _region(node, merged, place)) is not None:
                merged.update(_move(node, region))
    graph.eliminate_dead_code()


@dataclass(frozen=True)
class _Region:
    """The nodes between views that merge dimensions and one that splits them."""

    ops: tuple[fx.Node, ...]
    """Element-wise ops, in graph order."""
    merges: tuple[fx.Node, ...]
    """Merging views whose sources the ops can read directly, in graph order."""
    sizes: Mapping[fx.Node, Sequence[Any]]
    """Sizes to which each other operand must be split."""


def _region(split: fx.Node, merged: set[fx.Node], place: Mapping[fx.Node, int]) -> _Region | None:
    """Return the region before a splitting view; None if part of it has no split shape."""
    last, apart = split.all_input_nodes[0], split.meta["val"].shape
    flat, into = last.meta["val"].shape, _sizes(split)
    groups = _groups(flat, apart)
    if groups is None or into is None:
        return None
    ops, merges, sizes = [], [], {}
    todo = [last]
    for node in todo:
        if (
            node.target in VIEWS
            and node in merged
            and _has_shape(node, flat)
            and _has_shape(node.all_input_nodes[0], apart)
        ):
            merges.append(node)
        elif node.target not in VIEWS and node in merged and _has_shape(node, flat):
            ops.append(node)
            todo.extend(arg for arg in node.all_input_nodes if arg not in todo)
        elif (own := _split_sizes(node, flat, groups, into)) is not None:
            sizes[node] = own
        else:
            return None
    begins = min((place[op] for op in ops), default=0)
    if not (ops and merges) or any(
        isinstance(size, fx.Node) and place[size] >= begins for size in into
    ):
        return None
    return _Region(
        tuple(sorted(ops, key=place.__getitem__)),
        tuple(sorted(merges, key=place.__getitem__)),
        sizes,
    )


def _move(split: fx.Node, region: _Region) -> list[fx.Node]:
    """Move the ops of a region to the split shape.

    Returns new views that merge their results for all other readers.
    """
    graph, apart = split.graph, split.meta["val"].shape
    merged = []
    given = {merge: merge.all_input_nodes[0] for merge in region.merges}
    for op in region.ops:
        for arg in op.all_input_nodes:
            if arg not in given and arg not in region.ops:
                with graph.inserting_before(op):
                    given[arg] = (
                        _view(arg, region.sizes[arg], op, but=(NAME, *TAGS))
                        if region.sizes[arg]
                        else arg
                    )
        readers = [user for user in op.users if user is not split and user not in region.ops]
        if readers:
            with graph.inserting_after(op):
                # The first merging view, and so its sizes, come before all of the ops.
                shown = _view(op, region.merges[0].args[1], op, but=(NAME,))
            merged.append(shown)
            for reader in readers:
                reader.replace_input_with(op, shown)
        op.args, op.kwargs = fx.map_arg((op.args, op.kwargs), lambda arg: given.get(arg, arg))
        # A view keeps the storage, by which aliases are known.
        op.meta["val"] = op.meta["val"].view(apart)
    split.replace_all_uses_with(split.all_input_nodes[0])
    graph.erase_node(split)
    return merged


def _view(of: fx.Node, sizes: Any, like: fx.Node, *, but: Sequence[str]) -> fx.Node:
    """Return a view with the metadata of ``like``, except for the keys in ``but``."""
    view = of.graph.call_function(VIEWS[0], (of, sizes))
    shape = [size.meta["val"] if isinstance(size, fx.Node) else size for size in sizes]
    view.meta = {
        **{key: value for key, value in like.meta.items() if key not in but},
        "val": of.meta["val"].view(shape),
    }
    return view


def _merges_slice(node: fx.Node) -> bool:
    """Return whether an op is a view, in fewer dimensions, of the copy of a slice."""
    if node.target not in VIEWS:
        return False
    source = node.all_input_nodes[0]
    is_copy = source.target in COPIES or _is_elementwise(source)
    return (
        is_copy
        and any(a.target is torch.ops.aten.slice.Tensor for a in source.all_input_nodes)
        and _dim(node) < _dim(source)
    )


def _dim(node: fx.Node) -> int:
    return int(node.meta["val"].dim())


def _is_elementwise(node: fx.Node) -> bool:
    """Return whether an op maps dense tensors element by element."""
    is_pointwise = isinstance(node.target, OpOverload) and (
        torch.Tag.pointwise in node.target.tags or node.target is COPIES[1]
    )
    value = node.meta.get("val")
    is_pointwise = is_pointwise and node.kwargs.get("memory_format") in (
        None,
        torch.contiguous_format,
        torch.preserve_format,
    )
    return (
        is_pointwise and only_computes(node) and isinstance(value, Tensor) and value.is_contiguous()
    )


def _has_shape(node: fx.Node, shape: Sequence[Any]) -> bool:
    value = node.meta.get("val")
    return (
        isinstance(value, Tensor)
        and value.dim() == len(shape)
        and all(map(is_surely_equal, value.shape, shape))
    )


def _sizes(split: fx.Node) -> list[Any] | None:
    """Return the sizes passed to a view, with -1 replaced; None if that is a dynamic size."""
    given = zip(split.args[1], split.meta["val"].shape, strict=True)  # type: ignore[arg-type]
    sizes = [
        size if isinstance(size, fx.Node) or not is_surely_equal(size, -1) else found
        for size, found in given
    ]
    return None if any(isinstance(size, torch.SymInt) for size in sizes) else sizes


def _groups(flat: Sequence[Any], apart: Sequence[Any]) -> list[slice] | None:
    """Return the split dimensions of each merged dimension; None if a view does anything else."""
    groups, begin = [], 0
    for size in flat:
        end, product = begin + 1, apart[begin] if begin < len(apart) else 0
        while end < len(apart) and not is_surely_equal(product, size):
            product, end = product * apart[end], end + 1
        if not is_surely_equal(product, size):
            return None
        groups.append(slice(begin, end))
        begin = end
    return groups if begin == len(apart) else None


def _split_sizes(
    node: fx.Node, flat: Sequence[Any], groups: Sequence[slice], into: Sequence[Any]
) -> list[Any] | None:
    """Return the split sizes of an operand that is broadcast to the merged shape.

    They are empty if the operand needs no split, None if it is not broadcast to that shape.
    """
    value = node.meta.get("val")
    if not isinstance(value, Tensor):
        return []
    sizes: list[Any] = []
    first = len(flat) - value.dim()
    for size, whole, group in zip(value.shape, flat[first:], groups[first:], strict=True):
        if is_surely_equal(size, whole):
            sizes.extend(into[group])
        elif is_surely_equal(size, 1):
            sizes.extend([1] * (group.stop - group.start))
        else:
            return None
    return sizes if len(sizes) > value.dim() else []
