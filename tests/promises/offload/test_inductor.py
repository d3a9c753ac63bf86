"""Values sent away by steps that Inductor compiles: the same bits, exact peaks, no race."""

from __future__ import annotations

import gc
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo import compiled_autograd

import fxckpt
from fxckpt.inductor.plan_cache import PlanCache
from fxckpt.solver.search.price_search import PriceSearch
from fxckpt.tiers import Host, Tier
from tests.models.zoo import ENTRIES, Entry
from tests.promises.offload.stack import Layer, WithLoss
from tests.promises.offload.test_many_graphs import Layer as Block
from tests.promises.test_models import Trial
from tests.tiers.adversary import Adversary

Forward = Callable[[Tensor], Tensor]


def loss_of_layers(count: int = 2) -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    return WithLoss(nn.Sequential(*(Layer(16) for _ in range(count)))), torch.randn(256, 16)


def compiled(
    model: nn.Module, budget: object, tier: Tier | None, **options: object
) -> tuple[Forward, fxckpt.Backend]:
    torch._dynamo.reset()
    options = {"scope": "graph", **options}
    backend = fxckpt.Backend(budget, offload=tier, **options)  # type: ignore[arg-type]
    return torch.compile(model, backend=backend), backend


def gradients(model: nn.Module, forward: Forward, x: Tensor) -> list[Tensor]:
    """The gradients of one step, which draws the same masks each time."""
    model.zero_grad(set_to_none=True)
    torch.manual_seed(1)
    forward(x).backward()
    found = [p.grad for p in model.parameters() if p.grad is not None]
    model.zero_grad(set_to_none=True)
    return found


def same(a: list[Tensor], b: list[Tensor]) -> bool:
    return len(a) == len(b) > 0 and all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize("late", [True, False], ids=["late", "early"])
def test_peaks_and_bits_are_those_promised(late: bool) -> None:
    """Gradients are those of the compile without offload; the peak is the one that was read."""
    model, x = loss_of_layers()
    expected = gradients(model, compiled(model, None, None)[0], x)
    host = Adversary(late=late)
    forward, backend = compiled(model, 0.62, host)
    assert same(expected, gradients(model, forward, x))
    (plan,) = backend.plans
    assert host.sent == host.fetched == len(plan.offloads) > 0
    host.restart_peak()
    measured = fxckpt.measure_peak(lambda: forward(x).backward())
    assert measured == plan.compiled_peak_bytes <= (plan.budget_bytes or 0)
    assert host.peak_bytes == plan.away_bytes and host.used_bytes == 0


class Attention(nn.Module):
    """Attention whose weights pass a dropout that copies nothing, as many models have it."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.parts, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.parts(x).chunk(3, dim=-1)
        weights = nn.functional.dropout((q @ k.mT).softmax(-1), 0.0)
        return x + self.out(weights @ v)


def test_values_behind_removed_copies_are_sent_once() -> None:
    """A value that is read through a copy that Inductor removed is one, here and on the link."""
    torch.manual_seed(0)
    model = WithLoss(nn.Sequential(*(Attention(16) for _ in range(3))))
    x = torch.randn(8, 48, 16)
    expected = gradients(model, compiled(model, None, None)[0], x)
    host = Adversary(late=True)
    forward, backend = compiled(model, 0.6, host)
    assert same(expected, gradients(model, forward, x))
    (plan,) = backend.plans
    assert host.sent == host.fetched == len(plan.offloads) > 0
    assert any(o.bytes == 8 * 48 * 48 * 4 for o in plan.offloads)
    host.restart_peak()
    assert fxckpt.measure_peak(lambda: forward(x).backward()) == plan.compiled_peak_bytes
    assert host.peak_bytes == plan.away_bytes


class Channels(nn.Module):
    """A convolution, and a norm of its channels, as ConvNeXt has them."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.mix = nn.Conv2d(width, width, 3, padding=1)
        self.norm, self.out = nn.LayerNorm(width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        rows = self.norm(self.mix(x).permute(0, 2, 3, 1))
        return x + self.out(rows).sigmoid().permute(0, 3, 1, 2)


def test_values_that_inductor_lays_out_anew() -> None:
    """A value that is copied into its traced layout is sent from the buffer that is kept."""
    torch.manual_seed(0)
    model = WithLoss(nn.Sequential(*(Channels(16) for _ in range(3))))
    x = torch.randn(8, 16, 8, 8)
    expected = gradients(model, compiled(model, None, None)[0], x)
    host = Adversary(late=True)
    forward, backend = compiled(model, None, host, policy=fxckpt.policies.offload("model.*.norm"))
    assert same(expected, gradients(model, forward, x))
    assert host.sent == host.fetched == len(backend.plans[0].offloads) > 3
    assert host.used_bytes == 0


@pytest.mark.sweep
@pytest.mark.parametrize("entry", ENTRIES, ids=lambda entry: entry.name)
def test_models_keep_bits_and_peaks(entry: Entry) -> None:
    """Language models and models of images have the gradients of the compile without offload."""
    trial = Trial(entry)
    expected = trial.step(compiled(trial.model, None, None)[0])
    host = Adversary(late=True)
    forward, backend = compiled(trial.model, 0.75, host)
    found = trial.step(forward)
    (plan,) = backend.plans
    assert host.sent == host.fetched == len(plan.offloads)
    host.restart_peak()
    measured = trial.peak(forward)
    assert measured <= (plan.budget_bytes or 0)
    assert abs(measured - (plan.compiled_peak_bytes or 0)) <= 0.03 * measured
    assert host.peak_bytes == plan.away_bytes and host.used_bytes == 0
    differ = [n for n in found if not torch.allclose(found[n], expected[n], 1e-4, 1e-6)]
    assert differ == []


def test_dynamic_sizes_keep_peaks_and_bits() -> None:
    """One graph for many sizes sends the bytes of each; the peak is that of the largest."""
    model, _ = loss_of_layers()
    batches = [torch.randn(rows, 16) for rows in (256, 200, 130)]
    for x in batches:
        torch._dynamo.mark_dynamic(x, 0, min=2, max=256)
    plain, _ = compiled(model, None, None)
    expected = [gradients(model, plain, x) for x in batches]
    host = Adversary(late=True)
    forward, backend = compiled(model, 300_000, host)
    assert all(
        same(e, gradients(model, forward, x)) for e, x in zip(expected, batches, strict=True)
    )
    (plan,) = backend.plans
    assert host.sent == host.fetched == 3 * len(plan.offloads) > 0
    peaks = [fxckpt.measure_peak(lambda x=x: forward(x).backward()) for x in batches]
    assert peaks[2] < peaks[1] < peaks[0] == plan.compiled_peak_bytes <= 300_000


@pytest.mark.parametrize("inner", ["inductor", "aot_eager"])
def test_compiled_autograd_fetches_values(inner: str) -> None:
    """The backward that compiled autograd traces has the bits and the peak of the plan's."""
    model, x = loss_of_layers()
    expected = gradients(model, compiled(model, None, None, inner=inner)[0], x)
    host = Adversary(late=True)
    forward, backend = compiled(model, 0.62, host, inner=inner)

    def step() -> None:
        model.zero_grad(set_to_none=True)
        torch.manual_seed(1)
        with compiled_autograd._enable(torch.compile(backend=backend)):
            forward(x).backward()

    step()
    assert same(expected, [p.grad for p in model.parameters() if p.grad is not None])
    (plan,) = backend.plans
    assert host.sent == host.fetched == len(plan.offloads) > 0
    assert fxckpt.measure_peak(step) <= (plan.budget_bytes or 0)
    assert host.used_bytes == 0


def test_a_second_backward_fetches_again() -> None:
    model, x = loss_of_layers()
    host = Adversary(late=True)
    forward, backend = compiled(model, 0.62, host)
    loss = forward(x)
    loss.backward(retain_graph=True)
    first = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    model.zero_grad(set_to_none=True)
    loss.backward()
    assert same(first, [p.grad for p in model.parameters() if p.grad is not None])
    assert host.fetched == 2 * host.sent == 2 * len(backend.plans[0].offloads) > 0
    del loss
    assert host.used_bytes == 0


def test_a_step_that_ends_early_leaks_nothing() -> None:
    """A forward without a backward, and a tier that is full, leave the next step right."""
    model, x = loss_of_layers()
    forward, backend = compiled(model, 0.62, Host("1GiB", 1e12))
    expected = gradients(model, forward, x)
    host = Host(backend.plans[0].away_bytes, 1e12)
    forward, _ = compiled(model, 0.62, host)
    loss = forward(x)
    assert host.used_bytes > 0
    with pytest.raises(fxckpt.TierFull, match="values whose backward is still to come"):
        forward(x)
    del loss
    gc.collect()
    assert host.used_bytes == 0
    assert same(expected, gradients(model, forward, x))
    assert host.used_bytes == 0 and not host.copies


def test_a_kept_plan_sends_what_it_sent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The next process finds the plan of an equal tier; another tier is planned for anew."""
    store = PlanCache(tmp_path / "plans")
    monkeypatch.setattr(PlanCache, "beside_inductor", lambda: store)
    model, x = loss_of_layers()
    forward, backend = compiled(model, 0.62, Host("1GiB", 1e12))
    expected, (plan,) = gradients(model, forward, x), backend.plans
    monkeypatch.setattr(PriceSearch, "__call__", None)
    again = Host("1GiB", 1e12)
    forward, backend = compiled(model, 0.62, again)
    assert same(expected, gradients(model, forward, x))
    assert backend.plans[0].offloads == plan.offloads
    assert again.peak_bytes == plan.away_bytes
    for other in (None, Host("2GiB", 1e12)):
        with pytest.raises(fxckpt.PlanningFailed, match="not callable"):
            compiled(model, 0.62, other)[0](x)


def test_what_a_policy_demands_is_sent() -> None:
    model, x = loss_of_layers()
    expected = gradients(model, compiled(model, None, None)[0], x)
    host = Adversary(late=True)
    policy = fxckpt.policies.offload("model.*.gates")
    forward, backend = compiled(model, None, host, policy=policy)
    assert same(expected, gradients(model, forward, x))
    rows = backend.plans[0].explain().filter(decision="offloaded").rows
    assert {row.reason for row in rows} == {fxckpt.Reason.POLICY} and host.sent == len(rows) > 0


def test_an_infeasible_budget_tells_of_offload() -> None:
    model, x = loss_of_layers()
    with pytest.raises(fxckpt.BudgetInfeasible, match=r"With offload=.*could reach about \d"):
        compiled(model, 0.1, None)[0](x)


def test_blocks_keep_the_budget_of_a_step() -> None:
    """Levels of several graphs send values away, with the bits of the unplanned compile."""

    def settled(backend: fxckpt.Backend) -> tuple[int, list[Tensor]]:
        torch._dynamo.reset()
        torch.manual_seed(0)
        blocks, x = nn.Sequential(*(Block(32) for _ in range(3))), torch.randn(512, 32)
        for block in blocks:
            block.compile(backend=backend)

        def step() -> None:
            blocks.zero_grad(set_to_none=True)
            blocks(x).square().mean().backward()

        for _ in range(3):
            step()
        peak = fxckpt.measure_peak(step)
        return peak, [p.grad for p in blocks.parameters() if p.grad is not None]

    most, expected = settled(fxckpt.Backend())
    host = Adversary(late=True)
    peak, found = settled(fxckpt.Backend(most // 2, offload=host))
    assert same(expected, found) and peak <= most // 2
    assert host.sent == host.fetched > 0 and host.used_bytes == 0
