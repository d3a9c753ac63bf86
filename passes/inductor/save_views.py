"""Save views: save the view that extern kernels read, in place of its base.

Both share one storage. But Inductor returns a saved value in a layout of its choice: if a matrix
product of the forward reads the value as rows, and so does the backward's, the base would be laid
out, and stored, a second time.

Expects a rematerialized joint graph. Leaves the same work in it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

from torch import fx

from fxckpt.ops.properties import tensors
from fxckpt.passes.inductor.fusion_model import is_extern_kernel
from fxckpt.passes.meta import IS_RECOMPUTE, RECOMPUTE_OF, VIEW_OF
from fxckpt.passes.transforms.rematerialize import Rematerialized
from fxckpt.torch_private import (
    is_pinned_to_backward,
    is_surely_equal,
    is_symbolic,
    storage_id,
)


def save_views(
    joint: fx.GraphModule,
    result: Rematerialized,
    *,
    is_extern_kernel: Callable[[fx.Node], bool] = is_extern_kernel,
) -> Rematerialized:
    """Return the values that the forward must save, with views in place of their bases.

    A base is replaced if a fused kernel makes it and the backward reads it only in extern kernels,
    through that view.
    """
    nodes = {node.name: node for node in joint.graph.nodes}
    place = {node: i for i, node in enumerate(joint.graph.nodes)}
    saved = set()
    for value in result.saved:
        views = [] if is_extern_kernel(value) else list(_views_read(value, nodes))
        if views and all(is_extern_kernel(user) for user in views[-1][0].users):
            _reuse_view(value, views)
            value = views[-1][1]
        saved.add(value)
    return Rematerialized(tuple(sorted(saved, key=place.__getitem__)), result.symbolic)


def _reuse_view(value: fx.Node, views: Sequence[tuple[fx.Node, fx.Node]]) -> None:
    """Replace the backward's copy of a view with the forward's view."""
    copy, view = views[-1]
    copy.replace_all_uses_with(view)
    for each, _ in reversed(views):
        each.graph.erase_node(each)
    view.meta[VIEW_OF] = value.name


def _views_read(value: fx.Node, nodes: Mapping[str, fx.Node]) -> Iterator[tuple[fx.Node, fx.Node]]:
    """Yield the chain of views that are the backward's only reads of a value.

    Each is a pair: the backward's copy and the forward's view.
    """
    view = copy = value
    while True:
        readers = [
            user for user in copy.users if user.op == "output" or is_pinned_to_backward(user)
        ]
        name = str(readers[0].meta.get(RECOMPUTE_OF)) if len(readers) == 1 else ""
        if (
            name not in nodes
            or readers[0].meta.get(IS_RECOMPUTE)
            or not _is_whole_view(nodes[name], view)
        ):
            return
        copy, view = readers[0], nodes[name]
        yield copy, view


def _is_whole_view(view: fx.Node, value: fx.Node) -> bool:
    """Return whether a node is a view of all of a value, made from nothing else."""
    if value.op != "call_function" or [
        read for read in view.all_input_nodes if not is_symbolic(read)
    ] != [value]:
        return False
    pair = [*tensors(value.meta.get("val")), *tensors(view.meta.get("val"))]
    return (
        len(pair) == 2
        and storage_id(pair[0]) == storage_id(pair[1])
        and is_surely_equal(pair[0].numel(), pair[1].numel())
    )
