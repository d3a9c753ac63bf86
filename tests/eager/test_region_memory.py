"""Memory of planned regions: what Python, autograd and the recorder hold is in the plan."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import fxckpt
from fxckpt.reason import Decision, Reason
from tests.steps import differing

WIDTH = 64
WEIGHT = torch.ones(WIDTH, requires_grad=True)


def few_dropouts(x: Tensor) -> Tensor:
    """Each dropout leaves a generator state of 5,056 bytes."""
    for _ in range(8):
        x = F.dropout((x * WEIGHT).sin(), 0.1, training=True)
    return x


def unread_draws(x: Tensor) -> Tensor:
    """The state of a draw is held where nothing reads what was drawn."""
    for _ in range(8):
        torch.randn(3)
        x = (x * WEIGHT).sin()
    return x


def noise(x: Tensor) -> Tensor:
    for _ in range(8):
        x = (x * WEIGHT).sin() * torch.rand_like(x)
    return x


def variables(x: Tensor) -> Tensor:
    """Variables hold values that the plan recomputes."""
    a = (x * WEIGHT).sin()
    b = (a * WEIGHT).exp().tanh()
    c = (b * WEIGHT).sin()
    d = (c * WEIGHT).cos()
    e = (d * WEIGHT).sin()
    return (e * WEIGHT).cos() + a


def lists(x: Tensor) -> Tensor:
    held = []
    for _ in range(8):
        x = (x * WEIGHT).sin()
        held.append(x)
    return torch.stack(held).sum(0)


def zeros(x: Tensor) -> Tensor:
    """Zeros are kept, for a kernel that no one sees may have filled them."""
    for _ in range(8):
        x = (x * WEIGHT).sin() + torch.zeros(x.shape) * x
    return x


def accumulation(x: Tensor) -> Tensor:
    total = torch.zeros_like(x)
    for _ in range(8):
        x = (x * WEIGHT).sin()
        total.add_(x)
    return total


def masks(x: Tensor) -> Tensor:
    for _ in range(8):
        x = (x * WEIGHT).sin()[torch.ones(len(x), dtype=torch.bool)].exp().tanh()
    return x


def selections(x: Tensor) -> Tensor:
    for _ in range(4):
        x = (x * WEIGHT).sin()
        x = torch.masked_select(x, x > -2).view(-1, WIDTH).exp().tanh()
    return x


def positions(x: Tensor) -> Tensor:
    for _ in range(8):
        x = (x * WEIGHT).sin()
        x = x.index_select(0, (x.detach()[:, 0] > -2).nonzero().squeeze(-1)).tanh()
    return x


def slices(x: Tensor) -> Tensor:
    """Each slice of the weight has a gradient of its own."""
    for _ in range(8):
        a, b = x.chunk(2, -1)
        x = torch.cat([a * WEIGHT[:32], (b * WEIGHT[32:]).exp()], -1).tanh()
    return x


def equal_products(x: Tensor) -> Tensor:
    """Eager mode computes both products."""
    for _ in range(6):
        x = torch.cat([x * WEIGHT, (x * WEIGHT).sin()], 0)[::2].contiguous()
    return x


def loss(x: Tensor) -> Tensor:
    """The storage of a mean loss has room for all of its terms."""
    for _ in range(6):
        x = (x * WEIGHT).sin()
    return F.mse_loss(x, torch.ones_like(x))


class Scatter(nn.Module):
    """A mixture of experts that writes each expert's rows in place."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, 4)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH))
            for _ in range(4)
        )

    def forward(self, x: Tensor) -> Tensor:
        weights = self.router(x).softmax(-1)
        chosen = weights.topk(2, -1).indices
        out = torch.zeros_like(x)
        for i, expert in enumerate(self.experts):
            mask = (chosen == i).any(-1)
            out[mask] += expert(x[mask]) * weights[mask][:, i : i + 1]
        return out


class Recurrence(nn.Module):
    """An LSTM cell, whose gates are pieces of one storage."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.LSTMCell(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        hidden = (torch.zeros(8, WIDTH), torch.zeros(8, WIDTH))
        for part in x.split(8):
            hidden = self.cell(part, hidden)
        return hidden[0]


FUNCTIONS = (
    few_dropouts,
    unread_draws,
    noise,
    variables,
    lists,
    zeros,
    accumulation,
    masks,
    selections,
    positions,
    slices,
    equal_products,
    loss,
)
MODULES: dict[str, Callable[[], nn.Module]] = {
    "scatter": lambda: nn.Sequential(Scatter(), Scatter()),
    "recurrence": Recurrence,
    "encoder": lambda: nn.TransformerEncoder(
        nn.TransformerEncoderLayer(WIDTH, 4, 128, batch_first=True), 2, enable_nested_tensor=False
    ),
}


def peaks(region: Callable[..., Any], x: Tensor, budget: Any, **options: Any) -> tuple[int, int]:
    """Return the planned and the measured peak of a second call of a region."""
    with fxckpt.record_regions() as regions:
        out = fxckpt.checkpoint(region, x, budget=budget, **options)
    plan = regions[0].plan
    assert plan is not None
    gradient = torch.ones_like(out)
    out.backward(gradient)
    regions.clear()
    del out

    def step() -> None:
        fxckpt.checkpoint(region, x, budget=budget, **options).backward(gradient)

    step()
    return plan.peak_bytes, fxckpt.measure_peak(step)


@pytest.mark.parametrize("budget", [1.0, 0.7])
@pytest.mark.parametrize("region", FUNCTIONS)
def test_no_region_exceeds_its_plan(region: Callable[[Tensor], Tensor], budget: float) -> None:
    planned, measured = peaks(region, torch.randn(128, WIDTH), budget)
    assert measured <= planned


@pytest.mark.parametrize("region", [few_dropouts, unread_draws, noise])
def test_states_of_tiny_draws_are_counted(region: Callable[[Tensor], Tensor]) -> None:
    """Of tensors of 2,048 bytes, states are most of what is held."""
    planned, measured = peaks(region, torch.randn(8, WIDTH), 0.9)
    assert measured <= planned


@pytest.mark.parametrize("region", [few_dropouts, noise])
def test_kept_draws_are_in_the_plan(region: Callable[[Tensor], Tensor]) -> None:
    """Without states the results of random ops are held, and never recomputed."""
    planned, measured = peaks(region, torch.randn(128, WIDTH), 0.7, preserve_rng_state=False)
    assert measured <= planned


@pytest.mark.parametrize("budget", [1.0, 0.7])
@pytest.mark.parametrize("name", MODULES)
def test_modules_keep_plans_and_bits(name: str, budget: float) -> None:
    module, x = MODULES[name](), torch.randn(128, WIDTH)
    given = x.view(8, 16, WIDTH) if name == "encoder" else x
    planned, measured = peaks(module, given, budget)
    assert measured <= planned

    def gradients(run: Callable[..., Any]) -> dict[str, Tensor]:
        module.zero_grad()
        torch.manual_seed(3)
        run(given).square().sum().backward()
        return {n: p.grad for n, p in module.named_parameters() if p.grad is not None}

    within = gradients(lambda t: fxckpt.checkpoint(module, t, budget=budget))
    assert differing(within, gradients(module)) == []


def test_states_are_freed_as_the_first_call_keeps() -> None:
    """The first call recomputes what it keeps, and lets go of states that nothing draws from."""
    x = torch.randn(8, WIDTH)
    gradient = torch.ones(8, WIDTH)

    def first() -> None:
        fxckpt.checkpoint(lambda t: few_dropouts(t), x, budget=limit).backward(gradient)

    limit, _ = peaks(few_dropouts, x, 1.0)
    assert fxckpt.measure_peak(first) <= limit


def test_kept_factories_do_not_replan(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch detaches what a factory returns where the region keeps it, which is no op of it."""
    import sys

    module = sys.modules["fxckpt.eager.region_cache"]
    planned: list[int] = []
    real = module.region_plan_of
    monkeypatch.setattr(module, "region_plan_of", lambda *args: planned.append(1) or real(*args))
    for _ in range(4):
        fxckpt.checkpoint(masks, torch.randn(8, WIDTH), budget=0.9).sum().backward()
    assert len(planned) == 1


def test_draws_with_and_without_states_apart() -> None:
    """A plan that recomputes draws does not serve a region that keeps them."""
    x = torch.randn(128, WIDTH)
    with fxckpt.record_regions() as regions:
        for preserve in (True, False):
            fxckpt.checkpoint(noise, x, budget=0.6, preserve_rng_state=preserve)
    reasons = [
        {row.reason for row in r.plan.rows if row.op.startswith("rand_like")}
        for r in regions
        if r.plan is not None
    ]
    assert Reason.HELD not in reasons[0]
    assert reasons[1] == {Reason.HELD}


def test_masks_are_saved_as_they_are() -> None:
    """A trace reads a mask as indices; what is kept is the mask."""
    x = torch.randn(128, WIDTH)
    mask = torch.arange(128) % 3 > 0

    def region(x: Tensor) -> Tensor:
        return ((x * WEIGHT).sin()[mask.logical_not()].exp() * 2).sum()

    with fxckpt.record_regions() as regions:
        fxckpt.checkpoint(region, x, budget=1.0).backward()
    (row,) = (row for row in regions[0].rows if "logical_not" in row.op)
    assert row.what == "kept"
    plan = regions[0].plan
    assert plan is not None
    assert {r.decision for r in plan.rows if r.name == "unseen"} == {Decision.SAVED}


def test_retained_graphs_lose_nothing() -> None:
    """What a plan frees before it recomputes it stays where the graph is kept."""
    module, x = MODULES["encoder"](), torch.randn(8, 16, WIDTH)
    torch.manual_seed(1)
    out = fxckpt.checkpoint(module, x, budget=0.5).square().sum()
    first, second = (
        torch.autograd.grad(out, list(module.parameters()), retain_graph=keep)
        for keep in (True, False)
    )
    assert all(map(torch.equal, first, second))
