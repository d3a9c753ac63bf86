"""Writes that the tape cannot undo: right gradients, or an error."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import fxckpt
from tests.eager.regions import Checkpoint, plain


@pytest.mark.parametrize(
    "write",
    [lambda s: s._values().mul_(3), lambda s: s[0].mul_(3)],
    ids=["values of a sparse tensor", "view of a subclass"],
)
def test_writes_beyond_the_tape_are_never_silent(write: Callable[[Any], Any]) -> None:
    """A write that the tape cannot follow raises an error or leaves the gradients right."""
    from torch.testing._internal.two_tensor import TwoTensor

    def region(x: Tensor) -> Tensor:
        sparse = write.__code__.co_names[0] == "_values"
        y: Any = (
            x.detach().relu().to_sparse() if sparse else TwoTensor(x.detach() * 2, x.detach() * 2)
        )
        write(y)
        return torch.sparse.mm(y, x.sin()) if sparse else (x * y.a).exp()

    x = torch.randn(4, 4, requires_grad=True)
    (expected,) = torch.autograd.grad(region(x).sum(), x)
    try:
        (got,) = torch.autograd.grad(fxckpt.checkpoint(region, x).sum(), x)
    except fxckpt.CheckpointError:
        return
    assert torch.equal(expected, got)


def test_a_region_may_write_to_its_closure() -> None:
    """A region that writes to a tensor of its closure has the results of a plain call."""

    def run(checkpoint: Checkpoint) -> list[Tensor]:
        torch.manual_seed(0)
        x, state = torch.randn(4, requires_grad=True), torch.ones(4)

        def region(x: Tensor) -> Tensor:
            y = x * state.clone()
            state.mul_(3)
            return y.exp() * state.clone().sin()

        out = checkpoint(region, x)
        return [out.detach(), state.clone(), *torch.autograd.grad(out.sum(), x), state]

    assert all(map(torch.equal, run(plain), run(fxckpt.checkpoint)))


def test_writing_a_regions_result_changes_no_gradient() -> None:
    """An in-place write to a region's result leaves the gradients right."""
    x = torch.randn(4, requires_grad=True)
    out = fxckpt.checkpoint(lambda x: x.sinh().mul(2), x)
    out += 1
    out.sum().backward()
    assert x.grad is not None and torch.equal(x.grad, 2 * x.detach().cosh())
