"""Graph memory: live bytes of emitted graphs, op by op."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch._inductor.fx_passes.memory_estimator import build_memory_profile
from torch.nn import functional as F

from fxckpt.passes.analysis.graph_memory import emitted_peak, inner_bytes, memory_profile
from fxckpt.passes.transforms.in_place import write_in_place
from fxckpt.passes.transforms.partition import partition
from fxckpt.passes.transforms.place import place
from fxckpt.passes.transforms.rematerialize import rematerialize
from tests.passes.graphs import chain, planned, traced

EMPTY: frozenset[str] = frozenset()


def four_ops(x: Tensor) -> Tensor:
    y = x.sin()
    view = y.view(2, 2)
    z = y.exp()
    return view.cos() + z.view(2, 2)


def test_profile_of_four_ops() -> None:
    """16 bytes a value: ``sin`` lives through its view until ``cos`` has read it."""
    graph = traced(four_ops, torch.ones(4)).graph
    profile = memory_profile(graph, start=100, free=frozenset(["x_1"]), held=EMPTY)
    assert profile == ([116, 132, 148, 148], 116)


def test_held_input_lives_to_the_end() -> None:
    """An input that counts dies after its last reader, unless its caller holds it."""
    graph = traced(lambda x: x.sin().exp(), torch.ones(4)).graph
    assert memory_profile(graph, start=0, free=EMPTY, held=EMPTY) == ([32, 32], 16)
    assert memory_profile(graph, start=0, free=EMPTY, held=frozenset(["x_1"])) == ([32, 48], 32)


def test_unused_value_dies_at_once() -> None:
    """A value without readers counts while its op runs, and no longer."""
    graph = traced(lambda x: (x.sin(), x.exp())[1], torch.ones(4)).graph
    assert memory_profile(graph, start=0, free=frozenset(["x_1"]), held=EMPTY) == ([16, 16], 16)


def test_emitted_peak_is_the_plan_s() -> None:
    """The peak of the halves is the peak that the planner predicts."""
    joint = traced(chain, torch.ones(4), torch.ones(4))
    facts, plan = planned(joint)
    halves = partition(
        joint, rematerialize(joint, facts, plan, num_fwd_outputs=1), num_fwd_outputs=1
    )
    for half in halves:
        write_in_place(half.graph, facts.in_place)
    assert emitted_peak(*halves, num_fwd_outputs=1) == plan.peak_bytes


def test_gradient_of_a_view_of_an_input_counts() -> None:
    """Its trace shares the storage of the input, but the engine makes it: 16 bytes, and cos()."""
    inputs = torch.ones(8)
    joint = traced(lambda primals, tangents: (primals[4:], tangents.cos()), inputs, inputs[4:])
    facts, plan = planned(joint)
    halves = partition(
        joint, rematerialize(joint, facts, plan, num_fwd_outputs=1), num_fwd_outputs=1
    )
    assert emitted_peak(*halves, num_fwd_outputs=1) == plan.peak_bytes == 2 * 4 * 4


def test_result_in_an_argument_takes_no_bytes() -> None:
    """The result of an op that writes an argument lives in its memory, through views too."""

    def f(x: Tensor) -> Tensor:
        y = x.sin()
        z = torch.ops.aten.exp.out(y, out=y)
        return z.view(2, 2).cos()

    graph = traced(f, torch.ones(4)).graph
    assert memory_profile(graph, start=0, free=frozenset(["x_1"]), held=EMPTY) == ([16, 32], 16)


def test_plain_op_has_no_inner_bytes() -> None:
    """Only higher-order ops have subgraphs."""
    assert not any(inner_bytes(node) for node in traced(four_ops, torch.ones(4)).graph.nodes)


@pytest.mark.parametrize(
    "function",
    [
        four_ops,
        lambda x: x.topk(64).values.sum() + x.view(32, 32).t().exp().sum(),
        lambda x: F.layer_norm(x.view(32, 32).softmax(-1), [32]) @ x.view(32, 32),
        lambda x: F.gelu(x.split(256)[1].clone()).cumsum(0) * x[:256],
    ],
)
def test_peak_is_that_of_torch_s_estimator(function: Callable[[Tensor], Tensor]) -> None:
    """Torch's estimate for a device finds the same peak; all sizes are whole blocks there."""
    graph = traced(function, torch.ones(4 if function is four_ops else 1024)).graph
    place(graph, torch.device("cuda", 0))
    profile, _ = memory_profile(graph, start=0, free=EMPTY, held=EMPTY)
    peer = build_memory_profile(graph, lambda node: True, lambda nbytes: -(-nbytes // 512) * 512)
    assert max(profile) == max(peer) > 0
