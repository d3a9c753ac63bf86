"""Gradient copies: make the copies of gradients in a parameter's layout last.

Autograd copies a gradient that has another layout than its parameter when the backward has run.
Compiled autograd traces the copy right behind the op that made the gradient, where activations may
still be in memory. A gradient that shows an input which the graph writes, as an optimizer in a hook
does, is copied where it was.

Expects the functional graph of a whole backward. Leaves the same ops, in another order.
"""

from __future__ import annotations

import torch
from torch import fx

from fxckpt.ops.properties import is_mutating
from fxckpt.passes.analysis.placement import written_storages
from fxckpt.passes.analysis.storage_table import held_storages

COPY = torch.ops.aten.copy.default
EMPTY = torch.ops.aten.new_empty_strided.default


def delay_gradient_copies(graph: fx.Graph) -> None:
    """Move each copy into a new layout that only the output reads to the end; in place."""
    output, held = graph.output_node(), held_storages(graph)
    written = set(written_storages(node for node in graph.nodes if is_mutating(node)))
    for copy in graph.find_nodes(op="call_function", target=COPY):
        new = copy.args[0]
        is_new = new.op == "call_function" and new.target is EMPTY and list(new.users) == [copy]
        if is_new and list(copy.users) == [output] and written.isdisjoint(held[copy.args[1]]):
            output.prepend(new)
            output.prepend(copy)
