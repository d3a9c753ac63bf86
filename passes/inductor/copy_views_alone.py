"""Copy views alone: Inductor's kernels for ops that clone a storage copy the view they return.

Expects a graph with ``meta["val"]``. Leaves its ops alone, and replaces fake values.
"""

from __future__ import annotations

import torch
from torch import Tensor, fx

from fxckpt.ops.properties import tensors
from fxckpt.passes.transforms.storage_copies import COPIES_STORAGE, replace_values
from fxckpt.torch_private import fake_like, shown, size_hint, storage_id

as_strided = torch.ops.aten.as_strided.default


def copy_views_alone(graph: fx.Graph) -> None:
    """Give ops that clone a storage an output storage of the size of the view they return.

    Traces disagree here: an op found in the cache of fake tensors has a smaller storage than the
    first of its kind.
    """
    # as_strided reads at an offset in the storage, so such a storage must stay.
    addressed = {
        storage_id(t)
        for n in graph.find_nodes(op="call_function", target=as_strided)
        for t in tensors(n.meta.get("val"))
    }

    def smaller(node: fx.Node) -> Tensor | None:
        value = node.meta["val"]
        return None if storage_id(value) in addressed else _in_own_storage(value)

    replace_values(graph, COPIES_STORAGE, smaller)


def _in_own_storage(value: Tensor) -> Tensor | None:
    """Return a fake value in a storage no longer than it needs; None if its own is no longer."""
    count = shown(value)
    if size_hint(value.untyped_storage().nbytes()) <= size_hint(count) * value.element_size():
        return None
    return fake_like(value, (count,), value.dtype).as_strided(value.shape, value.stride())
