"""Loss storages: a reduced loss holds the bytes of its elements, as the kernels leave it."""

from __future__ import annotations

import pytest
import torch
from expecttest import assert_expected_inline
from torch import Tensor, nn

import fxckpt
from fxckpt.passes.losses.loss_storages import RESIZES_LOSS, hold_loss_elements
from fxckpt.torch_private import size_hint
from tests.passes.graphs import storages_of, traced
from tests.steps import peak_of

aten = torch.ops.aten


def test_storages_of_an_example() -> None:
    """A mean over 4 x 4 elements holds 64 bytes, and so does what is a view of it."""

    def f(x: Tensor, y: Tensor) -> Tensor:
        return aten.mse_loss.default(x, y).view(1).exp()

    graph = traced(f, torch.rand(4, 4), torch.rand(4, 4)).graph
    hold_loss_elements(graph)
    assert_expected_inline(
        storages_of(graph),
        """\
x_1: input: 64 B from 0
y_1: input: 64 B from 0
mse_loss = mse_loss(x_1, y_1): 64 B from 0
view = view(mse_loss, [1]): 64 B from 0
exp = exp(view): 4 B from 0""",
    )


@pytest.mark.parametrize("reduction", [0, 1, 2])
@pytest.mark.parametrize("op", sorted(RESIZES_LOSS, key=str), ids=str)
def test_storages_are_those_of_kernels(op: torch._ops.OpOverload, reduction: int) -> None:
    """Kernels leave as many bytes as the pass says; torch may have mended them."""
    extra = () if op is not aten.binary_cross_entropy.default else (None,)

    def f(x: Tensor, y: Tensor) -> Tensor:
        return op(x, y, *extra, reduction)

    x, y = torch.rand(4, 4), torch.rand(4, 4)
    graph = traced(f, x, y).graph
    hold_loss_elements(graph)
    (node,) = graph.find_nodes(op="call_function", target=op)
    assert (
        size_hint(node.meta["val"].untyped_storage().nbytes()) == f(x, y).untyped_storage().nbytes()
    )


class Regression(nn.Module):
    """A layer, and the mean of its squared errors."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(64, 64)

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.mse_loss(self.layer(x).tanh(), x)


def test_peak_of_a_mean_squared_error() -> None:
    """The measured peak of a step is the plan's, to the byte."""
    backend = fxckpt.Backend(inner="aot_eager")
    assert peak_of(backend, lambda: (Regression(), torch.randn(512, 64))) == (
        backend.plans[0].peak_bytes
    )
