"""Gradient ahead: a backward that is computed for 1, and scaled where it leaves its region."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from expecttest import assert_expected_inline
from torch import Tensor, fx

from fxckpt.passes.tiles.gradient_ahead import run_ahead
from fxckpt.passes.tiles.row_regions import row_regions
from fxckpt.passes.tiles.unroll import unroll
from tests.passes.graphs import text_of, traced
from tests.passes.tiles.heads import (
    CLASSES,
    INNER,
    LOSSES,
    ROWS,
    TARGET,
    WIDTH,
    assert_near,
    divided,
    exact,
    joint_of,
    outputs,
    values,
    widest,
)

aten = torch.ops.aten


def small(primals_x: Tensor, primals_w: Tensor, tangents: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """A wide hidden layer whose values are added up, and the gradients of both inputs."""
    hidden = (primals_x @ primals_w).tanh()
    back = aten.tanh_backward(tangents.expand(6, 9), hidden)
    return hidden.sum(), back @ primals_w.t(), primals_x.t() @ back


def small_ahead() -> fx.GraphModule:
    """The joint graph of the layer, its gradient ahead."""
    module = traced(small, torch.ones(6, 2), torch.ones(2, 9), torch.tensor(0.5))
    ((region,),) = row_regions(module.graph)
    assert run_ahead(module.graph, region)
    module.graph.lint()
    module.recompile()
    return module


def test_a_backward_reads_one_and_is_scaled() -> None:
    """The region reads no incoming gradient; what leaves it is multiplied by the gradient."""
    assert_expected_inline(
        text_of(small_ahead().graph),
        """\
primals_x_1: input
primals_w_1: input
tangents_1: input
mm = mm(primals_x_1, primals_w_1)
tanh = tanh(mm)
full_default = full([], 1, dtype=torch.float32, device=device(type='cpu'), pin_memory=False)
expand = expand(full_default, [6, 9])
tanh_backward = tanh_backward(expand, tanh)
sum_1 = sum(tanh)
t = t(primals_w_1)
mm_1 = mm(tanh_backward, t)
t_1 = t(primals_x_1)
mm_2 = mm(t_1, tanh_backward)
mul_tensor = mul(mm_1, tangents_1)
mul_tensor_1 = mul(mm_2, tangents_1)
return [sum_1, mul_tensor, mul_tensor_1]""",
    )


def test_tiles_run_their_backward_ahead() -> None:
    """The backward of a tile follows its forward, and what it computes is scaled."""
    module = small_ahead()
    ((region,),) = row_regions(module.graph)
    unroll(module.graph, [region], 2)
    assert_expected_inline(
        text_of(module.graph),
        """\
primals_x_1: input
primals_w_1: input
tangents_1: input
full_default = full([], 1, dtype=torch.float32, device=device(type='cpu'), pin_memory=False)
t = t(primals_w_1)
t_1 = t(primals_x_1)
primals_x_1_tile_0 = slice(primals_x_1, 0, 0, 3)
mm_tile_0 = mm(primals_x_1_tile_0, primals_w_1)
tanh_tile_0 = tanh(mm_tile_0)
expand_tile_0 = expand(full_default, [3, 9])
tanh_backward_tile_0 = tanh_backward(expand_tile_0, tanh_tile_0)
sum_1_tile_0 = sum(tanh_tile_0)
mm_1_tile_0 = mm(tanh_backward_tile_0, t)
t_1_tile_0 = slice(t_1, 1, 0, 3)
mm_2_tile_0 = mm(t_1_tile_0, tanh_backward_tile_0)
primals_x_1_tile_1 = slice(primals_x_1, 0, 3, 6)
mm_tile_1 = mm(primals_x_1_tile_1, primals_w_1)
tanh_tile_1 = tanh(mm_tile_1)
expand_tile_1 = expand(full_default, [3, 9])
tanh_backward_tile_1 = tanh_backward(expand_tile_1, tanh_tile_1)
sum_1_tile_1 = sum(tanh_tile_1)
add_tensor = add(sum_1_tile_0, sum_1_tile_1)
mm_1_tile_1 = mm(tanh_backward_tile_1, t)
t_1_tile_1 = slice(t_1, 1, 3, 6)
mm_2_tile_1 = addmm(mm_2_tile_0, t_1_tile_1, tanh_backward_tile_1)
mm_1_whole = cat([mm_1_tile_0, mm_1_tile_1], 0)
mul_tensor = mul(mm_1_whole, tangents_1)
mul_tensor_1 = mul(mm_2_tile_1, tangents_1)
return [add_tensor, mul_tensor, mul_tensor_1]""",
    )


@pytest.mark.parametrize("gradient", [1.0, 0.25, -8.0])
def test_powers_of_two_keep_the_bits(gradient: float) -> None:
    """Scaling by a power of two rounds nothing."""
    given = values(6, 2).detach(), values(2, 9).detach(), torch.tensor(gradient)
    for found, expected in zip(small_ahead()(*given), small(*given), strict=True):
        assert torch.equal(found, expected)


@pytest.mark.parametrize("name", LOSSES)
def test_heads_with_their_losses(name: str) -> None:
    """In 3 tiles, loss and gradients are those in float64, and no op waits for the gradient."""
    function = LOSSES[name]
    given = values(ROWS, WIDTH), values(WIDTH, CLASSES), TARGET
    module = joint_of(function, *given)
    assert run_ahead(module.graph, divided(module, 3))
    region = divided(module, 3)
    assert not region.backward
    unroll(module.graph, [region], 3)
    module.graph.lint()
    assert widest(module) <= ROWS * CLASSES // 2
    assert_near(outputs(module, given), exact(function, given), 2e-6)


def test_gradients_that_are_added_are_each_scaled() -> None:
    """Two of a region, added up outside, are scaled one in the sum and one before it."""
    given = values(ROWS, WIDTH), values(WIDTH, INNER), values(WIDTH, INNER)

    def gated(x: Tensor, w: Tensor, v: Tensor) -> Tensor:
        return (torch.sigmoid(x @ w) * (x @ v)).sum()

    module = joint_of(gated, *given)
    assert run_ahead(module.graph, divided(module, 3))
    module.graph.lint()
    assert text_of(module.graph).count(" = addcmul(") == 1
    unroll(module.graph, [divided(module, 3)], 3)
    assert_near(outputs(module, given), exact(gated, given), 2e-6)


def test_gradient_stays_where_it_is_not_linear() -> None:
    """A backward that reads the gradient of the loss twice, or of many values, cannot go ahead."""

    class Squared(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.sum()

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Tensor:
            return (gradient * gradient).expand(ROWS, INNER)

    module = joint_of(
        lambda x, w: Squared.apply((x @ w).tanh()), values(ROWS, WIDTH), values(WIDTH, INNER)
    )
    before = [n.name for n in module.graph.nodes]
    assert not run_ahead(module.graph, divided(module, 2))
    assert [n.name for n in module.graph.nodes] == before
    several = joint_of(
        lambda x, w: (x @ w).tanh().sum(1), values(ROWS, WIDTH), values(WIDTH, INNER)
    )
    assert not run_ahead(several.graph, divided(several, 2))
