"""Rewritten modules that send values away."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import fx
from torch.utils import _pytree as pytree

import fxckpt
from fxckpt.planner.capture import capture_joint
from fxckpt.tiers import Host
from fxckpt.tiers.ops import send
from tests.promises.offload.stack import WithLoss, stack
from tests.steps import differing, fresh, outcome
from tests.tiers.adversary import Adversary


@pytest.mark.parametrize("of", [lambda m: m, fx.symbolic_trace], ids=["module", "graph"])
def test_rewritten_modules_send_values_away(of: Callable[..., Any]) -> None:
    """They do what the plan says, with the same step on any link."""
    model, inputs = fresh(stack)
    expected = outcome(model, model, inputs)
    model, inputs = fresh(stack)
    host = Adversary(late=True)
    made = fxckpt.rewrite(of(model), budget=0.4, example_inputs=inputs, offload=host)
    assert differing(expected, outcome(model, made, inputs)) == []
    assert host.sent == host.fetched == len(made.plan.offloads) > 0
    assert host.used_bytes == 0 and host.peak_bytes == made.plan.away_bytes


def test_copies_share_the_place() -> None:
    """A copy sends to the same tier; what is unpickled sends to an equal one."""
    model, inputs = fresh(stack)
    host = Host("1GiB", 1e12)
    made = fxckpt.rewrite(fx.symbolic_trace(model), budget=0.4, example_inputs=inputs, offload=host)
    twin, unpickled = copy.deepcopy(made), pickle.loads(pickle.dumps(made))
    expected = outcome(made, made, inputs)
    for other, peak in ((twin, made.plan.away_bytes), (unpickled, 0)):
        host.restart_peak()
        assert differing(expected, outcome(other, other, inputs)) == []
        assert other.plan.offloads == made.plan.offloads
        assert host.peak_bytes == peak


def test_joint_graphs_send_values_away() -> None:
    """A joint graph has the ops of its plan, and is unpickled with a tier of its own."""
    layers, (x,) = stack()
    joint = capture_joint(WithLoss(layers), (x,), {}).module
    host = Host("1GiB", 1e12)
    made = fxckpt.rewrite(joint, budget=0.4, offload=host)
    values = [torch.randn(n.meta["val"].shape) for n in joint.graph.find_nodes(op="placeholder")]

    def results(gm: Callable[..., Any]) -> list[Any]:
        torch.manual_seed(1)
        return [
            leaf for leaf in pytree.tree_leaves(gm(values[:-1], values[-1:])) if leaf is not None
        ]

    expected, unpickled = results(joint), pickle.loads(pickle.dumps(made))
    sends = made.graph.find_nodes(op="call_function", target=send)
    assert len(sends) == len(made.plan.offloads) > 0
    for other, is_used in ((made, True), (unpickled, False)):
        host.restart_peak()
        assert all(map(torch.equal, expected, results(other)))
        assert (host.peak_bytes > 0) is is_used
