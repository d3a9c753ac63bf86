"""Unfold: keeps a matrix product where it stands, if a compiler would fold it into a later sum and so keep its operands alive until then.

A weight that is used twice (an embedding that is also the head) gets its gradient as a sum, whose parts are made at both ends of the backward.
Inductor makes sum and product one call, at the place of the sum: the head's operands, the gradient of the logits among them, would live as
long as the backward. Seen through a view the product is no part of the pattern.

The one call reads from memory what it adds to the product. Of the gradient of a slice that would be all the zeros around it too, which loops
never store.

Expects an emitted backward. Leaves one that computes the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import fx

from fxckpt.ops.properties import tensors
from fxckpt.passes.analysis.byte_counts import storage_bytes
from fxckpt.passes.analysis.placement import graph_outputs
from fxckpt.passes.inductor.fusion_model import is_extern_kernel
from fxckpt.passes.meta import NEVER_STORED
from fxckpt.torch_private import storage_id

ADD, PRODUCT = torch.ops.aten.add.Tensor, torch.ops.aten.mm.default


def isolate_matmuls(
    backward: fx.GraphModule, *, is_extern_kernel: Callable[[fx.Node], bool] = is_extern_kernel
) -> None:
    """Take products out of sums that come after another library call or add what is never stored, where that frees more than the product takes."""
    graph = backward.graph
    sums = [
        (node, product)
        for node in graph.find_nodes(op="call_function", target=ADD)
        for product in _folded(node)
    ]
    if not sums:
        return
    lives = _Lives(graph)
    calls = [
        lives.place[node]
        for node in graph.nodes
        if node.op == "call_function" and is_extern_kernel(node)
    ]
    for node, product in sums:
        here = lives.place[node]
        freed = {
            storage: nbytes
            for arg in product.all_input_nodes
            for storage, nbytes in lives.storages(arg)
            if any(lives.last[storage] < call < here for call in calls)
        }
        freed.update(
            (storage, nbytes)
            for arg in node.all_input_nodes
            for storage, nbytes in lives.storages(arg)
            if lives.made_by[storage].meta.get(NEVER_STORED)
        )
        if sum(freed.values()) > sum(nbytes for _, nbytes in lives.storages(product)):
            _hide(node, product)


def _folded(node: fx.Node) -> Iterator[fx.Node]:
    """Yield the products that a sum alone reads."""
    return (arg for arg in node.all_input_nodes if arg.target is PRODUCT and len(arg.users) == 1)


class _Lives:
    """Which node gives a backward's storages, and where they are read for the last time; what the caller holds is read at the end."""

    def __init__(self, graph: fx.Graph) -> None:
        self.place = {node: i for i, node in enumerate(graph.nodes)}
        self.last: dict[int, int] = {}
        self.made_by: dict[int, fx.Node] = {}
        for node, i in self.place.items():
            for storage, _ in self.storages(node):
                self.made_by.setdefault(storage, node)
            self.last.update(
                (storage, i) for arg in node.all_input_nodes for storage, _ in self.storages(arg)
            )
        held = [n for n in graph.find_nodes(op="placeholder") if not self._may_die(n)]
        self.last.update(
            (storage, len(self.place))
            for node in (*held, *graph_outputs(graph))
            for storage, _ in self.storages(node)
        )

    def storages(self, node: fx.Node | None) -> Iterator[tuple[int, int]]:
        """Yield what a node's value lies in, and its bytes."""
        return (
            ((storage_id(t), storage_bytes(t)) for t in tensors(node.meta.get("val")))
            if node is not None
            else iter(())
        )

    def _may_die(self, node: fx.Node) -> bool:
        return not str(node.target).startswith(("primals", "tangents"))


def _hide(node: fx.Node, product: fx.Node) -> None:
    """Let a sum read a product, and be read itself, through views; scalars, which give way in type promotion, stay scalars."""
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
