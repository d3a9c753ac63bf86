"""Recompute rules: why an op may not be recomputed, and whether its value may be saved."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, fx
from torch.utils.checkpoint import CheckpointPolicy

from fxckpt.passes.analysis.placement import JointPlacement
from fxckpt.passes.analysis.recompute_rules import PREFERENCE, NodePolicy, RecomputeRules
from fxckpt.reason import Reason
from tests.passes.graphs import traced


def example(primals: Tensor, tangents: Tensor) -> tuple[Tensor, Tensor]:
    hidden = primals.sin()
    chosen = hidden.argmax() + torch.rand(4).add_(1)
    return hidden.exp() + chosen, tangents * chosen.neg()


def joint() -> tuple[fx.Graph, dict[str, fx.Node]]:
    graph = traced(example, torch.ones(4), torch.ones(4)).graph
    nodes = {node.name: node for node in graph.nodes}
    # torch 2.11 traces no call with a generator.
    nodes["rand"].target = torch.ops.aten.rand.generator
    nodes["rand"].update_kwarg("generator", torch.Generator())
    return graph, nodes


def rules(
    graph: fx.Graph, policy: NodePolicy | None = None, *, bind_preferences: bool = False
) -> RecomputeRules:
    placement = JointPlacement.of(graph, 1)
    return RecomputeRules(graph, placement, policy, bind_preferences=bind_preferences)


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("sin", None),
        ("argmax", Reason.DECISION),
        ("rand", Reason.RANDOM_WITHOUT_STATE),
        ("add_", Reason.EFFECT),
    ],
)
def test_reasons_without_a_policy(name: str, reason: Reason | None) -> None:
    """Effects, draws from a generator of the user's, and choices are not recomputed."""
    graph, nodes = joint()
    assert rules(graph).rule_for(nodes[name], reads_are_savable=True) == (reason, True)


@pytest.mark.parametrize(
    ("answer", "binds", "expected"),
    [
        (CheckpointPolicy.MUST_SAVE, False, (Reason.POLICY, True)),
        (CheckpointPolicy.PREFER_SAVE, True, (None, True)),
        (CheckpointPolicy.PREFER_RECOMPUTE, False, (None, True)),
        (CheckpointPolicy.PREFER_RECOMPUTE, True, (None, False)),
        (CheckpointPolicy.MUST_RECOMPUTE, False, (None, False)),
    ],
)
def test_policy_decides(
    answer: CheckpointPolicy, binds: bool, expected: tuple[Reason | None, bool]
) -> None:
    """Preferences bind only without a budget."""
    graph, nodes = joint()
    found = rules(graph, lambda node: answer, bind_preferences=binds)
    assert found.rule_for(nodes["sin"], reads_are_savable=True) == expected
    assert (nodes["sin"] in found.requested) == (answer is CheckpointPolicy.MUST_RECOMPUTE)


def test_demand_overrides_a_choice_but_no_effect() -> None:
    """A policy may recompute an ``argmax``; nothing may recompute a write."""
    graph, nodes = joint()
    found = rules(graph, lambda node: CheckpointPolicy.MUST_RECOMPUTE)
    assert found.rule_for(nodes["argmax"], reads_are_savable=True) == (None, False)
    assert found.rule_for(nodes["add_"], reads_are_savable=True) == (Reason.EFFECT, True)


def test_region_saves_only_what_leaves_it() -> None:
    """A region's value may be saved if an op outside of it reads the value in the forward."""
    graph, nodes = joint()
    for name in ("sin", "exp"):
        nodes[name].meta |= {"recompute": CheckpointPolicy.MUST_RECOMPUTE, "ac_graph_id": 1}
    found = rules(graph)
    assert found.rule_for(nodes["sin"], reads_are_savable=True) == (None, True)
    nodes["argmax"].meta["ac_graph_id"] = 1
    assert found.rule_for(nodes["sin"], reads_are_savable=True) == (None, False)


def test_backward_only_value_follows_its_operands() -> None:
    """A value that only the backward needs is no substitute for operands that may not be saved."""
    graph, nodes = joint()
    found = rules(graph)
    assert found.rule_for(nodes["neg"], reads_are_savable=True) == (None, True)
    assert found.rule_for(nodes["neg"], reads_are_savable=False) == (None, False)


def test_preference_settles_ties() -> None:
    """Within a budget a preference changes an op's time by a thousandth."""
    graph, nodes = joint()
    for answer, sign in (
        (CheckpointPolicy.PREFER_SAVE, 1),
        (CheckpointPolicy.PREFER_RECOMPUTE, -1),
        (CheckpointPolicy.MUST_SAVE, 0),
    ):
        found = rules(graph, lambda node, answer=answer: answer)
        assert found.time_factor(nodes["sin"]) == 1 + sign * PREFERENCE


def communicating(primals: Tensor, tangents: Tensor) -> tuple[Tensor, Tensor]:
    functional = torch.ops._c10d_functional
    shard = functional.wait_tensor(functional.all_gather_into_tensor(primals.half(), 2, "0"))
    hidden = shard.float().sin()
    reduced = functional.wait_tensor(functional.all_reduce(hidden, "sum", "0"))
    return reduced.exp(), tangents * shard.sum() * reduced.sum()


def test_gathers_of_inputs_are_chosen_together() -> None:
    """Ranks with one plan may gather an input again, and wait for it; an activation's is once."""
    graph = traced(communicating, torch.ones(4), torch.ones(8)).graph
    gather, wait, reduce, wait_1 = (n for n in graph.nodes if "c10d" in str(n.target))
    placement = JointPlacement.of(graph, 1)
    once, open_ = (Reason.COLLECTIVE, True), (None, True)
    for is_agreed, expected in ((False, once), (True, open_)):
        asked = RecomputeRules(graph, placement, None, bind_preferences=False, is_agreed=is_agreed)
        for node, answer in ((gather, expected), (wait, expected), (reduce, once), (wait_1, once)):
            assert asked.rule_for(node, reads_are_savable=True) == answer, node


@pytest.mark.parametrize(
    "tag", [CheckpointPolicy.PREFER_RECOMPUTE, CheckpointPolicy.MUST_RECOMPUTE]
)
def test_regions_bind_collectives(tag: CheckpointPolicy) -> None:
    """In a region of the model a collective runs again, with its wait, unless ranks may choose."""
    graph = traced(communicating, torch.ones(4), torch.ones(8)).graph
    placement = JointPlacement.of(graph, 1)
    nodes = [n for n in graph.nodes if "c10d" in str(n.target)]
    for node in graph.nodes:
        node.meta["recompute"], node.meta["ac_graph_id"] = tag, 1
    alone = RecomputeRules(graph, placement, None, bind_preferences=False)
    assert [alone.rule_for(n, reads_are_savable=True) for n in nodes] == [(None, False)] * 4
    together = RecomputeRules(graph, placement, None, bind_preferences=False, is_agreed=True)
    is_open = tag is CheckpointPolicy.PREFER_RECOMPUTE
    assert [together.rule_for(n, reads_are_savable=True) for n in nodes] == [(None, is_open)] * 4
    saved = rules(graph, lambda node: CheckpointPolicy.MUST_SAVE)
    assert saved.rule_for(nodes[0], reads_are_savable=True)[0] is Reason.COLLECTIVE
