"""Order: mark each node of an emitted backward with its place, so that a scheduler can be held to it.

The plan's peak is that of the order in which the backward was emitted: what runs again runs right in front of what needs it. A compiler that
schedules anew sees no reason to wait. The mark is a number and a flag: how many of the backward's own nodes come before, and whether the node runs
something again.
"""

from __future__ import annotations

from torch import fx

from fxckpt.passes.meta import ORDER, RECOMPUTE_OF


def mark_execution_order(backward: fx.GraphModule) -> None:
    """Mark the nodes."""
    before = 0
    for node in backward.graph.nodes:
        if node.op == "call_function":
            again = RECOMPUTE_OF in node.meta
            node.meta[ORDER] = (before, again)
            before += not again
