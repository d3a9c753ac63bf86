"""Plans are never worse than torch's default partitioner, in peak or time, on the same graph."""

from __future__ import annotations

import copy
import operator

import pytest
from torch import fx
from torch._functorch.partitioners import min_cut_rematerialization_partition

from fxckpt.costs.roofline import GENERIC_GPU
from fxckpt.ops.properties import tensors
from fxckpt.passes.analysis.graph_memory import emitted_peak
from fxckpt.planner.capture import Joint, capture_joint
from fxckpt.planner.planner import Planner
from fxckpt.torch_private import storage_id
from tests.joints import normalize
from tests.models.zoo import ENTRIES


def seconds(graphs: tuple[fx.GraphModule, ...]) -> float:
    """The time of all ops that fill memory of their own."""
    return sum(
        GENERIC_GPU.seconds(n)
        for g in graphs
        for n in g.graph.nodes
        if n.op == "call_function" and allocates(n)
    )


def allocates(node: fx.Node) -> bool:
    given = {storage_id(t) for arg in node.all_input_nodes for t in tensors(arg.meta.get("val"))}
    return node.target is not operator.getitem and any(
        storage_id(t) not in given for t in tensors(node.meta.get("val"))
    )


def captured(name: str) -> Joint:
    model, inputs = next(e for e in ENTRIES if e.name == name).make()
    joint = capture_joint(model.train(), inputs, {})
    normalize(joint.module)
    return joint


@pytest.mark.parametrize("name", ["gpt2", "resnet", pytest.param("llama", marks=pytest.mark.sweep)])
def test_no_slower_than_default_partitioner(name: str) -> None:
    """A plan at the peak of torch's default partitioner is no slower."""
    joint = captured(name)
    theirs = min_cut_rematerialization_partition(
        copy.deepcopy(joint.module), None, num_fwd_outputs=joint.num_fwd_outputs
    )
    peak = emitted_peak(*theirs, num_fwd_outputs=joint.num_fwd_outputs)
    planner = Planner(peak, None, GENERIC_GPU, measure_workspace=False)
    _, plan = planner.plan(joint)
    assert plan.peak_bytes <= peak
    assert plan.recompute_seconds <= seconds(theirs) - seconds((joint.module,)) + 1e-12
