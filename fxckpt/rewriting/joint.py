"""Rewriting of joint graphs in AOTAutograd's form: the same form, with explicit recompute."""

from __future__ import annotations

import copy
from typing import Any

from torch import fx
from torch.utils import _pytree as pytree

from fxckpt.budgets import Budget
from fxckpt.costs.models import CostModel
from fxckpt.errors import CaptureError
from fxckpt.passes.graphs import Joint
from fxckpt.planner.pipeline import emit_halves, prepare
from fxckpt.planner.planner import planner_of
from fxckpt.plans.types import Plan
from fxckpt.rewriting.graph_pickle import Packed, pack_module, unpack_module
from fxckpt.tiers import Tier
from fxckpt.tiers.ops import renumber

PLAN, FORWARD, BACKWARD, SOURCE, TIER = (
    "fxckpt_plan",
    "fxckpt_forward",
    "fxckpt_backward",
    "fxckpt_source",
    "fxckpt_tier",
)
"""Keys of ``GraphModule.meta`` of a rewritten joint graph."""


def is_joint(graph: fx.Graph) -> bool:
    """Return whether a graph has placeholders ``primals_*`` and ``tangents_*``."""
    targets = [str(node.target) for node in graph.find_nodes(op="placeholder")]
    return any(t.startswith("primals") for t in targets) and any(
        t.startswith("tangents") for t in targets
    )


class RewrittenJoint(fx.GraphModule):
    """A joint graph with explicit recompute.

    Its plan, halves and source, and the tier that it sends values to, are in its ``meta``, which
    copies and pickles keep.
    """

    @property
    def plan(self) -> Plan:
        """The plan that the graph follows."""
        plan: Plan = self.meta[PLAN]
        return plan

    @property
    def forward_graph(self) -> fx.GraphModule:
        """The forward half, whose last outputs are the values saved for the backward."""
        half: fx.GraphModule = self.meta[FORWARD]
        return half

    @property
    def backward_graph(self) -> fx.GraphModule:
        """The backward half, whose recomputed nodes are named after their originals."""
        half: fx.GraphModule = self.meta[BACKWARD]
        return half

    @property
    def source(self) -> fx.GraphModule:
        """The original joint graph."""
        source: fx.GraphModule = self.meta[SOURCE]
        return source

    def __reduce__(self) -> tuple[Any, ...]:
        return (
            _unpickled,
            (
                pack_module(self),
                self.plan,
                self.meta[TIER],
                *map(pack_module, (self.forward_graph, self.backward_graph, self.source)),
            ),
        )


def _unpickled(joint: Packed, plan: Plan, tier: Tier | None, *others: Packed) -> RewrittenJoint:
    plain, *halves = (unpack_module(each) for each in (joint, *others))
    assert isinstance(plain, fx.GraphModule)
    made = RewrittenJoint(plain, plain.graph)
    for each in (made, *halves):
        if tier is not None and isinstance(each, fx.GraphModule):
            renumber(each.graph, tier)
            each.recompile()
    parts = (plan, tier, *halves)
    made.meta |= dict(zip((PLAN, TIER, FORWARD, BACKWARD, SOURCE), parts, strict=True))
    return made


def rewrite_joint(
    gm: fx.GraphModule,
    policy: Any,
    *,
    budget: Budget,
    cost: str | CostModel,
    offload: Tier | None,
) -> fx.GraphModule:
    """Return a joint graph with explicit recompute; ``gm`` is not changed.

    Raises :class:`CaptureError` if the outputs do not match the primals.
    """
    if PLAN in gm.meta:
        if policy is None and budget is None:
            return gm
        gm = gm.meta[SOURCE]
    joint = RewrittenJoint(gm, copy.deepcopy(gm.graph))
    num_fwd_outputs, spec = flatten_outputs(joint.graph)
    given = prepare(Joint(joint, num_fwd_outputs))
    planner = planner_of(budget, policy, cost, offload=offload)
    facts, plan = planner.plan(given)
    forward, backward = emit_halves(planner.emission(given, facts, plan))
    (output,) = joint.graph.find_nodes(op="output")
    output.args = (pytree.tree_unflatten(list(output.args[0]), spec),)
    joint.graph.lint()
    joint.recompile()
    joint.meta |= {PLAN: plan, TIER: offload, FORWARD: forward, BACKWARD: backward, SOURCE: gm}
    return joint


def flatten_outputs(graph: fx.Graph) -> tuple[int, pytree.TreeSpec]:
    """Flatten a joint graph's outputs in place; return the number of forward outputs and the spec.

    The outputs are two lists, the forward's outputs and the gradients, or one list that ends with
    one gradient per primal.
    """
    (output,) = graph.find_nodes(op="output")
    outputs = output.args[0]
    flat, spec = pytree.tree_flatten(outputs)
    is_pair = (
        isinstance(outputs, (list, tuple))
        and len(outputs) == 2
        and all(isinstance(part, (list, tuple)) for part in outputs)
    )
    primals = [
        node
        for node in graph.find_nodes(op="placeholder")
        if str(node.target).startswith("primals")
    ]
    count = len(pytree.tree_leaves(outputs[0])) if is_pair else len(flat) - len(primals)
    if count < 0:
        raise CaptureError(
            f"the joint graph has {len(primals)} primals and {len(flat)} outputs: it should give "
            "its forward outputs and then a gradient (or None) for every primal, as AOTAutograd "
            "has it, or the two as a pair of lists."
        )
    output.args = (flat,)
    return count, spec
