"""Plans of steps of several graphs, beside the steps that a backend runs."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from torch import Tensor, nn

import fxckpt
from fxckpt.tiers import Host
from tests.step.stack import Stack, X, measured


class Halves(nn.Module):
    """Two halves, with a graph break between them."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Stack(3).blocks, Stack(3).blocks

    def forward(self, x: Tensor) -> Tensor:
        for block in self.first:
            x = block(x)
        torch._dynamo.graph_break()  # the break
        for block in self.second:
            x = block(x)
        return x.pow(2).mean()


class Reads(Halves):
    """Code between two graphs that reads a value."""

    def forward(self, x: Tensor) -> Tensor:
        if x.sum().item() > 0:  # the read
            x = x + 1
        return super().forward(x)


def settled(model: nn.Module, backend: fxckpt.Backend) -> fxckpt.reports.step_report.StepReport:
    """Return the report of a model's step, once its levels are chosen."""
    for _ in range(3):
        measured(model)
    report = backend.report().step
    assert report is not None
    return report


@pytest.mark.parametrize("share", [0.5, 0.8])
def test_blocks_are_planned_as_they_run(share: float) -> None:
    """The plan of a step has the graphs, calls and peak of the step that is run."""
    model = Stack()
    backend = fxckpt.compile_blocks(model.blocks, share, inner="aot_eager")
    plan = fxckpt.plan_step(model, X, budget=share)
    assert not backend.plans and all(p.grad is None for p in model.parameters())
    report = settled(model, backend)
    assert plan.budget_bytes is not None and plan.peak_bytes <= plan.budget_bytes
    assert plan.baseline_peak_bytes == pytest.approx(report.budget_bytes / share, rel=0.08)
    assert plan.peak_bytes == pytest.approx(report.measured_peak_bytes, rel=0.06)
    assert plan.outside_bytes == pytest.approx(report.outside_bytes, rel=0.1)
    # The input of the first block needs no gradient: its graph is another.
    run = Counter(row.graph for row in report.rows for _ in range(row.calls))
    assert run == Counter(call + 1 for call in plan.calls) == {1: 1, 2: 3}
    assert {row.source for row in report.rows} == {graph.source for graph in plan.graphs}


def test_calls_send_values_away() -> None:
    """Calls in flight share what a place holds, as they do in the step that is run."""
    model = Stack()
    host = Host("1GiB", 1e12)
    backend = fxckpt.compile_blocks(model.blocks, 0.45, inner="aot_eager", offload=host)
    plans = [
        fxckpt.plan_step(model, X, budget=0.45, offload=tier)
        for tier in (None, Host("450KiB", 1e12), host)
    ]
    alone, small, roomy = plans
    assert 0 == alone.away_bytes < small.away_bytes <= 450 * 1024 < roomy.away_bytes
    assert roomy.extra_seconds < small.extra_seconds < alone.extra_seconds
    assert all(plan.lower_bound_seconds <= plan.extra_seconds for plan in plans)
    assert [" sent" in str(plan) for plan in plans] == [False, True, True]
    report = settled(model, backend)
    assert roomy.away_bytes == host.peak_bytes == sum(r.calls * r.away_bytes for r in report.rows)
    assert roomy.away_bytes == sum(r["calls"] * r["away_bytes"] for r in roomy.table().records())


def test_nothing_is_sent_without_a_reason() -> None:
    """Without a budget only a policy sends values away; what it demands has to fit."""
    model = Stack()
    for block in model.blocks:
        block.compile(backend="eager")
    free = fxckpt.plan_step(model, X, offload=Host("1GiB", 1e12))
    assert free.away_bytes == 0 and free.budget_bytes is None
    policy = fxckpt.policies.offload("up")
    demanded = fxckpt.plan_step(model, X, policy=policy, offload=Host("1GiB", 1e12))
    assert demanded.away_bytes == 4 * 512 * 128 * 4
    assert {row["away_bytes"] for row in demanded.table().records()} == {512 * 128 * 4}
    with pytest.raises(fxckpt.InvalidOption, match=r"of the calls in flight, and .* holds 512"):
        fxckpt.plan_step(model, X, policy=policy, offload=Host("512KiB", 1e12))


def test_graph_break_is_planned_as_it_runs() -> None:
    """A model with a graph break is two graphs, planned together."""
    model = Halves()
    backend = fxckpt.Backend(0.6, inner="aot_eager")
    plan = fxckpt.plan_step(model, X, budget=0.6)
    report = settled(torch.compile(model, backend=backend), backend)
    assert len(plan.graphs) == 2 and {row.graph for row in report.rows} == {1, 2}
    assert plan.peak_bytes == pytest.approx(report.measured_peak_bytes, rel=0.06)
    assert plan.lower_bound_seconds <= plan.extra_seconds
    with pytest.raises(fxckpt.NotOneGraph, match="plan_step"):
        fxckpt.plan(model, X)


def test_one_graph_is_a_step() -> None:
    """The plan of one graph as a step is near the plan of the graph."""
    model = nn.Sequential(*Stack(6).blocks)
    step, plan = (make(model, X, budget=0.7) for make in (fxckpt.plan_step, fxckpt.plan))
    assert step.baseline_peak_bytes == pytest.approx(plan.baseline_peak_bytes, rel=0.03)
    assert step.extra_seconds <= 1.25 * plan.extra_seconds + 0.01 * plan.step_seconds


def test_compiled_modules_inside_are_the_parts() -> None:
    """Modules that ``torch.compile`` wrapped are planned, for a device elsewhere too."""
    model = Stack()
    for i in range(4):
        model.blocks[i] = torch.compile(model.blocks[i])
    here, there = (fxckpt.plan_step(model, X, device=name) for name in (None, "H100"))
    assert len(here.calls) == len(there.calls) == 4
    assert there.graphs[0].plans[0].cost == "roofline of H100"
    assert there.step_seconds < here.step_seconds


def test_function_leaves_gradients_of_its_model() -> None:
    """The gradients of a model that a function closes over stay as they were."""
    model = Halves()
    weight = next(model.parameters())
    weight.grad = kept = torch.ones_like(weight)
    plan = fxckpt.plan_step(lambda x: model(x), X)
    assert len(plan.graphs) == 2 and weight.grad is kept
    assert all(p.grad is None for p in model.parameters() if p is not weight)


def test_reading_values_is_told_with_the_line() -> None:
    """Code that reads values between graphs cannot be planned, and its line is named."""
    with pytest.raises(fxckpt.CaptureError, match="reads values of tensors") as error:
        fxckpt.plan_step(Reads(), X)
    assert "# the read" in str(error.value) and "backend.report()" in str(error.value)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"budget": 0.01}, "least peak found for this step of 2 calls"),
        ({"budget": "min"}, "of each graph by itself"),
        ({"budget": "nonsense"}, "nonsense"),
        ({"offload": "nonsense"}, "is not a place to send values to"),
        ({"offload": 0}, "is not a place to send values to"),
    ],
)
def test_unusable_options_are_refused(options: dict[str, object], says: str) -> None:
    with pytest.raises(fxckpt.FxckptError, match=says):
        fxckpt.plan_step(Halves(), X, **options)


def test_least_fraction_of_the_error_is_enough() -> None:
    """The budget that the error of an infeasible step names is feasible."""
    with pytest.raises(fxckpt.BudgetInfeasible) as error:
        fxckpt.plan_step(Halves(), X, budget=0.01)
    plan = fxckpt.plan_step(Halves(), X, budget=error.value.floor_bytes)
    assert plan.peak_bytes <= error.value.floor_bytes


def test_nothing_to_plan_in_a_step() -> None:
    """A function without gradients has no step."""
    with pytest.raises(fxckpt.CaptureError, match="no graph with a backward"):
        fxckpt.plan_step(torch.sin, torch.randn(3))
