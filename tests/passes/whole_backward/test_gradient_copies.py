"""Gradient copies: copies in a parameter's layout come last."""

from __future__ import annotations

import torch
from expecttest import assert_expected_inline
from torch import Tensor

from fxckpt.passes.whole_backward.gradient_copies import delay_gradient_copies
from tests.passes.graphs import text_of, traced


def accumulated(gradient: Tensor, saved: Tensor) -> tuple[Tensor, Tensor]:
    """A gradient in another layout than its parameter, copied as compiled autograd does."""
    first = (gradient @ saved).t()
    empty = torch.ops.aten.new_empty_strided.default(first, [4, 4], [4, 1])
    copied = torch.ops.aten.copy.default(empty, first)
    return gradient @ saved.cos(), copied


def test_copies_only_the_output_reads_come_last() -> None:
    """The copy waits until nothing else is to run."""
    graph = traced(accumulated, torch.ones(4, 4), torch.ones(4, 4)).graph
    delay_gradient_copies(graph)
    graph.lint()
    assert_expected_inline(
        text_of(graph),
        """\
gradient_1: input
saved_1: input
mm = mm(gradient_1, saved_1)
t = t(mm)
cos = cos(saved_1)
mm_1 = mm(gradient_1, cos)
new_empty_strided = new_empty_strided(t, [4, 4], [4, 1])
copy = copy(new_empty_strided, t)
return [mm_1, copy]""",
    )


def test_a_copy_that_is_read_stays() -> None:
    """A hook of the parameter may read it."""

    def hooked(gradient: Tensor, saved: Tensor) -> tuple[Tensor, Tensor]:
        other, copied = accumulated(gradient, saved)
        return other, copied * 2

    graph = traced(hooked, torch.ones(4, 4), torch.ones(4, 4)).graph
    before = text_of(graph)
    delay_gradient_copies(graph)
    assert text_of(graph) == before


def test_a_copy_of_a_written_input_stays() -> None:
    """The end of the graph writes the parameter whose old value is another one's gradient."""

    def updated(parameter: Tensor, gradient: Tensor) -> Tensor:
        old = parameter.t()
        empty = torch.ops.aten.new_empty_strided.default(old, [4, 4], [4, 1])
        copied = torch.ops.aten.copy.default(empty, old)
        torch.ops.aten.copy_.default(parameter, parameter - gradient)
        return copied

    graph = traced(updated, torch.ones(4, 4), torch.ones(4, 4)).graph
    before = text_of(graph)
    delay_gradient_copies(graph)
    assert text_of(graph) == before
