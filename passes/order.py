"""Order: mark each node of an emitted backward with its place, so that a scheduler can be held to it.

The plan's peak is that of the order in which the backward was emitted: what runs again runs right in front of what needs it. A compiler that
schedules anew sees no reason to wait. The mark is a number and a flag: how many of the backward's own nodes come before, and whether the node runs
something again.
"""

from __future__ import annotations

import operator

from torch import fx

from fxckpt.passes.rematerialize import RECOMPUTE_OF

ORDER = "fxckpt_order"
"""Metadata of a node of the backward: ``(own nodes before it, whether it runs something again)``."""


def mark_order(backward: fx.GraphModule) -> None:
    """Mark the nodes."""
    before = 0
    for node in backward.graph.nodes:
        if node.op == "call_function":
            again = RECOMPUTE_OF in node.meta
            node.meta[ORDER] = (before, again)
            before += not again


def beginning(backward: fx.GraphModule, name: str) -> tuple[fx.GraphModule, frozenset[str]]:
    """Return a marked backward up to the node called ``name``, and the names of the inputs that the rest reads.

    It returns what the rest reads. A backward without a rest is returned as it is.
    """
    last = backward.graph.output_node()
    end = next((n.meta[ORDER] for n in backward.graph.nodes if n.name == name and ORDER in n.meta), None)
    if end is None:
        return backward, frozenset()
    kept: set[fx.Node] = set()
    for node in backward.graph.nodes:
        # A tuple leaves a graph as its items.
        is_item = node.target is operator.getitem and node.args[0] in kept
        if node.op == "placeholder" or node.op == "get_attr" or (node.op == "call_function" and (is_item or node.meta[ORDER][0] <= end[0])):
            kept.add(node)
    if all(user in kept or user is last for n in kept for user in n.users):
        return backward, frozenset()
    graph, copies = fx.Graph(), dict[fx.Node, fx.Node]()
    for node in backward.graph.nodes:
        if node in kept:
            copies[node] = graph.node_copy(node, copies.__getitem__)
    outer = [n for n in kept if any(user not in kept for user in n.users)]
    returned = graph.output(tuple(copies[n] for n in copies if n in outer and n.op == "call_function"))
    returned.meta = dict(last.meta)
    return fx.GraphModule(backward, graph), frozenset(n.name for n in outer if n.op == "placeholder")
