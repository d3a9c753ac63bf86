"""Offload ops: saved values leave the device in the forward, and come back in the backward."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from expecttest import assert_expected_inline
from torch import Tensor, fx

from fxckpt.errors import OffloadMismatch
from fxckpt.passes.analysis.joint import Facts
from fxckpt.passes.transforms.offload_ops import arrived, insert_offload_ops, movable_storages
from fxckpt.passes.transforms.recompute_checks import checksum
from fxckpt.passes.transforms.rematerialize import Rematerialized, rematerialize
from fxckpt.plans.types import Offload, Plan
from tests.passes.graphs import facts_of, planned, text_of, traced

CPU = torch.device("cpu")


def layer(primals: Tensor, tangents: Tensor) -> tuple[Tensor, Tensor]:
    """Return ``x.sin().exp().exp()``, and a gradient that reads the sine late."""
    hidden = primals.sin()
    return hidden.exp().exp(), tangents.cos().sin() * hidden


def sending_the_sine(joint: fx.GraphModule) -> tuple[Facts, Plan, Rematerialized]:
    """Plan to save the sine, and to have it away from its last reader on until the product."""
    facts, plan = planned(joint, recomputes=False)
    nbytes = next(storage.bytes for storage in facts.program.storages if storage.name == "sin")
    plan = replace(plan, offloads=(Offload("sin", nbytes, 2, 3),))
    return facts, plan, rematerialize(joint, facts, plan, num_fwd_outputs=1)


def test_moves_a_value_of_a_layer() -> None:
    """It is sent once it is computed, freed after its last reader, and fetched for the next."""
    joint = traced(layer, torch.ones(4), torch.ones(4))
    facts, plan, result = sending_the_sine(joint)
    result = insert_offload_ops(joint, result, facts, plan, 7)
    assert [node.name for node in result.saved] == ["sin_sent"]
    assert_expected_inline(
        text_of(joint.graph),
        """\
primals_1: input
tangents_1: input
sin = sin(primals_1)
sin_send = send(sin, 7)
exp = exp(sin)
sin_sent = sent(sin_send, sin, 7)
exp_1 = exp(exp)
cos = cos(tangents_1)
sin_fetch = fetch(sin_sent, 7, device(type='cpu'))
sin_1 = sin(cos)
sin_fetched = fetched(sin_fetch, sin_sent, 7)
mul = mul(sin_1, sin_fetched)
return [exp_1, mul]""",
    )


def test_checks_what_comes_back() -> None:
    """Under ``exact`` the forward saves a checksum too, and the backward compares."""
    joint = traced(layer, torch.ones(4), torch.ones(4))
    facts, plan, result = sending_the_sine(joint)
    result = insert_offload_ops(joint, result, facts, plan, 7, exact=True)
    assert [node.name for node in result.saved] == ["sin_sent", "sin_sent_checksum"]
    value = torch.arange(4.0)
    assert arrived(value, checksum(value), "sin") is value
    with pytest.raises(OffloadMismatch, match="'sin' came back"):
        arrived(value + 1, checksum(value), "sin")


def test_without_offloads_nothing_is_rewritten() -> None:
    """A plan that sends nothing leaves the graph and the saved values alone."""
    joint = traced(layer, torch.ones(4), torch.ones(4))
    facts, plan = planned(joint, recomputes=False)
    result = rematerialize(joint, facts, plan, num_fwd_outputs=1)
    before = text_of(joint.graph)
    assert insert_offload_ops(joint, result, facts, plan, 7) is result
    assert text_of(joint.graph) == before


def test_outputs_and_inputs_are_not_movable() -> None:
    """The user holds forward outputs, and inputs are not the step's."""
    facts = facts_of(traced(layer, torch.ones(4), torch.ones(4)))
    names = {facts.program.storages[s].name for s in movable_storages(facts, CPU)}
    assert names == {"sin", "exp"}
    assert movable_storages(facts, torch.device("cuda", 0)) == frozenset()
