"""Layouts: what a backward makes for its convolutions is channels last; what it returns is as it was."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx

from fxckpt.passes.inductor.channels_last import to_channels_last
from fxckpt.torch_private.inductor.layouts import FORCE_STRIDE_ORDER

aten = torch.ops.aten


def gradients(gradient: Tensor, x: Tensor, w: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The backward of a convolution of ``x.sin()``, which runs again; the sine is returned too."""
    n = x.dim() - 2
    y = x.sin()
    of_y, of_w, _ = aten.convolution_backward(
        gradient.neg(),
        y,
        w,
        None,
        [1] * n,
        [1] * n,
        [1] * n,
        False,
        [0] * n,
        1,
        [True, True, False],
    )
    return of_y * x.cos(), of_w, y


def laid_out(*inputs: Tensor, tracing_mode: str = "fake") -> tuple[fx.GraphModule, fx.Node]:
    gm = make_fx(gradients, tracing_mode=tracing_mode)(*inputs)
    to_channels_last(gm)
    gm.graph.lint()
    gm.recompile()
    for made, expected in zip(gm(*inputs), gradients(*inputs), strict=True):
        torch.testing.assert_close(made, expected)
    (call,) = gm.graph.find_nodes(op="call_function", target=aten.convolution_backward.default)
    return gm, call


def images(channels: int, side: int) -> tuple[Tensor, Tensor, Tensor]:
    return (
        torch.randn(2, 4, side, side),
        torch.randn(2, channels, side, side),
        torch.randn(4, channels, 3, 3),
    )


def test_the_gradient_and_the_input_of_a_convolution_are_channels_last() -> None:
    _, call = laid_out(*images(3, 8))
    for image in call.args[:2]:
        assert isinstance(image, fx.Node)
        assert image.target is FORCE_STRIDE_ORDER
        assert image.meta["val"].is_contiguous(memory_format=torch.channels_last)


def test_what_is_returned_keeps_its_layout() -> None:
    gm, call = laid_out(*images(3, 8))
    returned = gm.graph.output_node().args[0]
    assert returned[2] is call.args[1].args[0], "the sine itself"
    assert gm(*images(3, 8))[2].is_contiguous()


def test_inputs_of_the_backward_lie_as_the_forward_left_them() -> None:
    def weight_gradient(gradient: Tensor, x: Tensor, w: Tensor) -> Tensor:
        return aten.convolution_backward(
            gradient, x, w, None, [1, 1], [1, 1], [1, 1], False, [0, 0], 1, [False, True, False]
        )[1]

    gm = make_fx(weight_gradient, tracing_mode="fake")(*images(3, 8))
    to_channels_last(gm)
    assert not gm.graph.find_nodes(op="call_function", target=FORCE_STRIDE_ORDER)


@pytest.mark.parametrize(
    ("inputs", "forced"),
    [
        (images(1, 8), 1),
        (images(3, 1), 0),
        ((torch.randn(2, 4, 8), torch.randn(2, 3, 8), torch.randn(4, 3, 3)), 0),
    ],
    ids=["one channel", "one pixel", "a signal"],
)
def test_what_has_but_one_layout_is_left_alone(inputs: tuple[Tensor, ...], forced: int) -> None:
    gm, _ = laid_out(*inputs)
    assert len(gm.graph.find_nodes(op="call_function", target=FORCE_STRIDE_ORDER)) == forced


def test_sizes_that_vary_are_left_alone() -> None:
    gm, _ = laid_out(*images(3, 8), tracing_mode="symbolic")
    assert not gm.graph.find_nodes(op="call_function", target=FORCE_STRIDE_ORDER)


def test_who_looks_at_memory_itself_sees_it_as_it_was() -> None:
    def of_memory(gradient: Tensor, x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
        y = x.sin()
        of_y, of_w, _ = aten.convolution_backward(
            gradient, y, w, None, [1, 1], [1, 1], [1, 1], False, [0, 0], 1, [True, True, False]
        )
        return of_y, of_w, y.view(-1).as_strided((2, 3), (3, 1)).exp(), y * 2

    inputs = images(3, 8)
    gm = make_fx(of_memory, tracing_mode="fake")(*inputs)
    to_channels_last(gm)
    gm.recompile()
    for made, expected in zip(gm(*inputs), of_memory(*inputs), strict=True):
        torch.testing.assert_close(made, expected)
    (forced,) = gm.graph.find_nodes(op="call_function", target=FORCE_STRIDE_ORDER)
    assert {user.target for user in forced.users} == {
        aten.convolution_backward.default,
        aten.mul.Tensor,
    }
