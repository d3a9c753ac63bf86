"""Steps of many graphs that send values away: within their budget and the tier's limit."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import fxckpt
from fxckpt.step.graph import StepGraph
from fxckpt.tiers import Host, Tier
from tests.tiers.adversary import Adversary

RATE = 1e12
"""Bytes per second of a link that makes no step wait."""


class Layer(nn.Module):
    """A residual layer whose inner values are wider than its output."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.wide = nn.LayerNorm(width), nn.Linear(width, 4 * width)
        self.out = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.out(nn.functional.gelu(self.wide(self.norm(x))))


def by_blocks(backend: fxckpt.Backend | None) -> tuple[nn.Sequential, Callable[[], None]]:
    """Return a model whose layers are compiled one by one, and its step."""
    torch.manual_seed(0)
    model = nn.Sequential(*(Layer(32) for _ in range(6)))
    x = torch.randn(1024, 32)
    if backend is not None:
        for layer in model:
            layer.compile(backend=backend)

    def step() -> None:
        model.zero_grad(set_to_none=True)
        model(x).square().mean().backward()

    return model, step


def gradients(model: nn.Module) -> list[Tensor]:
    return [p.grad for p in model.parameters() if p.grad is not None]


def settled(tier: Tier, budget: float | int) -> tuple[fxckpt.Backend, int, list[Tensor]]:
    """Return the backend, the peak and the gradients of a step whose levels are chosen."""
    backend = fxckpt.Backend(budget, inner="aot_eager", offload=tier)
    model, step = by_blocks(backend)
    for _ in range(3):
        step()
    return backend, fxckpt.measure_peak(step), gradients(model)


@pytest.mark.parametrize("late", [True, False], ids=["late", "early"])
def test_blocks_are_free_of_races(late: bool) -> None:
    """The budget is kept from the first step on, with the same bits, on any link."""
    model, step = by_blocks(None)
    step()
    host = Adversary(late=late)
    backend, peak, found = settled(host, int(0.3 * fxckpt.measure_peak(step)))
    assert all(torch.equal(a, b) for a, b in zip(gradients(model), found, strict=True))
    report = backend.report().step
    assert report is not None and peak <= report.budget_bytes
    assert sum(row.calls * row.away_bytes for row in report.rows) > 0
    assert host.sent == host.fetched > 0 and host.used_bytes == 0


@pytest.mark.filterwarnings("ignore:step 1 had a peak")
def test_calls_share_the_limit_of_the_tier() -> None:
    """What does not fit is recomputed, and the budget is kept all the same."""
    roomy, small = Host("1GiB", RATE), Host("700KiB", RATE)
    settled(roomy, 0.3)
    torch._dynamo.reset()
    backend, peak, _ = settled(small, 0.3)
    report = backend.report().step
    assert report is not None and peak <= report.budget_bytes
    assert 0 < small.peak_bytes <= small.limit_bytes < roomy.peak_bytes
    assert " sent" in str(report)


@pytest.mark.filterwarnings("ignore:step 1 had a peak")
def test_least_step_is_lower_with_offload() -> None:
    """The floor of a step, as its error tells, is lower with room to send values to."""
    floors = []
    for limit in ("1KiB", "1GiB"):
        torch._dynamo.reset()
        with pytest.raises(fxckpt.BudgetInfeasible) as error:
            settled(Host(limit, RATE), 0.05)
        floors.append(error.value.floor_bytes or 0)
    assert floors[1] < floors[0]


def test_repeated_blocks_leave_others_room(monkeypatch: pytest.MonkeyPatch) -> None:
    """What others have sent away is not there for a block that a checkpoint repeats."""
    torch.manual_seed(0)
    model, x = nn.Sequential(*(Layer(32) for _ in range(4))), torch.randn(1024, 32)
    backend = fxckpt.compile_blocks(model, 3_000_000, inner="aot_eager", offload=Host("1GiB", RATE))

    def step() -> None:
        model.zero_grad(set_to_none=True)
        y = model[0](x)
        for layer in model[1:]:
            y = checkpoint(layer, y, use_reentrant=False)
        y.square().mean().backward()

    for _ in range(3):
        step()
    taken: list[int] = []
    least = StepGraph.least

    def noted(graph: StepGraph, limit: int | None = None, away: int = 0) -> int:
        taken.append(away)
        return least(graph, limit, away)

    monkeypatch.setattr(StepGraph, "least", noted)
    for graph in backend._graphs:
        graph.repeated = None
    step()
    assert backend.step is not None and backend.step.last is not None
    first, *repeated = backend.step.last.calls
    assert taken == [first.away_bytes] and first.away_bytes > 0
    assert repeated and not any(call.away_bytes for call in repeated)


def test_one_graph_keeps_its_plan() -> None:
    """A step of one graph has the peak of the graph's plan."""
    host = Host("1GiB", RATE)
    backend = fxckpt.Backend(0.4, inner="aot_eager", offload=host)
    torch.manual_seed(0)
    model, x = nn.Sequential(*(Layer(32) for _ in range(6))), torch.randn(1024, 32)
    forward = torch.compile(lambda: model(x).square().mean(), backend=backend)

    def step() -> None:
        model.zero_grad(set_to_none=True)
        forward().backward()

    for _ in range(2):
        step()
    (plan,) = backend.plans
    model.zero_grad(set_to_none=True)
    assert plan.offloads and host.peak_bytes == plan.away_bytes
    assert fxckpt.measure_peak(lambda: forward().backward()) == plan.peak_bytes
