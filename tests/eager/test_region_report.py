"""Who decides: an explicit policy, then the model's own checkpoint regions, then the budget."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

import fxckpt
from fxckpt import Reason
from tests.steps import FLOOR, same_at_every_budget

WIDTH = 32

Policy = Callable[..., CheckpointPolicy]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.up(x).tanh().sin())


class Stack(nn.Module):
    """Blocks, each in a selective checkpoint (``policy``) or a plain one (``mark``)."""

    def __init__(self, *, mark: bool = False, policy: Policy | None = None) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.mark = mark
        self.policy = policy

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            if self.policy is not None:
                contexts = functools.partial(create_selective_checkpoint_contexts, self.policy)
                x = checkpoint(block, x, use_reentrant=False, context_fn=contexts)
            elif self.mark:
                x = checkpoint(block, x, use_reentrant=False)
            else:
                x = block(x)
        return x


def stack(**options: Any) -> Callable[[], tuple[nn.Module, tuple[Tensor]]]:
    return lambda: (Stack(**options), (torch.randn(128, WIDTH),))


def must_save_products(
    ctx: object, op: object, *args: object, **kwargs: object
) -> CheckpointPolicy:
    return (
        CheckpointPolicy.MUST_SAVE
        if op is torch.ops.aten.addmm.default
        else CheckpointPolicy.PREFER_RECOMPUTE
    )


def must_recompute_products(
    ctx: object, op: object, *args: object, **kwargs: object
) -> CheckpointPolicy:
    return (
        CheckpointPolicy.MUST_RECOMPUTE
        if op is torch.ops.aten.addmm.default
        else CheckpointPolicy.PREFER_SAVE
    )


def saved_and_again(plan: fxckpt.Plan, name: str) -> tuple[int, int]:
    return sum(n.startswith(name) for n in plan.saved), sum(
        n.startswith(name) for n in plan.recomputed
    )


def test_plain_regions_are_recomputed_without_a_budget() -> None:
    """Without a budget the activations in a plain region are recomputed, not saved."""
    (plan,) = same_at_every_budget(stack(mark=True), (None,))
    assert saved_and_again(plan, "tanh") == (0, 4)
    assert {row.reason for row in plan.rows if row.op == "tanh"} == {Reason.REGION}


class Reshaped(Block):
    """Its result leaves as a view."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.view(-1, WIDTH)).view(2, -1, WIDTH)


def test_a_region_returning_a_view_is_replayed_once() -> None:
    """Each activation of a region whose result is a view is recomputed exactly once."""

    def make() -> tuple[nn.Module, tuple[Tensor]]:
        model = Stack(mark=True)
        model.blocks = nn.ModuleList(Reshaped() for _ in range(4))
        return model, (torch.randn(2, 64, WIDTH),)

    (plan,) = same_at_every_budget(make, (None,))
    runs = [run.name for run in plan.schedule if run.name.startswith("tanh")]
    assert len(runs) == len(set(runs)) == 4


def test_a_roomy_budget_recomputes_no_product() -> None:
    """A plain region recomputes no product under a budget that has room for all of them."""
    (plan,) = same_at_every_budget(stack(mark=True), (1.0,))
    assert saved_and_again(plan, "addmm")[1] == 0


def test_must_save_holds_at_any_budget() -> None:
    """Values that a region's policy must save are never recomputed, whatever the budget."""
    for plan in same_at_every_budget(stack(policy=must_save_products), (None, 0.9, FLOOR)):
        assert saved_and_again(plan, "addmm")[1] == 0, plan.budget_bytes


def test_must_recompute_holds_at_any_budget() -> None:
    """Values that a region's policy must recompute are never saved, whatever the budget."""
    for plan in same_at_every_budget(stack(policy=must_recompute_products), (None, 1.0, FLOOR)):
        inner = [row for row in plan.rows if row.op == "addmm" and row.module.endswith("up")]
        assert not any(row.decision is fxckpt.Decision.SAVED for row in inner), plan.budget_bytes


@pytest.mark.parametrize("budget", [None, 1.0])
def test_an_explicit_policy_goes_before_a_region(budget: float | None) -> None:
    (plan,) = same_at_every_budget(
        stack(policy=must_save_products), (budget,), policy=must_recompute_products
    )
    assert not any(
        row.op == "addmm" and row.decision is fxckpt.Decision.SAVED
        for row in plan.rows
        if row.reason is not Reason.OUTPUT
    )


def test_an_explicit_policy_binds_at_any_budget() -> None:
    for plan in same_at_every_budget(stack(), (None, 0.9, FLOOR), policy=must_save_products):
        assert saved_and_again(plan, "addmm")[1] == 0
    for plan in same_at_every_budget(stack(), (None, 1.0), policy=must_recompute_products):
        assert saved_and_again(plan, "addmm")[0] == 0


def test_a_budget_may_override_a_policys_preference() -> None:
    """A preference to recompute holds without a budget and yields to a budget with room."""
    (free,) = same_at_every_budget(stack(), (None,), policy=must_save_products)
    assert saved_and_again(free, "tanh") == (0, 4)
    (weighed,) = same_at_every_budget(stack(), (1.0,), policy=must_save_products)
    assert weighed.recompute_seconds == 0.0


@pytest.mark.parametrize(
    "options", [{"mark": True}, {"policy": must_save_products}], ids=["plain", "selective"]
)
def test_budgets_never_raise_a_checkpointed_models_peak(options: dict[str, Any]) -> None:
    """A budget at or below the peak of a checkpointed model never raises that peak."""
    (regions,) = same_at_every_budget(stack(**options), (None,))
    tight = same_at_every_budget(stack(**options), (regions.peak_bytes, FLOOR))
    assert all(plan.peak_bytes <= regions.peak_bytes for plan in tight)
    assert tight[0].recompute_seconds <= regions.recompute_seconds


def test_a_budget_below_the_policys_peak_is_explained() -> None:
    """A budget that a binding policy cannot meet raises an error that states the least peak."""
    with pytest.raises(fxckpt.BudgetInfeasible, match="least peak"):
        same_at_every_budget(stack(), (None,), policy=must_save_products)
        model, (x,) = stack()()
        torch._dynamo.reset()
        torch.compile(
            model, backend=fxckpt.Backend(budget=1024, inner="aot_eager", policy=must_save_products)
        )(x)
