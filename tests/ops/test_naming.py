"""Names of values: ``fxckpt.name``."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx

import fxckpt
from fxckpt.policies import (
    save_any_except,
    save_only,
)


def test_name_is_identity_in_eager_mode() -> None:
    """In eager mode, fxckpt.name returns its tensor."""
    x = torch.randn(3, requires_grad=True)
    assert fxckpt.name(x, "x") is x


def test_name_survives_traces_and_leaves_no_op() -> None:
    """A name survives every trace and leaves no op in the planned graphs."""

    def f(x: Tensor) -> Tensor:
        y = fxckpt.name(x.sin().view(-1), "y")
        y = y.mul_(2)
        return fxckpt.name(y, "z").cos().sum()

    x = torch.randn(4, 2, requires_grad=True)
    named = torch.ops.fxckpt.named.default
    for traced in (make_fx(f)(x), fx.symbolic_trace(f), make_fx(torch.func.vmap(f))(x)):
        assert [node.args[1] for node in traced.graph.nodes if node.target is named] == ["y", "z"]
        traced.graph.eliminate_dead_code()
        assert len(traced.graph.find_nodes(op="call_function", target=named)) == 2
    for backend in ("eager", "aot_eager"):
        assert torch.equal(torch.compile(f, backend=backend, fullgraph=True)(x), f(x))
    made = fxckpt.rewrite(f, save_only("z"), example_inputs=(x,))
    made(x).backward()
    assert made.plan.saved == ("mul",)
    assert not any(
        node.target is named
        for half in (made.forward_graph, made.backward_graph)
        for node in half.graph.nodes
    )
    expected = torch.autograd.grad((x.sin() * 2).cos().sum(), x)
    assert torch.equal(x.grad, *expected)


def test_names_prevent_common_subexpression_elimination() -> None:
    """Equal values of two names stay two values."""

    def f(x: Tensor) -> Tensor:
        return (fxckpt.name(x.sin(), "a") * fxckpt.name(x.sin(), "b")).sum()

    x = torch.randn(3, requires_grad=True)
    assert fxckpt.plan(f, x, policy=save_only("a")).saved == ("sin",)
    assert fxckpt.plan(f, x, policy=save_only("b")).saved == ("sin_1",)


def test_value_with_several_names() -> None:
    """Each name of a value selects it, one given to its view included."""

    def f(x: Tensor) -> Tensor:
        y = fxckpt.name(fxckpt.name(x.sin(), "a"), "b")
        return fxckpt.name(y.view(-1), "c").cos().sum()

    x = torch.randn(3, requires_grad=True)
    for label in "abc":
        assert fxckpt.plan(f, x, policy=save_only(label)).saved == ("sin",)
        assert "sin" in fxckpt.plan(f, x, policy=save_any_except(label)).recomputed


def test_name_of_an_input_is_refused() -> None:
    """Naming a graph input in a policy raises; a glob may match one in passing."""

    def f(x: Tensor, w: Tensor) -> Tensor:
        fxckpt.name(x, "x"), fxckpt.name(w.t(), "w")
        return fxckpt.name(x @ w.t(), "product").sin().sum()

    x, w = torch.randn(3, 3), torch.randn(3, 3, requires_grad=True)
    for label in "xw":
        for source in (f, fx.symbolic_trace(f)):
            with pytest.raises(
                fxckpt.PolicyMatchesNothing, match=f"'{label}' names an input of the graph"
            ):
                fxckpt.rewrite(source, save_only(label), example_inputs=(x, w))
    assert fxckpt.rewrite(f, save_only("*"), example_inputs=(x, w)).plan.saved == ("mm",)


def test_empty_name_is_refused_while_tracing() -> None:
    """An empty name raises while tracing."""
    with pytest.raises(fxckpt.InvalidOption, match="give a tensor and a text"):
        make_fx(lambda x: fxckpt.name(x, ""))(torch.ones(2))
