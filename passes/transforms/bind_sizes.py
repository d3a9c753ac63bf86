"""Bind sizes: what is found by looking at numbers (how many are true, how many differ) is bound once in each graph, by the first op that looks.

A mask that selects twice gives two values of one size, which the trace lets its first reader bind; the second finds it known. In a graph where
readers were left out, run again or put in another order, the first is another one, or binds a second time: a compiler that follows sizes
refuses both. Expects an emitted forward or backward. Leaves its ops alone, and says anew which of them bind.
"""

from __future__ import annotations

import torch
from torch import fx

from fxckpt.ops.properties import tensors
from fxckpt.torch_private import BINDINGS, OpOverload, bindings_of

INDEXING = frozenset(("index", "_unsafe_index"))
UNIQUE = frozenset(("_unique", "_unique2", "unique_dim"))


def bind_sizes(graph: fx.Graph) -> None:
    """Let the first that looks at a tensor for a size bind it, and no other."""
    looked: set[tuple[str, fx.Node]] = set()
    for node in graph.nodes:
        found = _looked_at(node)
        if found is None:
            continue
        if found in looked:
            node.meta.pop(BINDINGS, None)
        elif not node.meta.get(BINDINGS) and (bindings := bindings_of(node)):
            node.meta[BINDINGS] = bindings
        looked.add(found)


def _looked_at(node: fx.Node) -> tuple[str, fx.Node] | None:
    """Return what an op looks for, and the tensor; None for an op that does not, or looks at several."""
    op = node.target
    name = op._opname if isinstance(op, OpOverload) and op.namespace == "aten" else ""
    if name in INDEXING:
        indices = [i for i in node.args[1] if isinstance(i, fx.Node)]  # type: ignore[union-attr]
        masks = [
            i
            for i in indices
            if any(t.dtype in (torch.bool, torch.uint8) for t in tensors(i.meta.get("val")))
        ]
        return ("true", masks[0]) if len(masks) == 1 else None
    what = (
        "true"
        if name == "nonzero"
        else "different"
        if name in UNIQUE
        else "next"
        if name == "unique_consecutive"
        else None
    )
    return (what, node.all_input_nodes[0]) if what is not None else None
