"""The autograd engine's state, as seen from inside and outside of a backward."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fxckpt.torch_private import (
    after_backward,
    below_autograd,
    current_backward,
    is_transformed,
    surrounding_hooks,
)


class Asking(torch.autograd.Function):
    """Calls ``ask`` in its backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, ask: Any) -> Tensor:
        ctx.ask = ask
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        ctx.ask()
        return grad, None


def test_each_backward_has_an_identity() -> None:
    """There is none outside; two nodes of one backward see one, a second backward another."""
    seen: list[object] = []
    x = torch.ones(2, requires_grad=True)
    ask = lambda: seen.append(current_backward())  # noqa: E731
    for _ in range(2):
        Asking.apply(Asking.apply(x, ask), ask).sum().backward()
    assert current_backward() is None
    assert seen[0] == seen[1] and seen[2] == seen[3] and seen[0] != seen[2]


def test_callback_runs_at_the_end_of_backward() -> None:
    """It runs after all nodes, and once."""
    events: list[str] = []
    x = torch.ones(2, requires_grad=True)
    inner = Asking.apply(x, lambda: events.append("inner"))
    outer = Asking.apply(inner, lambda: after_backward(lambda: events.append("end")))
    outer.sum().backward()
    assert events == ["inner", "end"]


def test_ops_below_autograd_have_no_history() -> None:
    """Below autograd, ops make no graph, and autocast does not apply."""
    x = torch.ones(2, 2, requires_grad=True)
    with torch.autocast("cpu", dtype=torch.bfloat16), below_autograd():
        y = x @ x
        assert torch.is_grad_enabled()
    assert y.grad_fn is None and y.dtype is torch.float32


def test_hooks_around_are_the_innermost() -> None:
    """The innermost pair of hooks is returned, and None without hooks."""
    assert surrounding_hooks() is None
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t):
        pack, unpack = (lambda t: (t,)), (lambda t: t[0])
        with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
            assert surrounding_hooks() == (pack, unpack)


def test_a_transform_is_seen() -> None:
    """A function under ``torch.func.grad`` knows it."""
    seen: list[bool] = []

    def asking(x: Tensor) -> Tensor:
        seen.append(is_transformed())
        return x.sum()

    torch.func.grad(asking)(torch.ones(2))
    asking(torch.ones(2))
    assert seen == [True, False]
