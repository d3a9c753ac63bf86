"""Regions of ``nested_compile_region`` by a partitioner: one plan spans them all."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch._inductor.config as inductor_config
from functorch.compile import make_boxed_func
from torch import Tensor, fx
from torch._dynamo.backends.common import aot_autograd
from torch._inductor.utils import fresh_cache
from torch.nn import functional as F

import fxckpt

WIDTH = 16


@torch.compiler.nested_compile_region
def block(x: Tensor, weight: Tensor) -> Tensor:
    return F.dropout((x @ weight).tanh().sin(), 0.3)


@torch.compiler.nested_compile_region
def pair(x: Tensor, weight: Tensor, other: Tensor) -> tuple[Tensor, Tensor]:
    y = block(x, weight)
    return y + 1, block(y, other).t()


@torch.compiler.nested_compile_region
def checkpointed(x: Tensor, weight: Tensor) -> Tensor:
    return fxckpt.checkpoint(lambda y: F.dropout((y @ weight).tanh(), 0.3).sin(), x)


@torch.compiler.nested_compile_region
def chosen(x: Tensor) -> Tensor:
    rows = (x.detach().sum(1) > 0).nonzero().flatten()
    return torch.zeros_like(x).index_add(0, rows, x[rows].sin())


def thrice(x: Tensor, weight: Tensor) -> Tensor:
    for _ in range(3):
        x = block(x, weight)
    return x


def nested(x: Tensor, weight: Tensor) -> Tensor:
    """Enter bodies within a body, each with a weight of its own: sums round in another order."""
    second = weight.cos()
    one, other = pair(x, weight, second)
    return one * pair(other.t(), weight, second)[1].t()


def inside_and_outside(x: Tensor, weight: Tensor) -> Tensor:
    """Enter checkpoint regions within a body, and a body within a checkpoint region."""
    x = checkpointed(checkpointed(x, weight), weight)
    return fxckpt.checkpoint(block, x, weight).sin()


def partly_differentiable(x: Tensor, weight: Tensor) -> Tensor:
    """Call a body with and without a gradient."""
    fixed = block(x.detach(), weight.detach())
    return block(block(x, weight.detach()) + fixed, weight)


def data_dependent(x: Tensor, weight: Tensor) -> Tensor:
    return chosen(chosen(x @ weight).sin())


FUNCTIONS = [thrice, nested, inside_and_outside, partly_differentiable, data_dependent]


def outcome(step: Callable[..., Tensor]) -> list[Tensor]:
    """Return the result and the gradients of one step from a fixed seed."""
    torch.manual_seed(0)
    given = [torch.randn(rows, WIDTH, requires_grad=True) for rows in (32, WIDTH)]
    result = step(*given)
    result.square().sum().backward()
    return [result.detach(), *(t.grad for t in given if t.grad is not None)]


def compiled(function: Callable[..., Tensor], **options: Any) -> Callable[..., Tensor]:
    """Return a function compiled anew."""
    torch._dynamo.reset()
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        return torch.compile(function, fullgraph=True, **options)


def partitioned(
    partitioner: fxckpt.Partitioner, keep: Callable[[fx.GraphModule], object] = id
) -> Any:
    """Return a backend that runs the halves op by op."""

    def run(gm: fx.GraphModule, inputs: Any) -> Callable[..., Any]:
        keep(gm)
        return make_boxed_func(gm.forward)

    return aot_autograd(fw_compiler=run, partition_fn=partitioner)


@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda f: f.__name__)
def test_one_plan_spans_all_regions(function: Callable[..., Tensor]) -> None:
    """The ops of regions are planned like others, at every budget with eager's bits."""
    expected = outcome(function)
    budgets: list[Any] = [None]
    try:
        outcome(compiled(function, backend=partitioned(fxckpt.Partitioner(1))))
    except fxckpt.BudgetInfeasible as error:
        budgets.append(error.floor_bytes)
    for budget in budgets:
        partitioner = fxckpt.Partitioner(budget)
        found = outcome(compiled(function, backend=partitioned(partitioner)))
        assert all(map(torch.equal, found, expected))
        (plan,) = partitioner.plans
        assert not any("invoke_subgraph" in row.op for row in plan.rows)


def test_checkpointed_bodies_are_recomputed() -> None:
    """The tags of a body, and of the call of one, reach the plan."""
    partitioner = fxckpt.Partitioner()
    outcome(compiled(inside_and_outside, backend=partitioned(partitioner)))
    (plan,) = partitioner.plans
    again = {row.name for row in plan.rows if row.reason is fxckpt.Reason.REGION}
    assert sum(name.startswith("mm") for name in again) == 3
    assert sum(name.startswith("tanh") for name in again) == 3


def test_no_draw_of_a_body_runs_twice() -> None:
    """A draw is in the forward alone, once for each call, and no dead one is left.

    With eager's numbers asked of Inductor, torch's own clean-up leaves dead draws alone.
    """
    halves: list[fx.GraphModule] = []
    with inductor_config.patch(fallback_random=True):
        outcome(compiled(thrice, backend=partitioned(fxckpt.Partitioner(), halves.append)))
    target = torch.ops.aten.native_dropout.default
    draws = [half.graph.find_nodes(op="call_function", target=target) for half in halves]
    assert [*map(len, draws)] == [3, 0]


@pytest.mark.sweep
def test_inductor_draws_what_stock_draws() -> None:
    """By Inductor's configuration no random op of a body runs twice."""
    with fresh_cache(), inductor_config.patch(fallback_random=True):
        expected = outcome(compiled(thrice))
        partitioner = fxckpt.Partitioner(0.8)
        options = {"custom_partitioner_fn": partitioner}
        found = outcome(compiled(thrice, options=options))
    assert all(map(torch.allclose, found, expected))
    (plan,) = partitioner.plans
    assert plan.schedule
