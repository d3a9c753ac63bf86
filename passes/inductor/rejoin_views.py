"""Rejoin views: fake values of views in the storage of what they are views of.

Inductor removes copies that copy nothing, the dropout of a share of 0 for one, from the joint graph
before it is partitioned. A view of such a copy is then one of its source, but its fake value still
lies in the storage of the copy, so that one value would be planned, saved and sent away twice.

Expects a graph with ``meta["val"]``. Leaves its ops alone, and replaces fake values.
"""

from __future__ import annotations

from torch import Tensor, fx

from fxckpt.ops.properties import tensors
from fxckpt.passes.transforms.storage_copies import share_storages
from fxckpt.torch_private import storage_id
from fxckpt.torch_private.inductor.default_partitioner import is_view


def rejoin_views(graph: fx.Graph) -> None:
    """Give views, and the views of them, values in the storage of their operand's."""
    moved: dict[int, tuple[Tensor, Tensor]] = {}
    for node in graph.nodes:
        if node.op != "call_function":
            continue
        if moved:
            share_storages(node, moved)
        if not is_view(node) or not node.all_input_nodes:
            continue
        base = node.all_input_nodes[0].meta.get("val")
        apart = [t for t in tensors(node.meta.get("val")) if not _is_in_storage_of(t, base)]
        if isinstance(base, Tensor) and apart:
            # The copy was new memory, which began with its first element.
            view = apart[0]
            old = view.as_strided(view.shape, view.stride(), 0)
            moved[storage_id(view)] = old, base
            share_storages(node, moved)


def _is_in_storage_of(view: Tensor, base: object) -> bool:
    return isinstance(base, Tensor) and storage_id(view) == storage_id(base)
