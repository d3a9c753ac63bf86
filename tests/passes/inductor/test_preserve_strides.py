"""Preserve strides: operands of ``as_strided`` made in a backward keep their traced layout."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from expecttest import assert_expected_inline
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx

from fxckpt.passes.inductor.preserve_strides import preserve_strides
from fxckpt.torch_private.inductor.layouts import FORCE_STRIDE_ORDER
from tests.passes.graphs import text_of


def rewritten(function: Callable[[Tensor], Tensor], mode: str = "fake") -> fx.GraphModule:
    """The graph of a function of a 4 x 6 tensor, after the pass; it computes the same."""
    x = torch.randn(4, 6)
    gm = make_fx(function, tracing_mode=mode)(x)
    preserve_strides(gm.graph)
    gm.graph.lint()
    gm.recompile()
    assert torch.equal(gm(x), function(x))
    return gm


def test_operand_is_forced() -> None:
    """The read of memory goes through a node that forces the traced strides."""
    gm = rewritten(lambda x: x.exp().as_strided((2, 3), (3, 1)))
    assert_expected_inline(
        text_of(gm.graph),
        """\
x_1: input
exp = exp(x_1)
inductor_force_stride_order_default = inductor_force_stride_order(exp, [6, 1])
as_strided = as_strided(inductor_force_stride_order_default, [2, 3], [3, 1])
return as_strided""",
    )


def test_base_of_a_view_is_forced() -> None:
    """Behind views, the value that they alias is forced, once for all readers."""
    gm = rewritten(
        lambda x: x.exp().t().as_strided((3,), (2,)) + x.exp().view(-1).as_strided((3,), (1,))
    )
    forced = gm.graph.find_nodes(op="call_function", target=FORCE_STRIDE_ORDER)
    assert [str(node.args[0]) for node in forced] == ["exp", "exp_1"]


@pytest.mark.parametrize(
    ("function", "mode"),
    [
        (lambda x: x.as_strided((2, 3), (3, 1)).exp(), "fake"),
        (lambda x: x.exp().as_strided((2, 3), (3, 1)), "symbolic"),
    ],
    ids=["an input", "dynamic sizes"],
)
def test_other_operands_are_left_alone(function: Callable[[Tensor], Tensor], mode: str) -> None:
    """Inputs have the layout of the forward; strides of dynamic sizes are no numbers."""
    gm = rewritten(function, mode)
    assert not gm.graph.find_nodes(op="call_function", target=FORCE_STRIDE_ORDER)
