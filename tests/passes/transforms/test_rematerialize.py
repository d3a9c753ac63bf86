"""Rematerialize: the backward computes what the plan recomputes."""

from __future__ import annotations

import torch
from expecttest import assert_expected_inline
from torch import Tensor

from fxckpt.passes.meta import IS_RECOMPUTE, NEVER_STORED, RECOMPUTE_OF
from fxckpt.passes.transforms.rematerialize import inlined_values, rematerialize
from tests.passes.graphs import chain, dropped, facts_of, planned, text_of, traced


def test_recomputes_a_chain() -> None:
    """Each recompute is a copy in front of the backward op that reads it."""
    joint = traced(chain, torch.ones(4), torch.ones(4))
    result = rematerialize(joint, *planned(joint), num_fwd_outputs=1)
    assert [node.name for node in result.saved] == ["primals_1"]
    assert_expected_inline(
        text_of(joint.graph),
        """\
primals_1: input
tangents_1: input
sin = sin(primals_1)
sin_1 = sin(sin)
cos = cos(sin)
sin_recompute = sin(primals_1)
cos_recompute = cos(sin_recompute)
mul = mul(tangents_1, cos_recompute)
cos_1 = cos(primals_1)
cos_1_recompute = cos(primals_1)
mul_1 = mul(mul, cos_1_recompute)
return [sin_1, mul_1]""",
    )


def test_saves_without_a_schedule() -> None:
    """A plan that recomputes nothing leaves the ops alone, and saves what the backward reads."""
    joint = traced(chain, torch.ones(4), torch.ones(4))
    before = text_of(joint.graph)
    result = rematerialize(joint, *planned(joint, recomputes=False), num_fwd_outputs=1)
    assert text_of(joint.graph) == before
    assert result.saved and result.symbolic == ()


def test_random_op_runs_under_its_state() -> None:
    """The forward returns the generator state; a copy of the view reads the recomputed mask."""
    joint = traced(dropped, torch.ones(2, 2), torch.ones(2, 2))
    result = rematerialize(joint, *planned(joint), num_fwd_outputs=1)
    assert [node.name for node in result.saved] == ["primals_1", "bernoulli_rng_state"]
    assert_expected_inline(
        text_of(joint.graph),
        """\
primals_1: input
tangents_1: input
bernoulli_and_state = run_and_save_rng_state(bernoulli, primals_1, 0.5)
bernoulli_rng_state = getitem(bernoulli_and_state, 0)
bernoulli = getitem(bernoulli_and_state, 1)
exp = exp(bernoulli)
t = t(bernoulli)
bernoulli_recompute = run_with_rng_state(bernoulli_rng_state, bernoulli, primals_1, 0.5)
t_recompute = t(bernoulli_recompute)
mul = mul(t_recompute, tangents_1)
return [exp, mul]""",
    )


def two_results(primals: Tensor, tangents: Tensor) -> tuple[Tensor, Tensor]:
    values, indices = torch.sort(primals)
    return values, tangents * values * torch.sin(indices)


def test_outputs_are_read_where_they_are() -> None:
    """A recompute for one result leaves the readers of another, an output, with the forward's."""
    joint = traced(two_results, torch.ones(4), torch.ones(4))
    rematerialize(joint, *planned(joint), num_fwd_outputs=1)
    assert_expected_inline(
        text_of(joint.graph),
        """\
primals_1: input
tangents_1: input
sort = sort(primals_1)
getitem = getitem(sort, 0)
getitem_1 = getitem(sort, 1)
mul = mul(tangents_1, getitem)
sin = sin(getitem_1)
sort_recompute = sort(primals_1)
getitem_1_recompute = getitem(sort_recompute, 1)
sin_recompute = sin(getitem_1_recompute)
mul_1 = mul(mul, sin_recompute)
return [getitem, mul_1]""",
    )


def test_copies_are_marked() -> None:
    """Copies name their originals; only copies of ops count as recomputes."""
    joint = traced(dropped, torch.ones(2, 2), torch.ones(2, 2))
    rematerialize(joint, *planned(joint), num_fwd_outputs=1)
    marks = {
        node.name: (node.meta[RECOMPUTE_OF], IS_RECOMPUTE in node.meta)
        for node in joint.graph.nodes
        if RECOMPUTE_OF in node.meta
    }
    assert marks == {"bernoulli_recompute": ("bernoulli", True), "t_recompute": ("t", False)}


def test_inlined_value_moves_to_its_readers() -> None:
    """A value of the backward that is never stored is computed in front of each reader."""

    def f(primals: Tensor, tangents: Tensor) -> tuple[Tensor, Tensor]:
        scaled = tangents * 2
        kept = tangents.exp()
        return primals.sin(), kept * scaled

    joint = traced(f, torch.ones(4), torch.ones(4))
    inlined = frozenset(node for node in joint.graph.nodes if node.name == "mul")
    facts = facts_of(joint, never_stored=inlined)
    assert inlined_values(joint.graph, facts) == inlined
    _, plan = planned(joint, recomputes=False)
    rematerialize(joint, facts, plan, num_fwd_outputs=1)
    assert [node.name for node in joint.graph.nodes if NEVER_STORED in node.meta] == ["mul_2"]
    assert_expected_inline(
        text_of(joint.graph),
        """\
primals_1: input
tangents_1: input
exp = exp(tangents_1)
sin = sin(primals_1)
mul_2 = mul(tangents_1, 2)
mul_1 = mul(exp, mul_2)
return [sin, mul_1]""",
    )
