"""Offload on a GPU: equal gradients, the plan's peaks, and no race between copies and kernels."""

from __future__ import annotations

import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fxckpt
from fxckpt import Backend, policies
from fxckpt.tiers.ops import fetch, fetched, send, sent
from tests.steps import UNCHECKPOINTED, differing, outcome
from tests.tiers.adversary import left_in

pytestmark = pytest.mark.gpu

LINK = (50e9, 50e9)
"""Bytes per second, so that plans do not depend on the machine."""


def stack(device: str) -> tuple[nn.Module, Tensor]:
    """Return layers whose values take tens of megabytes each on a GPU."""
    torch.manual_seed(0)
    torch._dynamo.reset()
    rows = 16384 if device == "cuda" else 512
    layers = [nn.Sequential(nn.Linear(256, 1024), nn.GELU(), nn.Linear(1024, 256)) for _ in "12345"]
    return nn.Sequential(*layers).to(device), torch.randn(rows, 256, device=device)


def host() -> fxckpt.tiers.Host:
    return fxckpt.tiers.Host("4GiB", bytes_per_second=LINK)


def compiled(model: nn.Module, tier: fxckpt.tiers.Tier) -> tuple[Callable[..., Any], Backend]:
    """Return a model that sends all that it may away, and its backend."""
    backend = Backend(policy=policies.offload("*"), inner="aot_eager", offload=tier)
    return torch.compile(model, backend=backend), backend


def copied(seen: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in seen.items()}


@pytest.mark.usefixtures("deterministic")
def test_values_come_back_as_they_went(device: str) -> None:
    """Many steps, each of other data, have the gradients of the step without offload."""
    plain, x = stack(device)
    forward = torch.compile(plain, backend=UNCHECKPOINTED)
    wanted = []
    for i in range(20):
        plain.zero_grad(set_to_none=True)
        wanted.append(copied(outcome(plain, forward, (x + i,))))
    tier = host()
    model, x = stack(device)
    step, backend = compiled(model, tier)
    for i, expected in enumerate(wanted):
        model.zero_grad(set_to_none=True)
        assert differing(expected, outcome(model, step, (x + i,))) == [], f"step {i}"
    (plan,) = backend.plans
    assert plan.offloads and 0 < tier.peak_bytes <= plan.away_bytes
    assert tier.used_bytes == 0


@pytest.mark.parametrize("inner", ["aot_eager", "inductor"])
def test_peak_is_the_plans(device: str, inner: str) -> None:
    model, x = stack(device)
    tier = host()
    backend = Backend(policy=policies.offload("*"), inner=inner, offload=tier)
    step = torch.compile(lambda x: model(x).square().mean(), backend=backend)
    for _ in range(2):
        step(x).backward()
        model.zero_grad(set_to_none=True)
    (plan,) = backend.plans
    assert plan.offloads
    tier.restart_peak()
    peak = fxckpt.measure_peak(lambda: step(x).backward())
    wrong_by = 0.001 if inner == "aot_eager" else 0.01
    assert peak == pytest.approx(plan.compiled_peak_bytes or plan.peak_bytes, rel=wrong_by)
    assert (tier.peak_bytes, tier.used_bytes) == (plan.away_bytes, 0)


@pytest.mark.parametrize("inner", ["aot_eager", "inductor"])
def test_budget_is_kept(device: str, inner: str) -> None:
    """Over a fast link a plan within a budget sends values away, and keeps the budget."""
    model, x = stack(device)
    tier = fxckpt.tiers.Host("4GiB", bytes_per_second=1e12)
    backend = Backend(0.7, inner=inner, offload=tier)
    step = torch.compile(lambda x: model(x).square().mean(), backend=backend)
    for _ in range(2):
        step(x).backward()
        model.zero_grad(set_to_none=True)
    (plan,) = backend.plans
    assert plan.offloads and plan.budget_bytes is not None
    peak = fxckpt.measure_peak(lambda: step(x).backward())
    assert peak <= plan.budget_bytes


def test_steps_of_inductor_are_right(device: str) -> None:
    """Many steps compiled by Inductor, of other data, are those of the model as it is."""
    model, x = stack(device)
    wanted = []
    for i in range(12):
        model.zero_grad(set_to_none=True)
        wanted.append(copied(outcome(model, model, (x + i,))))
    model, x = stack(device)
    tier = host()
    backend = Backend(policy=policies.offload("*"), inner="inductor", offload=tier)
    step = torch.compile(model, backend=backend)
    for i, expected in enumerate(wanted):
        model.zero_grad(set_to_none=True)
        seen = outcome(model, step, (x + i,))
        for name in (name for name in expected if name.startswith(("gradient of", "output"))):
            torch.testing.assert_close(
                seen[name], expected[name], rtol=1e-3, atol=1e-5, msg=lambda m, n=name: f"{n}: {m}"
            )
    assert backend.plans[0].offloads and tier.used_bytes == 0


@pytest.mark.usefixtures("deterministic")
@pytest.mark.parametrize("kind", ["disk", "throttled"])
def test_slow_places_serve(device: str, kind: str, tmp_path: Path) -> None:
    """Copies that the host waits for bring the same bits back."""
    model, x = stack(device)
    expected = copied(outcome(model, torch.compile(model, backend=UNCHECKPOINTED), (x,)))
    model, x = stack(device)
    disk = fxckpt.tiers.Disk(tmp_path, "4GiB", LINK)
    tier = disk if kind == "disk" else fxckpt.tiers.Throttled("4GiB", LINK)
    step, backend = compiled(model, tier)
    for _ in range(3):
        model.zero_grad(set_to_none=True)
        assert differing(expected, outcome(model, step, (x,))) == []
    assert backend.plans[0].offloads and tier.used_bytes == 0


def test_values_that_arrive_are_checked(device: str) -> None:
    """With ``verify="exact"`` what comes back is compared with a checksum, and is the same."""
    model, x = stack(device)
    backend = Backend(
        policy=policies.offload("*"), inner="aot_eager", offload=host(), verify="exact"
    )
    step = torch.compile(model, backend=backend)
    for i in range(5):
        outcome(model, step, (x + i,))
    assert backend.plans[0].offloads


@pytest.mark.parametrize("way", ["send", "fetch"])
def test_abandoned_copies_leak_nothing(device: str, way: str) -> None:
    """A copy that nobody waits for ends before its memory is lent to others."""
    tier, number = host(), 2**24 if device == "cuda" else 2**10
    for i in range(5):
        value = torch.full((number,), float(i), device=device)
        held = send(value, tier.number)
        if way == "fetch":
            held = sent(held, value, tier.number)
            value = fetch(held, tier.number, value.device)
        del value, held
        other = torch.full((number,), -1.0, device=device)
        if device == "cuda":
            torch.cuda.synchronize()
        assert bool((other == -1).all())
    gc.collect()
    assert left_in(tier) == 0 == len(tier.copies)


def test_page_locked_memory_is_unlocked(device: str) -> None:
    """After tiers are gone, what has their addresses can be copied to and page-locked."""
    number = 2**22 if device == "cuda" else 2**10
    value = torch.ones(number, device=device)
    for _ in range(5):
        tier = host()
        held = sent(send(value, tier.number), value, tier.number)
        back = fetched(fetch(held, tier.number, value.device), held, tier.number)
        assert torch.equal(back, value)
        if device == "cuda":
            torch.cuda.synchronize()
            assert held.is_pinned()
        del held, back, tier
        gc.collect()
        assert torch.equal(torch.ones(number).to(device), value)


def test_step_runs_on_a_stream_of_the_user(device: str) -> None:
    if device != "cuda":
        pytest.skip("a CPU has no streams")
    model, x = stack(device)
    expected = copied(outcome(model, model, (x,)))
    model, x = stack(device)
    step, _ = compiled(model, host())
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):
        for _ in range(5):
            model.zero_grad(set_to_none=True)
            seen = outcome(model, step, (x,))
            torch.cuda.synchronize()
            names = [n for n in differing(expected, seen) if n.startswith("gradient")]
            assert names == []


@pytest.mark.parametrize("fails", [False, True])
def test_forward_without_backward_leaves_nothing(device: str, fails: bool) -> None:
    """Memory is given back with a forward that is dropped, and the steps after it are right."""
    model, x = stack(device)
    expected = copied(outcome(model, model, (x,)))
    model, x = stack(device)
    tier = host()
    step, _ = compiled(model, tier)
    for _ in range(3):
        result = step(x)
        if fails:
            with pytest.raises(RuntimeError):
                result.backward(torch.ones(3, device=device))
        del result
    assert tier.used_bytes == 0
    model.zero_grad(set_to_none=True)
    assert differing(expected, outcome(model, step, (x,))) == []


@pytest.mark.usefixtures("deterministic")
def test_eager_regions_send_away(device: str) -> None:
    """Regions have the gradients of the model as it is, and send their inputs away."""

    def run(checkpoint: Callable[..., Tensor]) -> dict[str, Tensor]:
        model, x = stack(device)

        def forward(x: Tensor) -> Tensor:
            for layer in model:
                x = checkpoint(layer, x)
            return x

        for _ in range(3):
            model.zero_grad(set_to_none=True)
            seen = outcome(model, forward, (x,))
        return copied(seen)

    expected, tier = run(lambda layer, x: layer(x)), host()
    assert differing(expected, run(lambda f, x: fxckpt.checkpoint(f, x, offload=tier))) == []
    assert tier.peak_bytes > 0 == tier.used_bytes
    policy = policies.save_matmuls
    kept = run(lambda f, x: fxckpt.checkpoint(f, x, policy=policy, offload=tier))
    assert differing(expected, kept) == []


def test_rates_of_the_link_are_measured(device: str) -> None:
    tier = fxckpt.tiers.Host("1GiB")
    there, back = tier.rates(torch.device(device))
    assert there > 1e8 and back > 1e8
    assert tier.rates(torch.device(device)) == (there, back)
    assert tier.used_bytes == 0


def test_replays_send_nothing_away() -> None:
    with pytest.raises(fxckpt.InvalidOption, match="a replay cannot send values away"):
        Backend(0.5, mode="reduce-overhead", offload=host())
