"""torch's default partitioner on a captured joint graph, evaluated like fxckpt's plans."""

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
class Figures:
    """The peak and the time of a forward graph followed by its backward graph."""

    peak_bytes: int
    """Peak of the two graphs, run one after the other."""
    seconds: float
    """Time of all their ops."""


def evaluate(
    forward: fx.GraphModule,
    backward: fx.GraphModule,
    cost: CostModel,
    *,
    num_fwd_outputs: int,
    with_gradients: bool = True,
) -> Figures:
    """Return the peak and the time of two graphs, read from the graphs alone.

    ``with_gradients=False`` leaves the storages that the backward returns out of the peak.
    """
    seconds = sum(
        cost.seconds(n) for g in (forward, backward) for n in g.graph.nodes if allocates(n)
    )
    uncounted = frozenset[str]() if with_gradients else returned_nodes(backward)
    return Figures(
        emitted_peak(forward, backward, num_fwd_outputs=num_fwd_outputs, uncounted=uncounted),
        seconds,
    )


def returned_nodes(backward: fx.GraphModule) -> frozenset[str]:
    """Return the names of the nodes whose values alias a storage that the backward returns."""
    (output,) = backward.graph.find_nodes(op="output")
    ids = {storage_id(t) for arg in output.all_input_nodes for t in tensors(arg.meta.get("val"))}
    return frozenset(
        n.name
        for n in backward.graph.nodes
        if any(storage_id(t) in ids for t in tensors(n.meta.get("val")))
    )


def allocates(node: fx.Node) -> bool:
    """Return whether a node is an op with an output storage of its own, rather than a view."""
    if node.op != "call_function" or node.target is operator.getitem:
        return False
    inputs = {storage_id(t) for arg in node.all_input_nodes for t in tensors(arg.meta.get("val"))}
    return any(storage_id(t) not in inputs for t in tensors(node.meta.get("val")))


def torch_partition(
    joint: fx.GraphModule, budget: float, *, num_fwd_outputs: int
) -> tuple[fx.GraphModule, fx.GraphModule]:
    """Return torch's forward and backward at an ``activation_memory_budget``.

    The joint graph is copied first, so ``joint`` does not change.
    """
    from torch._functorch import config
    from torch._functorch.partitioners import min_cut_rematerialization_partition

    with config.patch(activation_memory_budget=budget):
        forward, backward = min_cut_rematerialization_partition(
            copy.deepcopy(joint), None, num_fwd_outputs=num_fwd_outputs
        )
    return forward, backward
