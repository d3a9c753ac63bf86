"""Channels last: images of a backward's convolutions are forced, outputs keep their layout."""

from __future__ import annotations

import pytest
import torch
from expecttest import assert_expected_inline
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx

from fxckpt.passes.inductor.channels_last import to_channels_last
from fxckpt.torch_private.inductor.layouts import FORCE_STRIDE_ORDER
from tests.passes.graphs import text_of

aten = torch.ops.aten


def gradients(gradient: Tensor, x: Tensor, w: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The backward of a convolution of a recomputed ``x.sin()``, which is returned too."""
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


def with_layouts(*inputs: Tensor, tracing_mode: str = "fake") -> tuple[fx.GraphModule, fx.Node]:
    gm = make_fx(gradients, tracing_mode=tracing_mode)(*inputs)
    to_channels_last(gm.graph)
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


def test_both_images_of_a_convolution_are_forced() -> None:
    """The incoming gradient and the input are forced to channels last."""
    _, call = with_layouts(*images(3, 8))
    for image in call.args[:2]:
        assert isinstance(image, fx.Node)
        assert image.target is FORCE_STRIDE_ORDER
        assert image.meta["val"].is_contiguous(memory_format=torch.channels_last)


def test_outputs_keep_their_layout() -> None:
    """An image that is returned, too, is returned as it was."""
    gm, call = with_layouts(*images(3, 8))
    returned = gm.graph.output_node().args[0]
    assert returned[2] is call.args[1].args[0], "the sine itself"
    assert gm(*images(3, 8))[2].is_contiguous()


def test_inputs_of_the_backward_are_left_alone() -> None:
    """Inputs have the layout in which the forward left them."""

    def weight_gradient(gradient: Tensor, x: Tensor, w: Tensor) -> Tensor:
        return aten.convolution_backward(
            gradient, x, w, None, [1, 1], [1, 1], [1, 1], False, [0, 0], 1, [False, True, False]
        )[1]

    gm = make_fx(weight_gradient, tracing_mode="fake")(*images(3, 8))
    to_channels_last(gm.graph)
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
def test_values_of_one_layout_are_left_alone(inputs: tuple[Tensor, ...], forced: int) -> None:
    """Images of one channel or one pixel, and signals, are not forced."""
    gm, _ = with_layouts(*inputs)
    assert len(gm.graph.find_nodes(op="call_function", target=FORCE_STRIDE_ORDER)) == forced


def test_dynamic_sizes_are_left_alone() -> None:
    """Strides of a dynamic image would not be numbers."""
    gm, _ = with_layouts(*images(3, 8), tracing_mode="symbolic")
    assert not gm.graph.find_nodes(op="call_function", target=FORCE_STRIDE_ORDER)


def test_as_strided_reads_the_unforced_image() -> None:
    """Readers of memory, also behind views, keep the image in its layout."""

    def of_memory(gradient: Tensor, x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
        y = x.sin()
        of_y, of_w, _ = aten.convolution_backward(
            gradient, y, w, None, [1, 1], [1, 1], [1, 1], False, [0, 0], 1, [True, True, False]
        )
        return of_y, of_w, y.view(-1).as_strided((2, 3), (3, 1)).exp(), y * 2

    inputs = images(3, 8)
    gm = make_fx(of_memory, tracing_mode="fake")(*inputs)
    to_channels_last(gm.graph)
    gm.recompile()
    for made, expected in zip(gm(*inputs), of_memory(*inputs), strict=True):
        torch.testing.assert_close(made, expected)
    (forced,) = gm.graph.find_nodes(op="call_function", target=FORCE_STRIDE_ORDER)
    assert {user.target for user in forced.users} == {
        aten.convolution_backward.default,
        aten.mul.Tensor,
    }


def test_graph_of_a_recomputed_image() -> None:
    """The convolution reads a forced image; the output returns the image itself."""

    def f(gradient: Tensor, x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        y = x.sin()
        mask = [False, True, False]
        call = (gradient, y, w, None, [1, 1], [1, 1], [1, 1], False, [0, 0], 1, mask)
        return aten.convolution_backward(*call)[1], y

    gm = make_fx(f, tracing_mode="fake")(*images(3, 8))
    to_channels_last(gm.graph)
    options = ", None, [1, 1], [1, 1], [1, 1], False, [0, 0], 1, [False, True, False]"
    assert_expected_inline(
        text_of(gm.graph).replace(options, ""),
        """\
gradient_1: input
x_1: input
w_1: input
sin = sin(x_1)
inductor_force_stride_order_default = inductor_force_stride_order(sin, [192, 1, 24, 3])
convolution_backward = convolution_backward(gradient_1, inductor_force_stride_order_default, w_1)
getitem = getitem(convolution_backward, 0)
getitem_1 = getitem(convolution_backward, 1)
getitem_2 = getitem(convolution_backward, 2)
return [getitem_1, sin]""",
    )
