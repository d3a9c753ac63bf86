"""Streams in joint graphs: annotations of nodes, and the ops that order streams.

With ``torch.cuda.stream`` in a model, Dynamo annotates the nodes of each stream, and records and
waits for events by ops that take no tensor. Since torch 2.13 AOTAutograd wraps each of these ops in
``control_deps``, which takes and returns values, so that no compiler moves an op across it.
"""

from __future__ import annotations

import operator
from typing import Any

from torch import fx
from torch._functorch._aot_autograd import streams


def stream_of(node: fx.Node) -> int | None:
    """Return the index of the stream that a node is annotated with; None for the current one."""
    found: int | None = streams.get_stream(node)
    return found


def unwrap_syncs(graph: fx.Graph) -> None:
    """Replace each ``control_deps`` by the op inside it; its readers read the original values.

    A planned backward reads values that the forward passed through such a call, and must not run
    the call again. The order of the graph's nodes still orders the streams.
    """
    module, nodes = graph.owning_module, list[Any](graph.nodes)
    for node in nodes:
        # By its text, as the import of the op would import Inductor.
        if node.op != "call_function" or str(node.target) != "control_deps":
            continue
        body = getattr(module, node.args[1].target)
        passed = dict(zip(body.graph.find_nodes(op="placeholder"), node.args[2:], strict=True))
        (op,) = (each for each in body.graph.nodes if each.op == "call_function")
        with graph.inserting_before(node):
            bare = graph.node_copy(op, passed.__getitem__)
        bare.meta = {**op.meta, **{k: v for k, v in node.meta.items() if k != "val"}}
        _read_originals(node, bare, op, passed, body.graph.output_node().args[0])
        graph.erase_node(node)
    for node in list(graph.find_nodes(op="get_attr")):
        if not node.users and str(node.target).startswith("subgraph_"):
            graph.erase_node(node)


def _read_originals(
    node: Any, bare: fx.Node, op: fx.Node, passed: dict[fx.Node, Any], outputs: Any
) -> None:
    """Let the readers of the results of ``control_deps`` read what they are results of."""
    results = outputs if isinstance(outputs, (tuple, list)) else (outputs,)
    for user in list(node.users):
        if user.target is operator.getitem and user.args[0] is node:
            result = results[user.args[1]]
            user.replace_all_uses_with(bare if result is op else passed[result])
            graph = user.graph
            graph.erase_node(user)
        else:  # The order of a later call, which it keeps as the later node of the graph.
            user.args = (tuple(a for a in user.args[0] if a is not node), *user.args[1:])


def wrap_syncs(graph: fx.Graph) -> None:
    """Wrap the ops of a half that order streams, as AOTAutograd wraps those of a joint graph."""
    # New in torch 2.13. Before, the ops are not wrapped in the joint graph either.
    wrap = getattr(streams, "wrap_all_sync_nodes_with_control_deps", None)
    if wrap is not None and any(_is_sync(node) for node in graph.nodes):
        wrap(graph.owning_module)


def _is_sync(node: fx.Node) -> bool:
    return node.op == "call_function" and str(node.target).startswith("streams.")
