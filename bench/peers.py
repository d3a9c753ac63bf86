"""Torch's own partitioner on a captured joint graph, judged as fxckpt's plans are."""

from __future__ import annotations

import copy
import operator
from dataclasses import dataclass

from torch import fx

from fxckpt.costs.models import CostModel
from fxckpt.ops.properties import tensors
from fxckpt.passes.analysis.graph_memory import emitted_peak
from fxckpt.torch_private import storage_id


@dataclass(frozen=True)
class Judged:
    """Peak bytes of two emitted graphs run one after the other, and the seconds of all their ops."""

    peak_bytes: int
    seconds: float


def judge(
    forward: fx.GraphModule,
    backward: fx.GraphModule,
    cost: CostModel,
    *,
    num_fwd_outputs: int,
    with_gradients: bool = True,
) -> Judged:
    """Return what a forward and a backward cost, read from the graphs alone; without the gradients they return if so asked."""
    seconds = sum(
        cost.seconds(n) for g in (forward, backward) for n in g.graph.nodes if allocates(n)
    )
    uncounted = frozenset[str]() if with_gradients else returned(backward)
    return Judged(
        emitted_peak(forward, backward, num_fwd_outputs=num_fwd_outputs, uncounted=uncounted),
        seconds,
    )


def returned(backward: fx.GraphModule) -> frozenset[str]:
    """Return the names of nodes that hold a storage the backward returns."""
    (output,) = backward.graph.find_nodes(op="output")
    ids = {storage_id(t) for arg in output.all_input_nodes for t in tensors(arg.meta.get("val"))}
    return frozenset(
        n.name
        for n in backward.graph.nodes
        if any(storage_id(t) in ids for t in tensors(n.meta.get("val")))
    )


def allocates(node: fx.Node) -> bool:
    """Return whether a node is an op that fills memory of its own; a view is free."""
    if node.op != "call_function" or node.target is operator.getitem:
        return False
    given = {storage_id(t) for arg in node.all_input_nodes for t in tensors(arg.meta.get("val"))}
    return any(storage_id(t) not in given for t in tensors(node.meta.get("val")))


def torch_partition(
    joint: fx.GraphModule, budget: float, *, num_fwd_outputs: int
) -> tuple[fx.GraphModule, fx.GraphModule]:
    """Return torch's forward and backward at an ``activation_memory_budget``; ``joint`` is left alone."""
    from torch._functorch import config
    from torch._functorch.partitioners import min_cut_rematerialization_partition

    with config.patch(activation_memory_budget=budget):
        forward, backward = min_cut_rematerialization_partition(
            copy.deepcopy(joint), None, num_fwd_outputs=num_fwd_outputs
        )
    return forward, backward
