"""Graphs with several streams: the ops that order them run once, in their half and order."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx
from torch._functorch._aot_autograd import streams

from fxckpt.inductor.planner import InductorPlanner
from fxckpt.passes.graphs import Joint
from fxckpt.planner.planner import Planner
from fxckpt.reason import Reason
from tests.joints import inductor_joint, plain_joint

EVENTS: tuple[Any, ...] = (
    torch.ops.streams.record_event.default,
    torch.ops.streams.wait_event.default,
)
WRAP = getattr(streams, "wrap_all_sync_nodes_with_control_deps", None)


def layers(x: Tensor, w: Tensor) -> Tensor:
    for _ in range(4):
        x = (x @ w).sin().exp().tanh()
    return x.sum()


def joint_with_streams(capture: Callable[..., tuple[fx.GraphModule, int]]) -> Joint:
    """Return a joint graph that records and waits in each half, with three ops on stream 1.

    No machine without a GPU can trace one; AOTAutograd's own function wraps the events.
    """
    x, w = (torch.randn(64, 64, requires_grad=True) for _ in range(2))
    module, count = capture(layers, x, w)
    halves: tuple[list[fx.Node], list[fx.Node]] = ([], [])
    for node in module.graph.nodes:
        if node.op == "call_function":
            halves[node.meta.get("partitioner_tag") == "is_backward"].append(node)
    for event, half in enumerate(halves):
        after = half[len(half) // 3]
        for stream, op in enumerate(EVENTS):
            with module.graph.inserting_after(after):
                tag = after.meta.get("partitioner_tag")
                after = module.graph.call_function(op, (event, stream))
            after.meta = {"val": None, "custom": {"stream": stream}}
            after.meta |= {} if tag is None else {"partitioner_tag": tag}
    for node in halves[0][-5:-2]:
        node.meta["custom"] = {"stream": 1}
    if WRAP is not None:
        WRAP(module)
    module.recompile()
    return Joint(module, count)


def events_of(half: fx.GraphModule) -> list[tuple[Any, tuple[int, ...]]]:
    """The ops that order streams, in their order, also those that are wrapped."""
    found = []
    for node in half.graph.nodes:
        if node.op == "get_attr" and "subgraph" in str(node.target):
            found += events_of(getattr(half, str(node.target)))
        elif node.target in EVENTS:
            found.append((node.target, node.args))
    return found


@pytest.mark.parametrize("budget", [None, 0.8])
def test_events_run_once_in_their_half(budget: float | None) -> None:
    """Both halves have the events that were traced in them, and give the gradients of eager."""
    joint = joint_with_streams(plain_joint)
    forward, backward, plan = Planner(budget=budget, cost="flops").partition(joint)
    assert plan.recomputed
    for event, half in enumerate((forward, backward)):
        assert events_of(half) == [(op, (event, stream)) for stream, op in enumerate(EVENTS)]
        for node in list(half.graph.nodes):
            if node.target in EVENTS:  # They take a GPU to run.
                half.graph.erase_node(node)
        half.recompile()
    inputs = [torch.randn(64, 64, requires_grad=True) for _ in range(2)]
    loss = layers(*inputs)
    with torch.no_grad():
        loss_again, *saved = forward(*inputs)
        found = backward(*saved, torch.ones(()))
    assert torch.equal(loss_again, loss)
    for gradient, expected in zip(found, torch.autograd.grad(loss, inputs), strict=True):
        assert torch.equal(gradient, expected)


def test_ops_of_other_streams_are_not_recomputed() -> None:
    """No event orders the streams around a second run."""
    joint = joint_with_streams(plain_joint)
    on_stream_1 = {
        node.name
        for node in joint.module.graph.nodes
        if node.meta.get("custom", {}).get("stream") == 1 and isinstance(node.meta["val"], Tensor)
    }
    _, _, plan = Planner(cost="flops").partition(joint)
    assert plan.recomputed and len(on_stream_1) >= 3
    assert on_stream_1.isdisjoint(plan.recomputed)
    assert Reason.STREAM in {plan.reasons.get(name) for name in on_stream_1}


@pytest.mark.skipif(WRAP is None, reason="torch 2.13 is the first to wrap events")
def test_inductor_gets_wrapped_events() -> None:
    """The events of both halves are wrapped again, so that Inductor moves nothing across them."""
    joint = joint_with_streams(inductor_joint)
    planner = InductorPlanner(Planner(budget=0.9, cost="flops"))
    forward, backward, plan = planner.partition(joint)
    assert plan.compiled_peak_bytes is not None and plan.recomputed
    for event, half in enumerate((forward, backward)):
        assert events_of(half) == [(op, (event, stream)) for stream, op in enumerate(EVENTS)]
        assert not any(node.target in EVENTS for node in half.graph.nodes)
