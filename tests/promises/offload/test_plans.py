"""Plans with values away: what they tell, and budgets, policies and options."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
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
from fxckpt.tiers import Host
from tests.promises.offload.stack import WithLoss, compiled, stack
from tests.steps import differing, fresh, outcome
from tests.tiers.adversary import Adversary


def test_the_plan_tells_what_is_away() -> None:
    """Summary, rows, timeline and JSON agree about the values that are sent away."""
    model, (x,) = stack()
    plan = fxckpt.plan(model, x, budget=0.4, offload=Host("1GiB", 1e9))
    assert plan.offloads
    assert "sent away" in str(plan)
    away = plan.explain().filter(decision="offloaded")
    assert {row.name for row in away.rows} == {offload.name for offload in plan.offloads}
    assert all(plan.explain().why(row.name).startswith("offloaded: frees") for row in away.rows)
    assert fxckpt.Plan.from_json(plan.to_json()) == plan
    timeline = plan.timeline()
    for tick in range(len(timeline.ticks)):
        assert sum(h.bytes for h in timeline.at(tick)) == plan.profile[tick]


def test_a_plan_with_values_away_is_applied() -> None:
    """A plan from JSON needs a tier, sends what it says, and is refused without one."""
    model, (x,) = stack()
    plan = fxckpt.plan(model, x, budget=0.4, offload=Host("1GiB", 1e9))
    given = fxckpt.Plan.from_json(plan.to_json())
    host = Adversary(late=True)
    forward, backend = compiled(model, host, None, policy=given)
    forward(x).square().sum().backward()
    assert host.sent == len(plan.offloads)
    torch._dynamo.reset()
    backend = fxckpt.Backend(policy=given, inner="aot_eager")
    with pytest.raises(fxckpt.InvalidOption, match="and there is no offload="):
        torch.compile(model, backend=backend)(x)


def test_small_tier_for_a_plan_is_refused() -> None:
    """A plan that sends more than the tier holds is refused before a step runs."""
    model, (x,) = stack()
    plan = fxckpt.plan(model, x, budget=0.4, offload=Host("1GiB", 1e9))
    for limit in (plan.away_bytes - 1, plan.away_bytes):
        torch._dynamo.reset()
        forward, _ = compiled(model, Host(limit, 1e9), None, policy=plan)
        if limit == plan.away_bytes:
            forward(x).square().sum().backward()
            continue
        with pytest.raises(fxckpt.InvalidOption, match=r"the plan sends .* away, and .* holds"):
            forward(x)


def test_a_plan_for_a_gpu_takes_its_link() -> None:
    """A plan for a device elsewhere prices copies by that device's link."""
    with torch.device("meta"):
        model = nn.Sequential(*(nn.Linear(2048, 2048) for _ in range(12)))
        x = torch.empty(8192, 2048, dtype=torch.float32)
    options: dict[str, Any] = {"budget": 0.6, "offload": "64GiB"}
    alone = fxckpt.plan(model, x, budget=0.6, device="GB200")
    far = fxckpt.plan(model, x, device="GB200", **options)
    assert far.offloads
    assert far.lower_bound_seconds <= far.extra_seconds < alone.extra_seconds


def test_an_infeasible_budget_says_what_is_within_reach() -> None:
    """The error of a budget below the floor tells what a tier, or a larger one, would reach."""
    model, (x,) = stack()
    reach = r"could reach about \d"
    with pytest.raises(fxckpt.BudgetInfeasible, match=rf"With offload=.*{reach}"):
        fxckpt.plan(model, x, budget=2000, policy=fxckpt.policies.save_all)
    with pytest.raises(fxckpt.BudgetInfeasible, match=rf"Host\('1KiB'.* holds 1.0 KiB.*{reach}"):
        fxckpt.plan(
            model,
            x,
            budget=2000,
            policy=fxckpt.policies.save_all,
            offload=Host("1KiB", 1e9),
        )


def test_a_policy_sends_values_away() -> None:
    """Values of modules are sent without a budget and with one, and nothing else without."""
    for budget in (None, 0.5):
        model, inputs = fresh(stack)
        expected = outcome(model, model, inputs)
        model, inputs = fresh(stack)
        host = Adversary(late=True)
        policy = fxckpt.policies.offload("1.out", "3.gates")
        forward, backend = compiled(model, host, budget, policy=policy)
        assert differing(expected, outcome(model, forward, inputs)) == []
        rows = backend.plans[0].explain().filter(decision="offloaded").rows
        forced = [row for row in rows if row.reason is fxckpt.Reason.POLICY]
        assert forced and {row.module for row in forced} <= {"1.out", "3.gates"}
        assert host.sent == len(rows)
        assert budget or len(forced) == len(rows)


def test_torchs_own_answers_send_values_away() -> None:
    """MUST_CPU_OFFLOAD binds at a budget that needs none; PREFER_CPU_OFFLOAD without a budget."""
    model, (x,) = stack()

    def answers(answer: CheckpointPolicy) -> Callable[..., CheckpointPolicy]:
        def policy(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
            is_product = op is torch.ops.aten.addmm.default
            return answer if is_product else CheckpointPolicy.PREFER_SAVE

        return policy

    must, prefer = CheckpointPolicy.MUST_CPU_OFFLOAD, CheckpointPolicy.PREFER_CPU_OFFLOAD
    for answer, budget, is_sent in ((must, 1.0, True), (prefer, None, True), (prefer, 1.0, False)):
        plan = fxckpt.plan(
            model, x, budget=budget, policy=answers(answer), offload=Host("1GiB", 1e9)
        )
        assert bool(plan.offloads) is is_sent
    with pytest.raises(fxckpt.InvalidOption, match="sends values away, and there is no offload="):
        fxckpt.plan(model, x, policy=answers(must))
    with pytest.raises(fxckpt.InvalidOption, match=r"away, and .*Host\('1KiB'.* holds 1.0 KiB"):
        fxckpt.plan(model, x, policy=answers(must), offload=Host("1KiB", 1e9))


@pytest.mark.parametrize("budget", [None, 0.8, "min"])
def test_regions_of_the_model_send_values_away(budget: fxckpt.budgets.Budget) -> None:
    """MUST_CPU_OFFLOAD of torch's own region binds inside of a compiled model; else it is told."""
    model, (x,) = stack()

    def answer(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        is_product = op is torch.ops.aten.addmm.default
        return (
            CheckpointPolicy.MUST_CPU_OFFLOAD if is_product else CheckpointPolicy.PREFER_RECOMPUTE
        )

    def in_region(x: Tensor) -> Tensor:
        contexts = partial(create_selective_checkpoint_contexts, answer)
        return checkpoint(model, x, use_reentrant=False, context_fn=contexts).square()

    plan = fxckpt.plan(in_region, x, budget=budget, offload=Host("1GiB", 1e12))
    products = {name for name in plan.saved if name.startswith("addmm")}
    products.discard("addmm_9")  # What leaves the region torch tags to be saved.
    assert products and products <= {each.name for each in plan.offloads}
    with pytest.raises(fxckpt.InvalidOption, match="a checkpoint region of the model sends values"):
        fxckpt.plan(in_region, x, budget=budget)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"offload": 5}, "is not a place to send values to"),
        *(
            ({"offload": text}, f"offload='{text}' is not a place .* Allowed: 'host'.*'64GiB'")
            for text in ("much", "", "0", "hots", "disk", "cpu")
        ),
    ],
)
def test_options_that_do_not_fit_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(fxckpt.InvalidOption, match=message):
        fxckpt.Backend(
            **{"budget": 0.5, "inner": "aot_eager", "scope": "graph", **options}  # type: ignore[arg-type]
        )


@pytest.mark.parametrize(
    "goal", [{"budget": "min"}, {"budget": None, "max_slowdown": 0.05}], ids=["min", "slowdown"]
)
def test_least_memory_sends_values_away(goal: dict[str, Any]) -> None:
    """The least memory, in any time or in little, is less with a tier, and exact."""
    peaks = []
    for tier in (None, Host("1GiB", 1e12)):
        torch._dynamo.reset()
        layers, (x,) = stack()
        model = WithLoss(layers)
        backend = fxckpt.Backend(inner="aot_eager", scope="graph", offload=tier, **goal)
        forward = torch.compile(model, backend=backend)
        forward(x).backward()
        model.zero_grad(set_to_none=True)
        (plan,) = backend.plans

        def step(forward: Callable[..., Any] = forward, x: Tensor = x) -> None:
            forward(x).backward()

        assert fxckpt.measure_peak(step) == plan.peak_bytes
        peaks.append(plan.peak_bytes)
    assert peaks[1] < peaks[0]
