"""Merging equal calls: what must stay apart stays apart."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional as F

import fxckpt
from fxckpt.torch_private import storage_id
from tests.joints import normalize


def calls(f: Callable[..., object], *inputs: Tensor) -> list[str]:
    """Return the ops left after normalizing the trace of ``f``."""
    traced = make_fx(f, tracing_mode="fake")(*inputs)
    normalize(traced)
    return [str(n.target) for n in traced.graph.nodes if n.op == "call_function"]


def test_equal_calls_are_one() -> None:
    assert calls(lambda x: x.sin() + x.sin(), torch.ones(3)).count("aten.sin.default") == 1


def test_arguments_of_other_types_differ() -> None:
    assert (
        calls(lambda x: (x + 1) * (x + 1.0) * (x + True), torch.ones(3)).count("aten.add.Tensor")
        == 3
    )


def test_random_ops_stay() -> None:
    ops = calls(lambda x: F.dropout(x) + F.dropout(x), torch.ones(3))
    assert sum("dropout" in op or "bernoulli" in op for op in ops) == 2


def test_what_a_merged_value_shared_its_storage_with_is_known() -> None:
    """Items and views of the second call belong to the first one now."""

    def f(x: Tensor) -> tuple[Tensor, ...]:
        return (
            x.topk(2).indices * 1,
            x.topk(2).values.view(4) * 1,
            x.sin() * 1,
            x.sin()[0].view(3) * 1,
        )

    traced = make_fx(f, tracing_mode="fake")(torch.ones(2, 3))
    normalize(traced)
    for node in traced.graph.nodes:
        if str(node.target).startswith(("aten.view", "aten.select")):
            assert storage_id(node.meta["val"]) == storage_id(node.args[0].meta["val"]), node
        if "getitem" in node.name:
            parent, item = node.args
            assert storage_id(node.meta["val"]) == storage_id(parent.meta["val"][item])


def test_reads_around_a_write_stay() -> None:
    def f(x: Tensor) -> Tensor:
        y = x.clone()
        before = y.sin()
        y.add_(1)
        return before + y.sin()

    assert calls(f, torch.ones(3)).count("aten.sin.default") == 2


def test_outputs_stay_the_user_s_own() -> None:
    def f(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        y = x.sin()
        return x.sin(), x.sin(), (y * y).sum()

    x = torch.ones(3, requires_grad=True)
    a, b, loss = torch.compile(f, backend=fxckpt.Backend(inner="aot_eager"))(x)
    with torch.no_grad():
        a.mul_(2)
    assert torch.equal(b, x.sin())
    loss.backward()
    assert torch.equal(x.grad, 2 * x.detach().sin() * x.detach().cos())
