"""Budgets: accepted forms, and errors for the others."""

from __future__ import annotations

import pickle
import re

import numpy as np
import pytest
import torch
from torch.utils.checkpoint import CheckpointPolicy

import fxckpt
from fxckpt import budgets

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (None, None),
        (1, 1),
        (np.int64(7), 7),
        (1.0, 1000),
        (0.5, 500),
        ("1500MB", 1_500_000_000),
        ("2GiB", 2 * 2**30),
        ("123456B", 123456),
        (" 1.5 gib ", 3 * 2**29),
        ("1kb", 1000),
        ("2G", 2 * 2**30),
        ("512m", 512 * 2**20),
        ("3Ki", 3072),
        ("60%", 600),
        (" 100 % ", 1000),
    ],
)
def test_budget_in_bytes(given: budgets.Budget, expected: int | None) -> None:
    """Every accepted form of a budget has its value in bytes."""
    assert budgets.resolve(given, baseline_peak_bytes=1000, device=CPU) == expected


def test_auto_is_below_the_free_memory() -> None:
    """The budget "auto" is less than the free memory."""
    asked = budgets.resolve("auto", baseline_peak_bytes=1000, device=CPU)
    assert asked is not None and 2**20 < asked < budgets.free_bytes(CPU)


@pytest.mark.parametrize(
    "wrong",
    [
        "",
        "2",
        "GiB",
        "2 GiBs",
        "-1GB",
        "0B",
        0,
        -5,
        0.0,
        1.5,
        -0.5,
        float("nan"),
        float("inf"),
        True,
        [],
        b"1GB",
        "0%",
        "101%",
        "-5%",
        "most",
    ],
)
def test_invalid_budget_is_refused_with_an_example(wrong: object) -> None:
    """The error for an invalid budget shows the value and an example."""
    with pytest.raises(fxckpt.InvalidBudget, match="Example: budget='2GiB'") as error:
        fxckpt.Backend(budget=wrong)  # type: ignore[arg-type]
    assert repr(wrong) in str(error.value)


def test_auto_leaves_room_for_optimizer_state(monkeypatch: pytest.MonkeyPatch) -> None:
    """The budget "auto" leaves out the state that the first step of an optimizer allocates."""
    monkeypatch.setattr(budgets, "free_bytes", lambda device: 10_000_000)

    def auto() -> int:
        found = budgets.resolve("auto", baseline_peak_bytes=1000, device=CPU)
        assert found is not None
        return found

    weight = torch.nn.Parameter(torch.zeros(1000, 100))
    before = auto()
    optimizer = torch.optim.AdamW([weight])
    assert before - auto() == pytest.approx(0.9 * 2 * weight.nbytes, abs=2)
    weight.grad = torch.zeros_like(weight)
    optimizer.step()  # Now its state is allocated: it is no longer free.
    assert auto() == before


def test_least_memory_within_a_slowdown() -> None:
    """A target in time has the least peak of a frontier at that time, and "min" the floor."""
    model = torch.nn.Sequential(
        *(torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.GELU()) for _ in range(8))
    )
    x = torch.randn(512, 64)
    curve = fxckpt.frontier(model, x, points=12, cost="flops")
    for share in (0.0, 0.05, 0.2):
        plan = fxckpt.plan(model, x, max_slowdown=share, cost="flops")
        assert plan.recompute_seconds <= share * plan.step_seconds
        peers = [p.peak_bytes for p in curve.rows if p.share <= share]
        assert plan.budget_bytes == plan.peak_bytes <= 1.01 * min(peers)
    least = fxckpt.plan(model, x, budget="min", cost="flops")
    assert least.peak_bytes == least.floor_bytes == curve.plans[0].peak_bytes
    (point,) = fxckpt.frontier(model, x, points=["min"], cost="flops").plans
    assert point.peak_bytes == least.floor_bytes


@pytest.mark.parametrize("inner", ["aot_eager", "inductor"])
def test_backend_takes_a_slowdown(inner: str) -> None:
    """A compiled model has the plan of a target in time."""
    torch.compiler.reset()
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.GELU(), torch.nn.GELU())
    backend = fxckpt.Backend(max_slowdown=0.5, inner=inner, cost="flops")
    torch.compile(model, backend=backend)(torch.randn(512, 64)).sum().backward()
    (plan,) = backend.plans
    assert plan.recompute_seconds <= 0.5 * plan.step_seconds
    assert plan.peak_bytes <= plan.baseline_peak_bytes
    assert "max_slowdown=0.5" in repr(backend)


def test_a_bare_number_is_answered_with_units() -> None:
    """The error of a number in a string without a unit shows both that may be meant."""
    with pytest.raises(fxckpt.InvalidBudget, match="Did you mean '60%' or '60GiB'"):
        budgets.parse("60")


@pytest.mark.parametrize("scope", ["step", "graph"])
@pytest.mark.parametrize("foreach", [None, False])
def test_auto_asks_optimizers_amid_a_compile(foreach: bool | None, scope: str) -> None:
    """The free memory is what the state of optimizers leaves, though all tensors are fake then."""
    torch.compiler.reset()
    model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.GELU(), torch.nn.Linear(256, 64))
    optimizer = torch.optim.AdamW(model.parameters(), foreach=foreach)
    backend = fxckpt.Backend("auto", inner="aot_eager", scope=scope)
    compiled = torch.compile(model, backend=backend)
    for _ in range(2):
        optimizer.zero_grad()
        compiled(torch.randn(32, 64)).sum().backward()
        optimizer.step()
    (plan,) = backend.plans
    assert plan.budget_bytes is not None
    assert plan.budget_bytes <= budgets.free_bytes(CPU)


def test_slowdown_and_budget_exclude_each_other() -> None:
    """A budget and a target in time together, or a target that is no share, are errors."""
    with pytest.raises(fxckpt.InvalidBudget, match="Leave one of them out"):
        fxckpt.Backend(budget="2GiB", max_slowdown=0.1)
    for wrong in (-0.1, float("nan"), float("inf"), True, "10%"):
        with pytest.raises(fxckpt.InvalidBudget, match="Example: max_slowdown="):
            fxckpt.Backend(max_slowdown=wrong)  # type: ignore[arg-type]


def test_slowdown_that_the_policy_exceeds() -> None:
    """A policy that recomputes for longer than the target is an error with the least target."""

    def recompute_all(ctx: object, op: object, *args: object, **kwargs: object) -> CheckpointPolicy:
        return CheckpointPolicy.MUST_RECOMPUTE

    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.GELU(), torch.nn.Linear(64, 64))
    x = torch.randn(512, 64)
    with pytest.raises(fxckpt.SlowdownInfeasible, match="Raise it to at least") as error:
        fxckpt.plan(model, x, max_slowdown=0.0, policy=recompute_all, cost="flops")
    again = pickle.loads(pickle.dumps(error.value))
    assert (str(again), again.least_slowdown) == (str(error.value), error.value.least_slowdown)
    fxckpt.plan(
        model, x, max_slowdown=error.value.least_slowdown, policy=recompute_all, cost="flops"
    )


@pytest.mark.parametrize(
    ("given", "form"), [(0.1, r"0\.(?P<least>\d\d) \("), ("10%", r"'(?P<least>\d\d)%' \(")]
)
def test_infeasible_fraction_names_a_fraction(given: budgets.Budget, form: str) -> None:
    """The error of an infeasible fraction names the least one, written alike."""
    model = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(8)))
    x = torch.randn(2048, 64)
    with pytest.raises(fxckpt.BudgetInfeasible) as error:
        fxckpt.plan(model, x, budget=given, cost="flops")
    named = re.search(f"Raise the budget to at least {form}", str(error.value))
    assert named is not None, str(error.value)
    least = int(named["least"])
    plan = fxckpt.plan(model, x, budget=least / 100 if given == 0.1 else f"{least}%", cost="flops")
    assert least - 1 < 100 * plan.peak_bytes / plan.baseline_peak_bytes <= least


def test_infeasible_bytes_show_the_gap() -> None:
    """A budget just below the least peak is told apart from it."""
    model = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(8)))
    x = torch.randn(2064, 64)  # The two then differ in no decimal of a MiB that is told.
    floor = fxckpt.plan(model, x, budget="min").budget_bytes
    assert floor is not None
    with pytest.raises(fxckpt.BudgetInfeasible, match=f"is {floor - 512} bytes, .* {floor} bytes;"):
        fxckpt.plan(model, x, budget=floor - 512)
