"""Properties of the dispatcher's ops."""

from __future__ import annotations

import operator

import pytest
import torch
from torch import fx

from fxckpt.torch_private import has_effect, holds_python, overloads_of

aten = torch.ops.aten


def test_overloads_of_an_op() -> None:
    """A packet stands for all its overloads, an overload for itself, a function for none."""
    assert overloads_of(aten.add.Tensor) == [aten.add.Tensor]
    assert {aten.add.Tensor, aten.add.Scalar} <= set(overloads_of(aten.add))
    assert overloads_of(torch.add) == overloads_of("aten::add") == []


def test_a_custom_op_has_one_overload() -> None:
    """The definition that the decorator returns stands for the op."""
    with torch.library._scoped_library("fxckpt_private", "FRAGMENT"):

        @torch.library.custom_op("fxckpt_private::twice", mutates_args=())
        def twice(x: torch.Tensor) -> torch.Tensor:
            return x * 2

        assert overloads_of(twice) == [torch.ops.fxckpt_private.twice.default]


@pytest.mark.parametrize("target", [aten.sin.default, aten.add_.Tensor, operator.add, "sin"])
def test_usual_ops_have_no_effect(target: object) -> None:
    """Ops without an effect token have none, and neither do functions."""
    assert not has_effect(target)


def test_a_print_has_an_effect() -> None:
    """An op that torch orders by effect tokens has one."""
    assert has_effect(aten._print.default)


def test_hooks_in_python_are_found() -> None:
    """A graph that calls a traced hook holds Python; plain functions are no hooks."""
    from torch._dynamo import _trace_wrapped_higher_order_op as wrapped

    graph = fx.Graph()
    x = graph.placeholder("x")
    graph.call_function(operator.add, (x, x))
    assert not holds_python(graph)
    graph.call_function(wrapped.trace_wrapped, (x,))
    assert holds_python(graph)
