"""Isolate matmuls: keep a product in place that Inductor would fold into a later sum.

The gradient of a weight used twice (an embedding that is also the head) is a sum whose parts are
made at both ends of the backward. Inductor folds the product and the later sum into one ``addmm``
at the place of the sum: the operands of the head's product, among them the gradient of the logits,
would live as long as the backward. Behind a view, the product no longer matches the pattern.

``addmm`` also reads the other summand from memory. If that is the gradient of a slice, the zeros
around the slice, which fused kernels never store, would be stored for it.

Expects an emitted backward. Leaves one that computes the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import fx

from fxckpt.ops.properties import tensors
from fxckpt.passes.analysis.byte_counts import storage_bytes
from fxckpt.passes.analysis.placement import graph_outputs
from fxckpt.passes.inductor.fusion_model import is_extern_kernel
from fxckpt.passes.meta import NEVER_STORED
from fxckpt.torch_private import storage_id
from fxckpt.utils.intervals import last_uses

ADD, PRODUCT = torch.ops.aten.add.Tensor, torch.ops.aten.mm.default


def isolate_matmuls(
    backward: fx.Graph, *, is_extern_kernel: Callable[[fx.Node], bool] = is_extern_kernel
) -> None:
    """Hide products from the sums that read them, where that frees more memory than it takes.

    Freed are operands that would outlive another extern kernel, and summands that would otherwise
    never be stored; taken is the product.
    """
    sums = [
        (node, product)
        for node in backward.find_nodes(op="call_function", target=ADD)
        for product in _foldable(node)
    ]
    if not sums:
        return
    intervals = _LiveIntervals(backward)
    calls = [
        intervals.place[node]
        for node in backward.nodes
        if node.op == "call_function" and is_extern_kernel(node)
    ]
    for node, product in sums:
        taken = sum(nbytes for _, nbytes in intervals.storages(product))
        if _freed_bytes(intervals, node, product, calls) > taken:
            _hide(node, product)


def _foldable(node: fx.Node) -> Iterator[fx.Node]:
    """Yield the products that are read by a sum only."""
    return (arg for arg in node.all_input_nodes if arg.target is PRODUCT and len(arg.users) == 1)


def _freed_bytes(
    intervals: _LiveIntervals, node: fx.Node, product: fx.Node, calls: Sequence[int]
) -> int:
    """Return the bytes that need not live, or be stored, for a sum that does not fold a product.

    ``calls`` are the places of the extern kernels.
    """
    here = intervals.place[node]
    freed = {
        storage: nbytes
        for arg in product.all_input_nodes
        for storage, nbytes in intervals.storages(arg)
        if any(intervals.last[storage] < call < here for call in calls)
    }
    freed.update(
        (storage, nbytes)
        for arg in node.all_input_nodes
        for storage, nbytes in intervals.storages(arg)
        if intervals.made_by[storage].meta.get(NEVER_STORED)
    )
    return sum(freed.values())


class _LiveIntervals:
    """First node and last read of each storage of a backward; the caller's never die."""

    def __init__(self, graph: fx.Graph) -> None:
        self.place = {node: i for i, node in enumerate(graph.nodes)}
        self.made_by: dict[int, fx.Node] = {}
        for node in self.place:
            for storage, _ in self.storages(node):
                self.made_by.setdefault(storage, node)
        self.last = last_uses(
            [storage for arg in node.all_input_nodes for storage, _ in self.storages(arg)]
            for node in self.place
        )
        held = [n for n in graph.find_nodes(op="placeholder") if not self._may_die(n)]
        self.last.update(
            (storage, len(self.place))
            for node in (*held, *graph_outputs(graph))
            for storage, _ in self.storages(node)
        )

    def storages(self, node: fx.Node | None) -> Iterator[tuple[int, int]]:
        """Yield the storages of a node's value, with their bytes."""
        return (
            ((storage_id(t), storage_bytes(t)) for t in tensors(node.meta.get("val")))
            if node is not None
            else iter(())
        )

    def _may_die(self, node: fx.Node) -> bool:
        return not str(node.target).startswith(("primals", "tangents"))


def _hide(node: fx.Node, product: fx.Node) -> None:
    """Put views between a sum and its operands and readers.

    Scalars stay scalars, as they give way in type promotion.
    """
    graph = node.graph
    with graph.inserting_before(node):
        read = [
            arg
            for arg in node.all_input_nodes
            if any(t.dim() for t in tensors(arg.meta.get("val")))
        ]
        seen = {
            arg: graph.call_function(torch.ops.aten.unsqueeze.default, (arg, 0)) for arg in read
        }
    for arg, view in seen.items():
        view.meta = {**node.meta, "val": arg.meta["val"].unsqueeze(0)}
        node.replace_input_with(arg, view)
    with graph.inserting_after(node):
        shown = graph.call_function(torch.ops.aten.squeeze.dim, (node, 0))
    node.replace_all_uses_with(shown, delete_user_cb=lambda user: user is not shown)
    shown.meta = dict(node.meta)
    node.meta["val"] = node.meta["val"].unsqueeze(0)
