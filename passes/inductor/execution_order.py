"""Execution order: mark the position of each node of an emitted backward.

The planned peak assumes the order in which the backward was emitted, with a recomputation right
before its first reader. A compiler that schedules on its own has no reason to wait. The mark is the
number of the backward's own nodes before a node, and whether the node recomputes.
"""

from __future__ import annotations

from torch import fx

from fxckpt.passes.meta import ORDER, RECOMPUTE_OF


def mark_execution_order(backward: fx.Graph) -> None:
    """Set :data:`~fxckpt.passes.meta.ORDER` on each op of the backward."""
    before = 0
    for node in backward.nodes:
        if node.op == "call_function":
            is_recompute = RECOMPUTE_OF in node.meta
            node.meta[ORDER] = (before, is_recompute)
            before += not is_recompute
