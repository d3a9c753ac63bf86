"""Bind sizes: bind each unbacked size (``nonzero``, ``unique``) once per graph, where it is found.

A mask that selects twice gives two values of one size. The trace lets the first reader of the mask
bind that size, and the second reuse it. An emitted graph drops, recomputes and reorders readers, so
that another one comes first, or one binds a second time; a compiler that follows sizes refuses
both.

Expects an emitted forward or backward. Leaves its ops alone, and rewrites the metadata of bindings.
"""

from __future__ import annotations

import torch
from torch import fx

from fxckpt.ops.properties import tensors
from fxckpt.torch_private import BINDINGS, OpOverload, bindings_of

INDEXING = frozenset(("index", "_unsafe_index"))
"""Ops that count the true elements of a mask."""

COUNTING = {
    "nonzero": "true",
    "_unique": "distinct",
    "_unique2": "distinct",
    "unique_dim": "distinct",
    "unique_consecutive": "distinct from the one before",
}
"""Properties that other ops count in their first argument."""


def bind_sizes(graph: fx.Graph) -> None:
    """Let the first op that finds a size of a tensor bind it, and no other op."""
    bound: set[tuple[str, fx.Node]] = set()
    for node in graph.nodes:
        counted = _counted_by(node)
        if counted is None:
            continue
        if counted in bound:
            node.meta.pop(BINDINGS, None)
        elif not node.meta.get(BINDINGS) and (bindings := bindings_of(node)):
            node.meta[BINDINGS] = bindings
        bound.add(counted)


def _counted_by(node: fx.Node) -> tuple[str, fx.Node] | None:
    """Return the property of elements that an op counts, and the tensor that it reads.

    Return None for an op that counts nothing, or in several tensors.
    """
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
    counted = COUNTING.get(name)
    return (counted, node.all_input_nodes[0]) if counted is not None else None
