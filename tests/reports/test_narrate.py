"""Reasons as sentences."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import fxckpt
from fxckpt.reports.narrate import Narrator
from tests.reports.conftest import COST


def test_why_names_ops_and_bytes(plan: fxckpt.Plan) -> None:
    """A reason names the ops of the recomputation and the bytes that it frees."""
    words = plan.explain().why("_softmax_1")
    assert words.startswith("saved: recomputing it needs ") and "attn.softmax" in words
    assert "MFLOP; costs " in words and "to free 144.0 KiB" in words
    for row in plan.rows:
        assert plan.explain().why(row.name).startswith(f"{row.decision.value}: ")
    with pytest.raises(fxckpt.InvalidOption, match="Near it: _softmax"):
        plan.explain().why("softmax")


def test_chain_ends_at_saved_values() -> None:
    """A recompute chain ends at saved values."""

    def step(x: Tensor, w: Tensor) -> Tensor:
        return (((x @ w).exp() @ w).exp() @ w).exp().sum()

    x, w = torch.randn(64, 64, requires_grad=True), torch.randn(64, 64, requires_grad=True)
    plan = fxckpt.plan(step, x, w, cost=COST, budget=1.0)
    reasons = Narrator(plan)
    assert plan.saved == ("exp", "exp_1", "exp_2")
    chain = reasons.chain(reasons.snapshot.storage_index["exp_1"])
    assert [op.name for op in chain.ops] == ["mm_1", "exp_1"]
    assert chain.flops == 2 * 64**3 and chain.no_recompute_op is None
    assert reasons.readers("exp_1") == (("mm_2",), (), ("mm_3", "mul_1"))


def test_why_of_states_and_outputs(plan: fxckpt.Plan) -> None:
    """Generator states and outputs have reasons of their own."""
    state = next(row.name for row in plan.rows if row.reason is fxckpt.Reason.RNG_STATE)
    assert "so that its second run draws the same" in plan.explain().why(state)
    assert plan.explain().readers(state).recompute == (state.removesuffix("_rng_state"),)

    def step(x: Tensor) -> tuple[Tensor, Tensor]:
        h = x @ x
        return h, (h * h).sum()

    plan = fxckpt.plan(step, torch.randn(64, 64, requires_grad=True))
    assert (
        plan.explain().why("mm")
        == "saved: a forward output, alive anyway; the backward reads it at no cost"
    )
