"""Hand over: save the view that library calls read, in place of the value that it shows.

Both lie in the same memory. But a compiler that lays values out anew returns a saved value in a layout of its choice: if a matrix product of the
forward reads it as rows, and so does the backward's, the value itself would be laid out, and stored, a second time.

Expects a joint graph that was rematerialized. Leaves the same work in it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

from torch import fx

from fxckpt.ops.properties import tensors
from fxckpt.passes.inductor.fusion_model import is_extern_kernel
from fxckpt.passes.meta import IS_RECOMPUTE, RECOMPUTE_OF, VIEW_OF
from fxckpt.passes.transforms.rematerialize import Rematerialized
from fxckpt.torch_private import is_surely_equal, is_symbolic, storage_id


def save_views(
    joint: fx.GraphModule,
    result: Rematerialized,
    *,
    is_extern_kernel: Callable[[fx.Node], bool] = is_extern_kernel,
) -> Rematerialized:
    """Return what the forward must save, a view taken for what a loop makes where the backward's library calls alone read it, and as that."""
    nodes = {node.name: node for node in joint.graph.nodes}
    place = {node: i for i, node in enumerate(joint.graph.nodes)}
    saved = set()
    for value in result.saved:
        views = [] if is_extern_kernel(value) else list(_read_as(value, nodes))
        if views and all(is_extern_kernel(user) for user in views[-1][0].users):
            _take(value, views)
            value = views[-1][1]
        saved.add(value)
    return Rematerialized(tuple(sorted(saved, key=place.__getitem__)), result.symbolic)


def _take(value: fx.Node, views: Sequence[tuple[fx.Node, fx.Node]]) -> None:
    """Let the backward read the forward's view in place of its own."""
    again, view = views[-1]
    again.replace_all_uses_with(view)
    for each, _ in reversed(views):
        each.graph.erase_node(each)
    view.meta[VIEW_OF] = value.name


def _read_as(value: fx.Node, nodes: Mapping[str, fx.Node]) -> Iterator[tuple[fx.Node, fx.Node]]:
    """Yield the views through which alone the backward reads a value, each shown by the next: the backward's own and the forward's."""
    shown = again = value
    while True:
        readers = [
            user
            for user in again.users
            if user.op == "output" or user.meta.get("partitioner_tag") == "must_be_in_backward"
        ]
        name = str(readers[0].meta.get(RECOMPUTE_OF)) if len(readers) == 1 else ""
        if name not in nodes or readers[0].meta.get(IS_RECOMPUTE) or not _shows(nodes[name], shown):
            return
        again, shown = readers[0], nodes[name]
        yield again, shown


def _shows(view: fx.Node, value: fx.Node) -> bool:
    """Return whether a node of the forward is a value in another shape, all of it, and made from nothing else."""
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
