"""Partition: a rematerialized joint graph becomes two graphs."""

from __future__ import annotations

import torch
from expecttest import assert_expected_inline
from torch import Tensor, fx

from fxckpt.passes.transforms.partition import partition
from fxckpt.passes.transforms.rematerialize import rematerialize
from tests.passes.graphs import chain, planned, text_of, traced

KEPT_ON_CTX = "saved_tensor_with_no_vc_check"


def halves(joint: fx.GraphModule) -> tuple[fx.GraphModule, fx.GraphModule]:
    result = rematerialize(joint, *planned(joint), num_fwd_outputs=1)
    return partition(joint, result, num_fwd_outputs=1)


def test_halves_of_a_chain() -> None:
    """Each half has its own nodes; the forward returns the saved input after its output."""
    forward, backward = halves(traced(chain, torch.ones(4), torch.ones(4)))
    assert_expected_inline(
        text_of(forward.graph),
        """\
primals_1: input
sin = sin(primals_1)
sin_1 = sin(sin)
return [sin_1, primals_1]""",
    )
    assert_expected_inline(
        text_of(backward.graph),
        """\
primals_1: input
tangents_1: input
sin_recompute = sin(primals_1)
cos_recompute = cos(sin_recompute)
mul = mul(tangents_1, cos_recompute)
cos_1_recompute = cos(primals_1)
mul_1 = mul(mul, cos_1_recompute)
return [mul_1]""",
    )


def test_autograd_owns_private_values() -> None:
    """AOTAutograd may keep a value on ``ctx`` only if outside code can write to it."""

    def f(primals: Tensor, tangents: Tensor) -> tuple[Tensor, Tensor]:
        private, shared = primals.topk(2).indices, primals.argmax()
        return shared.view(1), tangents * private * shared

    joint = traced(f, torch.ones(4), torch.ones(2))
    nodes = {node.name: node for node in joint.graph.nodes}
    for name in ("getitem_1", "argmax"):
        nodes[name].meta[KEPT_ON_CTX] = True
    result = rematerialize(joint, *planned(joint, recomputes=False), num_fwd_outputs=1)
    assert {"getitem_1", "argmax"} <= {node.name for node in result.saved}
    partition(joint, result, num_fwd_outputs=1)
    marked = [name for name in ("getitem_1", "argmax") if KEPT_ON_CTX in nodes[name].meta]
    assert marked == ["argmax"]
