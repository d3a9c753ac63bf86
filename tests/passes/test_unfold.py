"""Unfold: a product whose operands die long before the sum that it is part of stays a call of its own."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx

from fxckpt.fused import is_library_call
from fxckpt.passes.unfold import unfold

aten = torch.ops.aten


def unfolded(function: Callable[..., Tensor], *inputs: Tensor) -> tuple[fx.GraphModule, bool]:
    """The graph, and whether its sum reads the product through a view."""
    gm = make_fx(function, tracing_mode="fake")(*inputs)
    unfold(gm, is_library_call=is_library_call)
    gm.graph.lint()
    gm.recompile()
    assert torch.equal(gm(*inputs), function(*inputs))
    (total,) = gm.graph.find_nodes(op="call_function", target=aten.add.Tensor)
    return gm, any(arg.target is aten.unsqueeze.default for arg in total.all_input_nodes)


def weight_gradient(x: Tensor, logits: Tensor, w: Tensor) -> Tensor:
    """A head's weight gradient, made first, and what the other end of the backward adds to it."""
    gradient = logits.exp()
    head = gradient.t() @ x
    return head + ((gradient @ w).relu() @ w.t()).sum() * w


def test_a_product_whose_large_operands_die_early_is_kept_apart() -> None:
    assert unfolded(weight_gradient, torch.randn(64, 4), torch.randn(64, 32), torch.randn(32, 4))[1]


def test_a_product_that_is_larger_than_its_operands_is_left_alone() -> None:
    assert not unfolded(weight_gradient, torch.randn(4, 64), torch.randn(4, 32), torch.randn(32, 64))[1]


def test_a_scalar_stays_a_scalar() -> None:
    """Of one dimension it would have a say in the type of the sum."""

    def scaled(x: Tensor, logits: Tensor, w: Tensor, scalar: Tensor) -> Tensor:
        gradient = logits.exp()
        head = gradient.t() @ x
        return head + ((gradient @ w).relu() @ w.t()).amax().double() * scalar

    gm, is_apart = unfolded(scaled, torch.randn(64, 4), torch.randn(64, 32), torch.randn(32, 4), torch.tensor(2.0, dtype=torch.float64))
    assert is_apart
    assert gm.graph.output_node().args[0].meta["val"].dtype == torch.float32


def test_a_product_right_before_its_sum_is_left_alone() -> None:
    assert not unfolded(lambda x, y: x.exp() + x.exp().relu() @ y, torch.randn(32, 32), torch.randn(32, 32))[1]
