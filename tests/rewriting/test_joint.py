"""Joint graphs with explicit recompute."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import fx, nn
from torch.utils import _pytree as pytree

import fxckpt
from fxckpt import policies
from fxckpt.planner.capture import capture_joint
from fxckpt.torch_private import aot_autograd, boxed
from tests.rewriting.sources import GPT
from tests.steps import differing, outcome


def test_joint_graph_gets_explicit_recompute() -> None:
    """A rewritten joint graph recomputes explicitly, equals the original, and can be copied."""
    model, x = (
        nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8), nn.GELU()),
        torch.randn(4, 8),
    )
    joint = capture_joint(model, (x,), {}).module
    before = joint.code
    made = fxckpt.rewrite(joint, policies.recompute_all)
    assert joint.code == before
    assert made.plan.recomputed == ("addmm", "tanh", "addmm_1")
    values = [torch.randn(n.meta["val"].shape) for n in joint.graph.find_nodes(op="placeholder")]
    expected, got = (pytree.tree_leaves(gm(values[:-1], values[-1:])) for gm in (joint, made))
    assert all(torch.equal(a, b) for a, b in zip(expected, got, strict=True) if a is not None)
    assert sum(n.target is torch.ops.aten.addmm.default for n in made.graph.nodes) == 4
    assert fxckpt.rewrite(made) is made
    assert fxckpt.rewrite(made, made.plan).code == made.code
    for twin in (copy.deepcopy(made), pickle.loads(pickle.dumps(made))):
        assert (twin.code, twin.plan, twin.forward_graph.code) == (
            made.code,
            made.plan,
            made.forward_graph.code,
        )


def test_joint_halves_partition_for_aot_autograd() -> None:
    """The halves of a rewritten joint graph serve as AOTAutograd's partition."""
    model, x = GPT(2), torch.randint(0, 50, (4, 24))
    expected = outcome(model, model, (x,))
    model.zero_grad(set_to_none=True)
    plans = []

    def partition(joint: fx.GraphModule, joint_inputs: Any, **_: Any) -> Any:
        made = fxckpt.rewrite(joint, policies.save_matmuls)
        plans.append(made.plan)
        return made.forward_graph, made.backward_graph

    compiled = torch.compile(model, backend=aot_autograd(fw_compiler=boxed, partition_fn=partition))
    assert differing(expected, outcome(model, compiled, (x,))) == []
    assert plans[0].recomputed


def test_joint_gradients_must_match_primals() -> None:
    """A joint graph without a gradient per primal raises CaptureError."""
    graph = fx.Graph()
    primals = [graph.placeholder(f"primals_{i}") for i in range(3)]
    graph.placeholder("tangents_1")
    graph.output([primals[0]])
    with pytest.raises(fxckpt.CaptureError, match="3 primals and 1 outputs"):
        fxckpt.rewrite(fx.GraphModule(nn.Module(), graph))
