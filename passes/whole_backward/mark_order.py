"""Order: mark the position of each node of a whole backward.

The ops of its planned parts have lost the marks of
:mod:`~fxckpt.passes.inductor.execution_order`. What depends on the incoming gradient is the
backward's own; all else recomputes.
"""

from __future__ import annotations

from torch import fx

from fxckpt.passes.meta import ORDER


def mark_whole_backward(whole: fx.Graph) -> None:
    """Set :data:`~fxckpt.passes.meta.ORDER` on each op of a whole backward.

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
