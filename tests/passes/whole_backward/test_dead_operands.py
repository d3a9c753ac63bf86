"""Dead operands: results of a whole backward go into operands that die in it."""

from __future__ import annotations

import torch
from expecttest import assert_expected_inline
from torch import Tensor

from fxckpt.passes.whole_backward.dead_operands import write_where_dead
from tests.passes.graphs import text_of, traced


def whole(gradient: Tensor, saved: Tensor) -> Tensor:
    """A recomputed chain, its gradient, and a copy as compiled autograd makes it."""
    result = gradient * saved.sin().cos()
    empty = torch.ops.aten.new_empty_strided.default(result, [8], [1])
    return torch.ops.aten.copy.default(empty, result)


def test_inputs_are_left_alone() -> None:
    """Results go into what the graph itself made, and a copy into the memory made for it."""
    graph = traced(whole, torch.ones(8), torch.ones(8)).graph
    write_where_dead(graph)
    graph.lint()
    assert_expected_inline(
        text_of(graph),
        """\
gradient_1: input
saved_1: input
sin = sin(saved_1)
cos = cos(sin, out=sin)
mul = mul(gradient_1, cos, out=cos)
new_empty_strided = new_empty_strided(mul, [8], [1])
copy = copy_(new_empty_strided, mul)
return copy""",
    )


def test_values_read_later_are_kept() -> None:
    """What a later op or the output reads is not written into."""

    def read_later(gradient: Tensor, saved: Tensor) -> tuple[Tensor, Tensor]:
        sine = saved.sin()
        return sine.cos() * gradient, sine

    graph = traced(read_later, torch.ones(8), torch.ones(8)).graph
    write_where_dead(graph)
    assert "out=sin" not in text_of(graph)
