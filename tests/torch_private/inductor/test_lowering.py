"""Lowered halves: examined once, compiled as they are, freed early where the budget asks."""

from __future__ import annotations

import copy
import functools
import threading
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, fx
from torch._dynamo.utils import counters
from torch._inductor import compile_fx, config
from torch._inductor.graph import GraphLowering
from torch._inductor.utils import run_and_get_code
from torch.fx.experimental.proxy_tensor import make_fx

import fxckpt
from fxckpt.inductor.memory import lower_backward
from fxckpt.inductor.planner import InductorPlanner
from fxckpt.passes.graphs import Joint
from fxckpt.passes.inductor.execution_order import ORDER
from fxckpt.planner.planner import Planner
from fxckpt.torch_private.inductor import lowering
from fxckpt.torch_private.inductor.execution_order import KeepExecutionOrder
from fxckpt.torch_private.inductor.layouts import changes_layout, wants_channels_last
from fxckpt.torch_private.inductor.lowering import FREES_EARLY, Lowerings, free_early
from fxckpt.torch_private.inductor.options import _detect_instructions_early
from tests.inductor.models import (
    Constants,
    Grouped,
    skips,
)
from tests.joints import inductor_joint


def test_lowered_half_runs_inductors_passes_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pattern counters are counted once too."""
    passes, passed = compile_fx.post_grad_passes, list[int]()

    def counting(gm: fx.GraphModule, is_inference: bool) -> None:
        passed.append(len(gm.graph.nodes))
        passes(gm, is_inference)

    monkeypatch.setattr(compile_fx, "post_grad_passes", counting)
    counted = []
    for backend in ("inductor", fxckpt.Backend(cost="flops")):
        torch._dynamo.reset()
        counters.clear()
        with config.patch(fx_graph_cache=False):
            torch.compile(Constants(), backend=backend)(torch.rand(512, 48)).backward()
        counted.append((len(passed), dict(counters["inductor"])))
        passed.clear()
    assert counted[0][0] == counted[1][0] == 2
    assert counted[0][1]["pattern_matcher_count"] == counted[1][1]["pattern_matcher_count"] > 0


@functools.cache
def planned_skips() -> tuple[fx.GraphModule, fx.GraphModule, int]:
    """Forward, backward and outputs of a plan that several tests share; a test copies to write."""
    joint, count = inductor_joint(*skips())
    forward, backward, _ = InductorPlanner(Planner(budget=0.85, cost="flops")).partition(
        Joint(joint, count)
    )
    return forward, backward, count


def test_freeing_early_never_takes_more_memory() -> None:
    """Kernels are the same; live bytes are nowhere more, and somewhere less."""
    forward, backward, count = planned_skips()
    kept = lower_backward(
        forward, backward, Lowerings(KeepExecutionOrder(ORDER)).lower, num_fwd_outputs=count
    )
    freeing_early = kept.freeing_early
    assert freeing_early is not None
    assert freeing_early.kernels == kept.kernels
    assert (freeing_early.live_bytes() <= kept.live_bytes()).all() and (
        freeing_early.live_bytes() < kept.live_bytes()
    ).any()


@pytest.mark.parametrize(("more_bytes", "frees_early"), [(64, False), (2**20, True)])
def test_backward_frees_early_only_over_the_budget(
    monkeypatch: pytest.MonkeyPatch, more_bytes: int, frees_early: bool
) -> None:
    """A plan frees early if keeping buffers exceeds the budget, and when it is applied too."""
    lower = Lowerings.lower

    def lowered(self: Lowerings, half: fx.GraphModule, donated: Any, strides: Any) -> Any:
        found = lower(self, half, donated, strides)
        if donated is None or found.freeing_early is None:
            return found
        # As if what is kept were that much.
        return replace(
            found, allocated=(*found.allocated, ("more", more_bytes, 0, len(found.kernels)))
        )

    monkeypatch.setattr(Lowerings, "lower", lowered)
    joint, count = inductor_joint(*skips())
    _, backward, plan = InductorPlanner(Planner(budget=0.85, cost="flops")).partition(
        Joint(joint, count)
    )
    assert plan.keeps_order
    assert (
        plan.frees_early
        == frees_early
        == any(FREES_EARLY in node.meta for node in backward.graph.nodes)
    )
    assert plan.compiled_peak_bytes is not None and plan.budget_bytes is not None
    assert plan.compiled_peak_bytes <= plan.budget_bytes
    again, _ = inductor_joint(*skips())
    forward, backward, _ = InductorPlanner(Planner(known=(plan,), cost="flops")).partition(
        Joint(again, count)
    )
    assert frees_early == any(FREES_EARLY in node.meta for node in backward.graph.nodes)
    assert not any(FREES_EARLY in node.meta for node in forward.graph.nodes)


def test_early_frees_compile_without_buffer_reuse() -> None:
    """A marked backward reuses fewer buffers; Inductor's option is unchanged afterwards."""
    backward = copy.deepcopy(planned_skips()[1])

    def reused(half: fx.GraphModule) -> int:
        with config.patch(fx_graph_cache=False):
            _, code = run_and_get_code(
                lambda: Lowerings(KeepExecutionOrder(ORDER)).compile_alone(half, True, {})
            )
        return sum("# reuse" in line for line in code[0].splitlines())

    keeping = reused(backward)
    free_early(backward.graph)
    assert reused(backward) < keeping
    assert config.allow_buffer_reuse


@pytest.mark.parametrize(
    "options", [{}, pytest.param({"max_fusion_size": 1}, marks=pytest.mark.sweep)]
)
def test_code_is_the_same_with_and_without_lowering(
    options: dict[str, Any],
) -> None:
    """Lowering ahead of the compile does not change the generated code."""
    joint, count = inductor_joint(Grouped(48), torch.randn(8, 3, 64, 64))
    _, backward, _ = InductorPlanner(Planner(budget=0.7, cost="flops")).partition(
        Joint(joint, count)
    )
    # Images lie channels last, as in the forward, where Inductor would lay them out otherwise:
    # before torch 2.15 it does not count the backwards of convolutions.
    assert wants_channels_last(backward)
    assert changes_layout(backward) == (torch.__version__ >= "2.15")

    def code(lowerings: Lowerings) -> str:
        with config.patch(fx_graph_cache=False, **options):
            _, (text,) = run_and_get_code(lambda: lowerings.compile_alone(backward, True, {}))
        return text

    looked_at = Lowerings(KeepExecutionOrder(ORDER))
    with config.patch(fx_graph_cache=False):
        looked_at.lower(backward, [], {})
    assert code(looked_at) == code(Lowerings(KeepExecutionOrder(ORDER)))


def test_lowered_graphs_of_other_orders_are_not_used(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A graph lowered in Inductor's order does not serve a compile held to the planned order."""
    backward = planned_skips()[1]
    free = copy.deepcopy(backward)
    for node in free.graph.nodes:
        node.meta.pop(ORDER, None)
    lowered: list[GraphLowering] = []
    run = GraphLowering.run
    monkeypatch.setattr(
        GraphLowering, "run", lambda graph, *args: (lowered.append(graph), run(graph, *args))[1]
    )
    lowerings = Lowerings(KeepExecutionOrder(ORDER))
    with config.patch(fx_graph_cache=False):
        lowerings.lower(free, [], {})
        lowerings.lower(backward, [], {})
        lowerings.compile_alone(backward, True, {})
        assert len(lowered) == 2
        lowerings.lower(free, [], {})
        lowerings.compile_alone(backward, True, {})
    assert len(lowered) == 4


WITH_CUDA_GRAPHS = {"graph_partition": True, "triton.cudagraphs": True}
"""What ``mode="reduce-overhead"`` sets."""


def test_partitions_on_the_cpu_keep_the_order() -> None:
    """Inductor would delay each kernel that only makes outputs, though no CUDA graph is made."""
    backward = planned_skips()[1]
    lower = Lowerings(KeepExecutionOrder(ORDER)).lower
    plain = lower(backward, [], {})
    with config.patch(WITH_CUDA_GRAPHS):
        partitioned = lower(backward, [], {})
    assert partitioned == plain


def test_partitions_keep_the_order_of_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    """A call that the next one waits for is not moved behind it; as beside CUDA graphs."""
    monkeypatch.setattr(lowering, "IN_PLANNED_ORDER", {})
    model = torch.nn.Sequential(*(torch.nn.Linear(32, 32) for _ in range(3)))
    joint, count = inductor_joint(lambda x: model(x.tanh()).square().mean(), torch.randn(64, 32))
    _, backward, _ = InductorPlanner(Planner(budget="min", cost="flops")).partition(
        Joint(joint, count)
    )
    lower = Lowerings(KeepExecutionOrder(ORDER)).lower
    plain = lower(backward, [], {})
    with config.patch(WITH_CUDA_GRAPHS):
        partitioned = lower(backward, [], {})
    # The order of the others shows that Inductor does reorder here.
    assert partitioned.kernels != plain.kernels
    assert list(partitioned.operands.values()) == list(plain.operands.values())


def test_concatenation_is_allocated_with_its_first_part() -> None:
    """Inductor lets products write their parts into it."""

    def parts(
        x: Tensor, narrow: Tensor, back: Tensor, wide: Tensor, down: Tensor, last: Tensor
    ) -> Tensor:
        return torch.cat([(x @ narrow) @ back, (x @ wide) @ down]) @ last

    shapes = (64, 32), (32, 16), (16, 48), (32, 400), (400, 48), (48, 8)
    lowered = Lowerings(None).lower(
        make_fx(parts, tracing_mode="fake")(*map(torch.randn, shapes)), None, {}
    )
    (first,) = (first for _, nbytes, first, _ in lowered.allocated if nbytes == 2 * 64 * 48 * 4)
    assert lowered.kernels[first] == ("mm_1",)


def test_fused_kernel_does_not_overwrite_a_concatenation() -> None:
    """Its parts filled it, and no kernel made it as a whole."""

    def scaled(x: Tensor, narrow: Tensor, wide: Tensor, last: Tensor) -> Tensor:
        return (torch.cat([x @ narrow, x @ wide]) * 2) @ last

    inputs = [torch.randn(shape) for shape in ((64, 32), (32, 48), (32, 48), (48, 8))]
    lowered = Lowerings(None).lower(make_fx(scaled, tracing_mode="fake")(*inputs), None, {})
    torch._dynamo.reset()
    _, (code,) = run_and_get_code(torch.compile(scaled), *inputs)
    assert len(lowered.allocated) == code.count(" = empty_strided_cpu(") == 3
    assert lowered.overwritten == ()


def test_failed_instruction_detection_is_silent(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A compiler that cannot be run is reported by the compile, not by the thread before it."""
    asked, told, others = list[int](), list[object](), set(threading.enumerate())

    def refused() -> None:
        asked.append(1)
        raise PermissionError

    monkeypatch.setattr("torch._inductor.cpu_vec_isa.valid_vec_isa_list", refused)
    monkeypatch.setattr(threading, "excepthook", told.append)
    _detect_instructions_early({})
    for thread in set(threading.enumerate()) - others:
        thread.join()
    assert asked and not told
