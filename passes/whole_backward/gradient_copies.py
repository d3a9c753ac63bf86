"""Gradient copies: make the copies of gradients in a parameter's layout last.

Autograd copies a gradient that has another layout than its parameter when the backward has run.
Compiled autograd traces the copy right behind the op that made the gradient, where activations may
still be in memory.

Expects the functional graph of a whole backward. Leaves the same ops, in another order.
"""

from __future__ import annotations

import torch
from torch import fx

COPY = torch.ops.aten.copy.default
EMPTY = torch.ops.aten.new_empty_strided.default


def delay_gradient_copies(graph: fx.Graph) -> None:
    """Move each copy into a new layout that only the output reads to the end; in place."""
    output = graph.output_node()
    for copy in graph.find_nodes(op="call_function", target=COPY):
        new = copy.args[0]
        is_new = new.op == "call_function" and new.target is EMPTY and list(new.users) == [copy]
        if is_new and list(copy.users) == [output]:
            output.prepend(new)
            output.prepend(copy)
