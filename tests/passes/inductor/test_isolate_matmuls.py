"""Isolate matmuls: a product is hidden from its sum where that frees memory."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from expecttest import assert_expected_inline
from torch import Tensor, fx, nn
from torch.fx.experimental.proxy_tensor import make_fx

import fxckpt
from fxckpt.passes.inductor.fusion_model import is_extern_kernel
from fxckpt.passes.inductor.isolate_matmuls import isolate_matmuls
from fxckpt.passes.transforms.rematerialize import NEVER_STORED
from tests.passes.graphs import text_of
from tests.steps import peak_of

aten = torch.ops.aten


def unfolded(
    function: Callable[..., Tensor],
    *inputs: Tensor,
    mark: Callable[[fx.Graph], None] = lambda graph: None,
) -> tuple[fx.GraphModule, bool]:
    """The graph, and whether its sum reads the product through a view."""
    gm = make_fx(function, tracing_mode="fake")(*inputs)
    mark(gm.graph)
    isolate_matmuls(gm.graph, is_extern_kernel=is_extern_kernel)
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


def test_product_with_large_dying_operands_is_isolated() -> None:
    """Its operands would otherwise live until the sum."""
    assert unfolded(weight_gradient, torch.randn(64, 4), torch.randn(64, 32), torch.randn(32, 4))[1]


def test_product_larger_than_its_operands_is_folded() -> None:
    """Isolated, it would take more memory than it frees."""
    assert not unfolded(
        weight_gradient, torch.randn(4, 64), torch.randn(4, 32), torch.randn(32, 64)
    )[1]


def test_scalars_stay_scalars() -> None:
    """With a dimension it would take part in type promotion."""

    def scaled(x: Tensor, logits: Tensor, w: Tensor, scalar: Tensor) -> Tensor:
        gradient = logits.exp()
        head = gradient.t() @ x
        return head + ((gradient @ w).relu() @ w.t()).amax().double() * scalar

    gm, is_apart = unfolded(
        scaled,
        torch.randn(64, 4),
        torch.randn(64, 32),
        torch.randn(32, 4),
        torch.tensor(2.0, dtype=torch.float64),
    )
    assert is_apart
    assert gm.graph.output_node().args[0].meta["val"].dtype == torch.float32


def test_product_next_to_its_sum_is_folded() -> None:
    """No extern kernel runs between the two."""
    assert not unfolded(
        lambda x, y: x.exp() + x.exp().relu() @ y, torch.randn(32, 32), torch.randn(32, 32)
    )[1]


def gradient_of_a_slice(gradients: Tensor, w: Tensor, zeros: Tensor) -> Tensor:
    """The gradient through a product, and through a buffer of which one row was written."""
    below = aten.select_scatter.default(gradients.exp(), zeros, 0, 1)
    return zeros @ w + below[0]


@pytest.mark.parametrize("is_never_stored", [True, False])
def test_product_is_isolated_from_unstored_summands(*, is_never_stored: bool) -> None:
    """The sum adds a slice of a gradient that fused kernels never store."""

    def mark(graph: fx.Graph) -> None:
        (below,) = graph.find_nodes(op="call_function", target=aten.select_scatter.default)
        below.meta[NEVER_STORED] = is_never_stored

    _, is_apart = unfolded(
        gradient_of_a_slice,
        torch.randn(8, 16, 16),
        torch.randn(16, 16),
        torch.randn(16, 16),
        mark=mark,
    )
    assert is_apart == is_never_stored


class Collects(nn.Module):
    """Writes what its layers give into one buffer, and reads all of it."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(128, 128) for _ in range(5))

    def forward(self, x: Tensor) -> Tensor:
        collected = x.new_empty(5, *x.shape)
        for i, layer in enumerate(self.layers):
            x = layer(x).tanh()
            collected[i] = x
        return collected.cumsum(0).square().mean()


def test_gradients_of_slices_are_not_padded() -> None:
    """Of each of five writes there would be a gradient as large as the buffer."""

    def make() -> tuple[nn.Module, Tensor]:
        return Collects(), torch.randn(512, 128)

    with pytest.raises(fxckpt.BudgetInfeasible) as refused:
        peak_of(fxckpt.Backend(budget=0.3), make)
    least, buffer = refused.value.floor_bytes, 5 * make()[1].nbytes
    assert peak_of(fxckpt.Backend(budget=least), make) <= least <= 2.1 * buffer


def test_graph_of_an_isolated_product() -> None:
    """The sum reads the product through a view, so that it matches no addmm pattern."""

    def f(x: Tensor, logits: Tensor, w: Tensor) -> Tensor:
        head = logits.exp().t() @ x
        return head + (w @ w.t()) @ w

    gm = make_fx(f, tracing_mode="fake")(
        torch.randn(64, 4), torch.randn(64, 32), torch.randn(32, 4)
    )
    isolate_matmuls(gm.graph)
    assert_expected_inline(
        text_of(gm.graph),
        """\
x_1: input
logits_1: input
w_1: input
exp = exp(logits_1)
t = t(exp)
mm = mm(t, x_1)
t_1 = t(w_1)
mm_1 = mm(w_1, t_1)
mm_2 = mm(mm_1, w_1)
unsqueeze_default = unsqueeze(mm, 0)
unsqueeze_default_1 = unsqueeze(mm_2, 0)
add = add(unsqueeze_default, unsqueeze_default_1)
squeeze_dim = squeeze(add, 0)
return squeeze_dim""",
    )
