"""Sink reshapes: merging views move behind element-wise ops up to a splitting view."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from expecttest import assert_expected_inline
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx

from fxckpt.passes.inductor.sink_reshapes import sink_reshapes
from tests.passes.graphs import text_of

aten = torch.ops.aten


def traced(function: Callable[..., Any], *inputs: Tensor, mode: str = "fake") -> fx.GraphModule:
    return make_fx(function, tracing_mode=mode)(*inputs)


def unflattened(gm: fx.GraphModule) -> fx.GraphModule:
    sink_reshapes(gm.graph)
    gm.graph.lint()
    gm.recompile()
    return gm


def dims(gm: fx.GraphModule, target: Any) -> list[int]:
    return [
        node.meta["val"].dim() for node in gm.graph.find_nodes(op="call_function", target=target)
    ]


def softmax_gradient(x: Tensor, shift: Tensor, scale: Tensor) -> Tensor:
    """The logits in a loss over all but the last tokens, merged for the work in between."""
    rows, length, width = x.shape
    kept = length - 1
    flat = x[:, :-1].clone(memory_format=torch.contiguous_format).view(rows * kept, width)
    return torch.nn.functional.pad(
        ((flat - shift).exp() * scale).view(rows, kept, width), (0, 0, 0, 1)
    )


def operands(rows: int = 3, length: int = 5, width: int = 7) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    return torch.randn(rows, length, width), torch.randn(rows * (length - 1), 1), torch.randn(width)


def test_pointwise_ops_run_in_the_split_shape() -> None:
    """Ops keep their names and get the shape before the merge."""
    gm = traced(softmax_gradient, *operands())
    assert dims(gm, aten.exp.default) == [2]
    names = {node.name for node in gm.graph.find_nodes(op="call_function", target=aten.exp.default)}
    moved = unflattened(gm)
    assert (
        dims(moved, aten.exp.default)
        == dims(moved, aten.sub.Tensor)
        == dims(moved, aten.mul.Tensor)
        == [3]
    )
    assert names == {
        node.name for node in gm.graph.find_nodes(op="call_function", target=aten.exp.default)
    }


@given(st.integers(1, 4), st.integers(2, 5), st.integers(1, 4))
def test_every_element_is_the_same(rows: int, length: int, width: int) -> None:
    """The rewritten graph computes the same, whatever the sizes."""
    inputs = operands(rows, length, width)
    gm = traced(softmax_gradient, *inputs)
    expected = gm(*inputs)
    assert torch.equal(unflattened(gm)(*inputs), expected)


def test_other_readers_get_the_merged_value() -> None:
    """A new view merges the result for them."""

    def both(x: Tensor, shift: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
        flat = x[:, :-1].clone(memory_format=torch.contiguous_format).view(12, 7)
        shifted = flat - shift
        return shifted.amax(1, keepdim=True), shifted.exp().view(3, 4, 7)

    gm = traced(both, *operands())
    expected = gm(*operands())
    unflattened(gm)
    assert dims(gm, aten.sub.Tensor) == [3]
    (amax,) = gm.graph.find_nodes(op="call_function", target=aten.amax.default)
    assert amax.args[0].meta["val"].shape == (12, 7)
    assert all(
        torch.equal(one, other) for one, other in zip(gm(*operands()), expected, strict=True)
    )


def test_dynamic_sizes_are_split_too() -> None:
    """A symbolic trace serves other sizes."""
    gm = traced(softmax_gradient, *operands(), mode="symbolic")
    unflattened(gm)
    assert dims(gm, aten.exp.default) == [3]
    larger = operands(4, 6, 7)
    assert torch.equal(gm(*larger), softmax_gradient(*larger))


def test_first_merge_gives_the_sizes() -> None:
    """Its sizes are known before all ops that other readers read."""

    def two(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        rows, length, width = x.shape
        kept = length - 1
        one = x[:, :-1].clone(memory_format=torch.contiguous_format).view(rows * kept, width).exp()
        total = one.sum(1)
        other = (
            y[:, :-1]
            .clone(memory_format=torch.contiguous_format)
            .view(y.shape[0] * (y.shape[1] - 1), y.shape[2])
        )
        return total, (other + one).view(rows, kept, width)

    inputs = operands()[0], operands()[0].flip(0)
    for mode in ("fake", "symbolic"):
        gm = unflattened(traced(two, *inputs, mode=mode))
        assert dims(gm, aten.add.Tensor) == [3]
        assert all(
            torch.equal(one, other) for one, other in zip(gm(*inputs), two(*inputs), strict=True)
        )


@pytest.mark.parametrize(
    "function",
    [
        pytest.param(lambda x: x.view(15, 7).exp().view(3, 5, 7), id="nothing is sliced"),
        pytest.param(
            lambda x: x[:, :-1].clone(memory_format=torch.contiguous_format).view(12, 7).exp(),
            id="nothing is split",
        ),
        pytest.param(
            lambda x: (
                x[:, :-1].clone(memory_format=torch.contiguous_format).view(12, 7).view(3, 4, 7)
            ),
            id="nothing is computed",
        ),
        pytest.param(
            lambda x: (
                x[:, :-1]
                .clone(memory_format=torch.contiguous_format)
                .view(12, 7)
                .exp()
                .view(4, 3, 7)
            ),
            id="split otherwise",
        ),
        pytest.param(
            lambda x: (
                x[:, :-1]
                .clone(memory_format=torch.contiguous_format)
                .view(12, 7)
                .cumsum(0)
                .view(3, 4, 7)
            ),
            id="no such op",
        ),
    ],
)
def test_other_views_stay(function: Callable[[Tensor], Tensor]) -> None:
    """A graph without the whole pattern is not changed."""
    gm = traced(function, operands()[0])
    before = str(gm.graph)
    assert str(unflattened(gm).graph) == before


def test_graph_of_a_sliced_exponential() -> None:
    """Before: slice, merge, exp, split. After: slice, exp."""

    def f(x: Tensor) -> Tensor:
        kept = x[:, :-1].clone(memory_format=torch.contiguous_format)
        return kept.view(12, 7).exp().view(3, 4, 7)

    gm = traced(f, operands()[0])
    assert_expected_inline(
        text_of(gm.graph),
        """\
x_1: input
slice_1 = slice(x_1, 1, 0, -1)
clone = clone(slice_1, memory_format=torch.contiguous_format)
view = view(clone, [12, 7])
exp = exp(view)
view_1 = view(exp, [3, 4, 7])
return view_1""",
    )
    assert_expected_inline(
        text_of(unflattened(gm).graph),
        """\
x_1: input
slice_1 = slice(x_1, 1, 0, -1)
clone = clone(slice_1, memory_format=torch.contiguous_format)
exp = exp(clone)
return exp""",
    )
