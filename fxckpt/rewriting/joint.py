"""Joint graphs given by the user: AOTAutograd's form in, the same form with explicit recompute out."""

from __future__ import annotations

import copy
from typing import Any

from torch import fx
from torch.utils import _pytree as pytree

from fxckpt.budget import Budget
from fxckpt.costs.models import CostModel
from fxckpt.errors import CaptureError
from fxckpt.passes.graphs import Joint
from fxckpt.planner.pipeline import Emission, emit_halves, prepare
from fxckpt.planner.planner import planner_of
from fxckpt.plans.types import Plan
from fxckpt.rewriting.graph_pickle import Packed, pack, unpack

PLAN, FORWARD, BACKWARD, SOURCE = (
    "fxckpt_plan",
    "fxckpt_forward",
    "fxckpt_backward",
    "fxckpt_source",
)
"""Metadata of a rewritten joint graph."""


def is_joint(graph: fx.Graph) -> bool:
    """Return whether a graph is a joint one: its inputs are ``primals_*`` and ``tangents_*``."""
    targets = [str(node.target) for node in graph.find_nodes(op="placeholder")]
    return any(t.startswith("primals") for t in targets) and any(
        t.startswith("tangents") for t in targets
    )


class RewrittenJoint(fx.GraphModule):
    """A joint graph whose recompute is explicit. Runs as any graph does; what it knows beside is in its ``meta``, which copies and pickles keep."""

    @property
    def plan(self) -> Plan:
        """The plan that the graph follows."""
        plan: Plan = self.meta[PLAN]
        return plan

    @property
    def forward_graph(self) -> fx.GraphModule:
        """The forward half: its last outputs are what is saved for the backward."""
        half: fx.GraphModule = self.meta[FORWARD]
        return half

    @property
    def backward_graph(self) -> fx.GraphModule:
        """The backward half: what runs again is named after what it repeats."""
        half: fx.GraphModule = self.meta[BACKWARD]
        return half

    @property
    def source(self) -> fx.GraphModule:
        """The graph that was rewritten."""
        source: fx.GraphModule = self.meta[SOURCE]
        return source

    def __reduce__(self) -> tuple[Any, ...]:
        return (
            _unpickled,
            (
                pack(self),
                self.plan,
                *map(pack, (self.forward_graph, self.backward_graph, self.source)),
            ),
        )


def _unpickled(joint: Packed, plan: Plan, *others: Packed) -> RewrittenJoint:
    plain = unpack(joint)
    assert isinstance(plain, fx.GraphModule)
    made = RewrittenJoint(plain, plain.graph)
    made.meta |= dict(
        zip((PLAN, FORWARD, BACKWARD, SOURCE), (plan, *map(unpack, others)), strict=True)
    )
    return made


def rewrite_joint(
    gm: fx.GraphModule, policy: Any, *, budget: Budget, cost: str | CostModel
) -> fx.GraphModule:
    """Return a joint graph with explicit recompute; ``gm`` is left alone. Raises :class:`CaptureError` for what is no joint graph."""
    if PLAN in gm.meta:
        if policy is None and budget is None:
            return gm
        gm = gm.meta[SOURCE]
    joint = RewrittenJoint(gm, copy.deepcopy(gm.graph))
    num_fwd_outputs, spec = flatten_outputs(joint.graph)
    given = prepare(Joint(joint, num_fwd_outputs))
    facts, plan = planner_of(budget, policy, cost).plan(given)
    forward, backward = emit_halves(Emission(given, facts, plan))
    (output,) = joint.graph.find_nodes(op="output")
    output.args = (pytree.tree_unflatten(list(output.args[0]), spec),)
    joint.graph.lint()
    joint.recompile()
    joint.meta |= {PLAN: plan, FORWARD: forward, BACKWARD: backward, SOURCE: gm}
    return joint


def flatten_outputs(graph: fx.Graph) -> tuple[int, pytree.TreeSpec]:
    """Make a joint graph's outputs one flat list; return how many belong to the forward, and the structure they had.

    They are two lists, the forward's outputs and the gradients; or one, in which the gradients, one a primal, come last.
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
            f"the joint graph has {len(primals)} primals and {len(flat)} outputs: it should give its forward outputs and then a gradient (or None) "
            "for every primal, as AOTAutograd has it, or the two as a pair of lists."
        )
    output.args = (flat,)
    return count, spec
