"""Execution order: mark the position of each node of an emitted backward.

The planned peak assumes the order in which the backward was emitted, with a recomputation right
before its first reader. A compiler that schedules on its own has no reason to wait. The mark is the
number of the backward's own nodes before a node, and whether the node recomputes.

Compiled autograd traces backwards into a graph without these marks. There, what depends on the
incoming gradient is the backward's own, and all else recomputes.
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


def mark_compiled_backward(whole: fx.Graph) -> None:
    """Set :data:`~fxckpt.passes.meta.ORDER` on each op of a graph that compiled autograd made.

    Its first input is the gradient that the backward starts from. With several, what depends on
    the others alone is held to its place like a recomputation, which costs fusions, not memory.
    """
    own = set(whole.find_nodes(op="placeholder")[:1])
    before = 0
    for node in whole.nodes:
        if node.op == "call_function":
            is_own = not own.isdisjoint(node.all_input_nodes)
            node.meta[ORDER] = (before, not is_own)
            before += is_own
            if is_own:
                own.add(node)
