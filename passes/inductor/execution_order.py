"""Execution order: mark the position of each node of an emitted half.

The planned peak assumes the order in which the half was emitted, with a recomputation right before
its first reader, and a value that is sent away let go after its last. A compiler that schedules on
its own has no reason to wait. The mark is the number of the half's own nodes before a node, and
whether the node recomputes.
"""

from __future__ import annotations

from torch import fx

from fxckpt.passes.meta import ORDER, RECOMPUTE_OF


def mark_execution_order(half: fx.Graph) -> None:
    """Set :data:`~fxckpt.passes.meta.ORDER` on each op of a half."""
    before = 0
    for node in half.nodes:
        if node.op == "call_function":
            is_recompute = RECOMPUTE_OF in node.meta
            node.meta[ORDER] = (before, is_recompute)
            before += not is_recompute
