"""Partition: split a rematerialized joint graph into forward and backward.

The calling convention between the halves (sizes last, version checks, tangents) is AOTAutograd's
own.

Expects a graph in which every node is bound to its half. Leaves two graphs; the joint one is used
up.
"""

from __future__ import annotations

from torch import fx

from fxckpt.ops.properties import tensors
from fxckpt.passes.analysis.placement import graph_outputs
from fxckpt.passes.transforms.rematerialize import Rematerialized
from fxckpt.torch_private import extract_halves, let_autograd_own, storage_id


def partition(
    joint: fx.GraphModule, result: Rematerialized, *, num_fwd_outputs: int
) -> tuple[fx.GraphModule, fx.GraphModule]:
    """Return the forward and the backward graph."""
    shared = _shared_storages(joint.graph, num_fwd_outputs)
    for node in result.saved:
        if shared.isdisjoint(_storages(node)):
            let_autograd_own(node)
    return extract_halves(joint, result.saved, result.symbolic, num_fwd_outputs=num_fwd_outputs)


def _shared_storages(graph: fx.Graph, num_fwd_outputs: int) -> set[int]:
    """Return the storages that outside code can write: those of inputs and of forward outputs."""
    outputs = (n for n in graph_outputs(graph)[:num_fwd_outputs] if isinstance(n, fx.Node))
    return {sid for n in (*graph.find_nodes(op="placeholder"), *outputs) for sid in _storages(n)}


def _storages(node: fx.Node) -> set[int]:
    return {storage_id(t) for t in tensors(node.meta.get("val"))}
