"""Replay: equal numbers, from as few recomputed ops as the backward needs."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
import torch.utils.checkpoint as torchs
from torch import Tensor, nn

import fxckpt
from tests.eager.regions import (
    REGIONS,
    TWICE,
    Checkpoint,
    Counting,
    Region,
    dropouts,
    ops_of_the_backward,
    plain,
    products,
    step,
)
from tests.steps import differing


@pytest.mark.parametrize("region", REGIONS)
def test_a_region_has_a_plain_calls_gradients(region: Region) -> None:
    """Outputs, gradients and random state after a region are exactly those of a plain call."""
    assert differing(step(region, plain), step(region, fxckpt.checkpoint)) == []


@pytest.mark.parametrize("region", TWICE)
def test_a_region_can_be_differentiated_twice(region: Region) -> None:
    assert (
        differing(step(region, plain, twice=True), step(region, fxckpt.checkpoint, twice=True))
        == []
    )


def nested(region: Region, x: Tensor, w: Tensor) -> Any:
    return fxckpt.checkpoint(lambda a: fxckpt.checkpoint(region, a.cos(), w).tanh(), x)


def torch_inside(region: Region, x: Tensor, w: Tensor) -> Any:
    return fxckpt.checkpoint(
        lambda a: fxckpt.checkpoint(region, a.cos(), w, engine="rerun").tanh(), x
    )


def torch_outside(region: Region, x: Tensor, w: Tensor) -> Any:
    return fxckpt.checkpoint(
        lambda a: fxckpt.checkpoint(region, a.cos(), w).tanh(), x, engine="rerun"
    )


def unnested(region: Region, x: Tensor, w: Tensor) -> Any:
    return region(x.cos(), w).tanh()


@pytest.mark.parametrize("outer", [nested, torch_inside, torch_outside])
@pytest.mark.parametrize("twice", [False, True])
def test_regions_of_both_engines_nest(outer: Checkpoint, twice: bool) -> None:
    assert (
        differing(step(dropouts, unnested, twice=twice), step(dropouts, outer, twice=twice)) == []
    )


def test_repeated_backwards_give_the_same_gradients() -> None:
    """Each further backward through a retained region gives the same gradients."""
    x, w = torch.randn(4, 4, requires_grad=True), torch.randn(4, 4)
    out = fxckpt.checkpoint(dropouts, x, w).sum()
    grads = [torch.autograd.grad(out, x, retain_graph=True)[0] for _ in range(3)]
    assert all(torch.equal(grad, grads[0]) for grad in grads)


def test_only_what_the_backward_asks_for_runs_again() -> None:
    x, w = torch.randn(4, 4, requires_grad=True), torch.randn(4, 4)

    def region(x: Tensor) -> Tensor:
        unused = (x @ w).exp().detach().cosh()
        return (x @ w).sin().tan().add(unused.sum() * 0)

    ran = ops_of_the_backward(fxckpt.checkpoint(region, x))
    # sin's argument is a product; tan keeps its own result, which takes both again. Nothing of the
    # sum is recomputed.
    assert (ran["mm"], ran["sin"], ran["tan"], ran["exp"], ran["cosh"]) == (1 + 1, 1, 1, 0, 0)


def test_nested_regions_replay_each_op_once() -> None:
    """The backward runs each op of nested regions once, whether inner or outer."""
    x = torch.randn(4, requires_grad=True)
    ran = ops_of_the_backward(
        fxckpt.checkpoint(lambda a: fxckpt.checkpoint(lambda b: b.sin().exp(), a.sinh()), x)
    )
    assert (ran["sinh"], ran["sin"], ran["exp"]) == (1, 1, 1)


def test_repeated_saved_tensor_access_replays_twice_at_most() -> None:
    """An autograd function that reads ctx.saved_tensors many times costs at most two replays."""

    class Saved(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, *given: Tensor) -> Tensor:
            ctx.save_for_backward(*given)
            return torch.stack(given).sum(0)

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, ...]:
            return tuple(grad * ctx.saved_tensors[i].cos() for i in range(6))

    x = torch.randn(4, requires_grad=True)
    out = fxckpt.checkpoint(lambda x: Saved.apply(*[x.sinh() for _ in range(6)]), x)
    assert ops_of_the_backward(out)["sinh"] <= 2 * 6


def test_a_group_of_backwards_replays_once() -> None:
    x, z = torch.randn(4, requires_grad=True), torch.randn(4, requires_grad=True)
    a, b = fxckpt.checkpoint(lambda x, z: (x.sin().exp().sin(), z.sin().exp().sin()), x, z)
    with Counting() as counting, fxckpt.GraphExecGroup():
        a.sum().backward()
        b.sum().backward()
    assert counting.ran["exp"] == 2


def test_writing_a_regions_input_names_the_reading_op() -> None:
    """An in-place write to an input of a region raises an error that names the op that read it."""
    x, w = torch.randn(4, 4, requires_grad=True), torch.randn(4, 4)
    out = fxckpt.checkpoint(products, x, w, debug=True)
    w.add_(1)
    with pytest.raises(
        fxckpt.CheckpointError,
        match=r"written in place \(1 times\)[\s\S]*aten.mm.default in regions.py:\d+",
    ):
        out.sum().backward()


def test_other_data_in_a_parameter_is_an_error() -> None:
    w = nn.Parameter(torch.randn(4, 4))
    out = fxckpt.checkpoint(lambda x: (x @ w).sin(), torch.randn(4, 4))
    w.data = w.data * 2
    with pytest.raises(torchs.CheckpointError, match="given other data"):
        out.sum().backward()


def test_a_partial_backward_drops_its_recomputed_values() -> None:
    """Values recomputed for one partial backward are dropped, so the next computes them again."""
    x, z = torch.randn(4, requires_grad=True), torch.randn(4, requires_grad=True)
    out = fxckpt.checkpoint(
        lambda x, z: x.sin().exp().sin().sum() + z.sin().exp().sin().sum(), x, z
    )
    with Counting() as counting:
        torch.autograd.grad(out, x, retain_graph=True)
        torch.autograd.grad(out, x, retain_graph=True)
    assert counting.ran["exp"] == 2 * 2


def test_values_are_freed_as_the_backward_goes() -> None:
    """The peak is that of torch's own checkpoint, which recomputes the same."""
    blocks = [
        nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Dropout(0.1), nn.Linear(256, 64))
        for _ in range(4)
    ]
    x = torch.randn(512, 64, requires_grad=True)

    def peak(checkpoint: Checkpoint) -> int:
        def run() -> None:
            y = x
            for block in blocks:
                y = checkpoint(block, y)
            y.sum().backward()

        for _ in range(2):
            x.grad = None
            for block in blocks:
                block.zero_grad()
            measured = fxckpt.measure_peak(run)
        return measured

    unchecked, torch_peak = (
        peak(plain),
        peak(functools.partial(torchs.checkpoint, use_reentrant=False)),
    )
    assert peak(fxckpt.checkpoint) <= 1.02 * torch_peak < 0.6 * unchecked
