"""Take names: calls of :func:`fxckpt.name` become metadata of the named values.

Expects a joint graph. Leaves one without calls of the op behind that function.
"""

from __future__ import annotations

from torch import fx

from fxckpt.ops.properties import is_known_pure, tensors
from fxckpt.passes.meta import NAME
from fxckpt.torch_private import name_op, storage_id


def take_names(graph: fx.Graph) -> None:
    """Turn calls of :func:`fxckpt.name` into metadata of the op or the input they name."""
    for node in graph.find_nodes(op="call_function", target=name_op):
        owner, label = _owner(node.args[0]), node.args[1]
        owner.meta[NAME] = tuple(dict.fromkeys((*owner.meta.get(NAME, ()), label)))
        graph.erase_node(node)


def _owner(node: fx.Node) -> fx.Node:
    """Return the op or input whose storage a value holds; the node itself if it is no view."""
    held = {storage_id(t) for t in tensors(node.meta.get("val"))}
    for arg in node.all_input_nodes if node.op == "call_function" and is_known_pure(node) else ():
        if any(storage_id(t) in held for t in tensors(arg.meta.get("val"))):
            return _owner(arg)
    return node
