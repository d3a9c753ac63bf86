"""Verify: the planner's halves pass, and halves that are broken by hand are refused."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from expecttest import assert_expected_inline
from torch import Tensor, fx
from torch.nn import functional as F

from fxckpt.errors import VerifyError
from fxckpt.passes.analysis.graph_memory import emitted_peak
from fxckpt.passes.invariants import verify
from fxckpt.planner.capture import capture_joint
from fxckpt.planner.planner import Planner
from fxckpt.plans.types import Plan
from fxckpt.torch_private import run_with_rng_state
from tests.joints import normalize
from tests.passes.graphs import chain, planned, traced

Halves = tuple[fx.GraphModule, fx.GraphModule, Plan]


def emitted(budget: float) -> Halves:
    """Halves of a chain with dropout, planned at a budget."""

    def f(x: Tensor, w: Tensor) -> Tensor:
        for _ in range(4):
            x = F.dropout((x @ w).sin(), 0.5)
        return x.square().sum()

    inputs = (torch.ones(256, 16, requires_grad=True), torch.ones(16, 16, requires_grad=True))
    joint = capture_joint(f, inputs, {})
    normalize(joint.module)
    return Planner(budget=budget, measure_workspace=False).partition(joint)


@pytest.fixture(scope="module")
def halves() -> Halves:
    return emitted(0.5)


def test_emitted_halves_pass(halves: Halves) -> None:
    """The halves of a plan keep its promises."""
    verify(*halves)


@pytest.mark.parametrize("budget", [1.0, 0.8, 0.5])
def test_emitted_peak_is_the_prediction(budget: float) -> None:
    """Liveness of the emitted graphs alone gives the planned peak."""
    forward, backward, plan = emitted(budget)
    assert emitted_peak(forward, backward, num_fwd_outputs=1) == plan.peak_bytes


def test_random_op_without_state_is_refused(halves: Halves) -> None:
    """A recomputed draw needs the generator state of the first."""
    forward, backward, plan = halves
    broken = fx.GraphModule(backward, fx.Graph())
    broken.graph.graph_copy(backward.graph, mapping := dict[fx.Node, fx.Node]())
    recompute = next(n for n in backward.graph.nodes if n.target is run_with_rng_state)
    copy = mapping[recompute]
    copy.target, copy.args = copy.args[1], copy.args[2:]
    with pytest.raises(VerifyError, match="fresh randomness"):
        verify(forward, broken, plan)


def test_state_of_another_op_is_refused(halves: Halves) -> None:
    """A recomputed draw needs its own generator state."""
    forward, backward, plan = halves
    broken = fx.GraphModule(backward, fx.Graph())
    mapping: dict[fx.Node, fx.Node] = {}
    broken.graph.graph_copy(backward.graph, mapping)
    replays = [mapping[n] for n in backward.graph.nodes if n.target is run_with_rng_state]
    assert len({r.args[0] for r in replays}) > 1
    replays[0].args = (replays[1].args[0], *replays[0].args[1:])
    with pytest.raises(VerifyError, match="not the state of its first run"):
        verify(forward, broken, plan)


def test_unplanned_saved_value_is_refused(halves: Halves) -> None:
    """The backward reads only values that the plan saves."""
    forward, backward, plan = halves
    with pytest.raises(VerifyError, match="does not save"):
        verify(forward, backward, dataclasses.replace(plan, saved=plan.saved[1:]))


def test_unplanned_recompute_is_refused(halves: Halves) -> None:
    """The backward recomputes only ops that the plan recomputes."""
    forward, backward, plan = halves
    with pytest.raises(VerifyError, match="recomputes"):
        verify(forward, backward, dataclasses.replace(plan, schedule=plan.schedule[1:]))


def test_tangent_in_the_forward_is_refused() -> None:
    """The error names the incoming gradient that the forward reads."""
    joint = traced(chain, torch.ones(4), torch.ones(4))
    _, plan = planned(joint)
    with pytest.raises(VerifyError) as caught:
        verify(joint, joint, plan)
    assert_expected_inline(
        str(caught.value), """the forward reads the incoming gradient 'tangents_1'"""
    )
