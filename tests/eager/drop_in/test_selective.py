"""Selective policies and contexts in torch's form."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

import fxckpt
from fxckpt import CheckpointPolicy as Policy
from fxckpt import create_selective_checkpoint_contexts as selective
from tests.eager.drop_in.products import aten, save_products, two_products
from tests.eager.regions import ops_of_the_backward, plain, step
from tests.steps import differing


@pytest.mark.parametrize("respects, count", [(None, 1), (True, 1), (False, 0)])
def test_hooks_around_see_chosen_results_if_asked(respects: bool | None, count: int) -> None:
    """The hooks around a region get its chosen result, unless told not to."""
    x = torch.randn(4, 4, requires_grad=True)
    seen: list[Tensor] = []

    def pack(tensor: Tensor) -> Tensor:
        seen.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        out = fxckpt.checkpoint(
            lambda x: x.exp().sin(),
            x,
            context_fn=functools.partial(selective, [aten.exp.default]),
            respect_saved_tensors_hooks=respects,
        )
    assert len(seen) == count
    (gradient,) = torch.autograd.grad(out.sum(), x)
    assert torch.equal(gradient, x.exp().cos() * x.exp())


def with_policy(policy: Any, **options: Any) -> Callable[..., Any]:
    return functools.partial(
        fxckpt.checkpoint, context_fn=functools.partial(selective, policy, **options)
    )


SELECTIVE = {
    "function": save_products,
    "ops": [aten.mm.default],
    "bool": lambda ctx, op, *args, **kwargs: op is aten.mm.default,
    "offloaded": lambda ctx, op, *args, **kwargs: (
        Policy.MUST_CPU_OFFLOAD if op is aten.mm.default else Policy.MUST_RECOMPUTE
    ),
    "composed": fxckpt.policies.save_ops(aten.mm) | fxckpt.policies.recompute_all,
}


@pytest.mark.parametrize("policy", SELECTIVE.values(), ids=SELECTIVE)
def test_ops_saved_by_a_policy_run_once(policy: Any) -> None:
    """An op whose result a selective policy saves or offloads is not recomputed."""
    checkpoint = with_policy(policy)
    assert (
        differing(step(two_products, plain, twice=True), step(two_products, checkpoint, twice=True))
        == []
    )
    x, w = torch.randn(4, 4, requires_grad=True), torch.randn(4, 4)
    ran = ops_of_the_backward(checkpoint(two_products, x, w))
    # Each product has a gradient product of its own; neither is recomputed.
    assert (ran["mm"], ran["sin"], ran["exp"]) == (2, 0, 1)


def test_a_selective_region_takes_a_second_backward() -> None:
    x, w = torch.randn(4, 4, requires_grad=True), torch.randn(4, 4)
    out = with_policy(save_products)(two_products, x, w).sum()
    first, second = (torch.autograd.grad(out, x, retain_graph=True)[0] for _ in range(2))
    assert torch.equal(first, second)


def test_a_region_may_write_a_kept_value() -> None:
    """A region may write in place to a kept value, and the write is not repeated."""
    region = lambda x, w: F.relu(x @ w, inplace=True).mul(x)  # noqa: E731
    checkpoint = with_policy(save_products)
    assert differing(step(region, plain), step(region, checkpoint)) == []
    x, w = torch.randn(4, 4, requires_grad=True), torch.randn(4, 4)
    assert ops_of_the_backward(checkpoint(region, x, w))["relu_"] == 0


@pytest.mark.parametrize("allowed", [False, True])
def test_a_kept_value_written_after_the_region(allowed: bool) -> None:
    leaked: list[Tensor] = []

    def region(x: Tensor, w: Tensor) -> Tensor:
        product = x @ w
        leaked.append(product.detach())
        return product.sin()

    x, w = torch.randn(4, 4, requires_grad=True), torch.eye(4)
    out = with_policy(save_products, allow_cache_entry_mutation=allowed)(region, x, w)
    leaked[0].add_(1)
    if not allowed:
        with pytest.raises(fxckpt.CheckpointError, match="written in place"):
            out.sum().backward()
        return
    out.sum().backward()
    assert x.grad is not None and torch.allclose(x.grad, (x.detach() + 1).cos())


def test_policies_over_whole_graphs_are_pointed_elsewhere() -> None:
    """A policy that needs the whole graph is refused with a pointer to `policy=`."""
    with pytest.raises(fxckpt.InvalidOption, match=r"checkpoint\(..., policy=...\)"):
        selective(fxckpt.policies.sqrt_n)


def test_other_contexts_surround_the_region_and_its_replay() -> None:
    entered: list[str] = []

    class Named:
        def __init__(self, name: str) -> None:
            self.name = name

        def __enter__(self) -> None:
            entered.append(self.name)

        def __exit__(self, *_: Any) -> None: ...

    x, w = torch.randn(4, 4, requires_grad=True), torch.randn(4, 4)
    fxckpt.checkpoint(
        two_products, x, w, context_fn=lambda: (Named("region"), Named("replay"))
    ).sum().backward()
    assert entered == ["region", "replay"]


def test_a_context_may_not_swallow_an_exception() -> None:
    """A context that suppresses an exception of the region raises a CheckpointError."""
    import contextlib

    def region(x: Tensor) -> Tensor:
        raise KeyError

    with pytest.raises(fxckpt.CheckpointError, match="suppressed"):
        fxckpt.checkpoint(
            region,
            torch.zeros(1),
            context_fn=lambda: (contextlib.suppress(KeyError), contextlib.nullcontext()),
        )
