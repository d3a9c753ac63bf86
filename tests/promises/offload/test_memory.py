"""Memory of steps that send values away: exact peaks, nothing left behind."""

from __future__ import annotations

import gc
import mmap
import os
import threading
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import fxckpt
from fxckpt.tiers import Disk, Host, Tier
from tests.promises.offload.stack import WithLoss, compiled, stack
from tests.tiers.adversary import Adversary


def test_peaks_are_exact_to_the_byte() -> None:
    """The device's peak and the host's are the plan's at every budget that sends values."""
    for budget in (0.7, 0.45, 0.3):
        torch._dynamo.reset()
        layers, (x,) = stack()
        model = WithLoss(layers)
        host = Host("1GiB", 1e9)
        forward, backend = compiled(model, host, budget)

        def step(forward: Callable[..., Any] = forward, x: Tensor = x) -> None:
            forward(x).backward()

        step()
        model.zero_grad(set_to_none=True)
        measured = fxckpt.measure_peak(step)
        (plan,) = backend.plans
        assert plan.offloads
        assert measured == plan.peak_bytes <= (plan.budget_bytes or 0)
        assert host.peak_bytes == plan.away_bytes


def test_forwards_in_flight_have_blocks_of_their_own() -> None:
    """Two forwards before their backwards, in either order, give the gradients of each."""
    model, (x,) = stack()
    host = Adversary(late=True)
    forward, _ = compiled(model, host)

    def gradients(loss: Tensor) -> list[Tensor]:
        return list(torch.autograd.grad(loss, list(model.parameters())))

    torch.manual_seed(3)
    expected = [gradients(model(scale * x).square().sum()) for scale in (1, 2)]
    torch.manual_seed(3)
    losses = [forward(scale * x).square().sum() for scale in (1, 2)]
    for i in (1, 0):
        found = gradients(losses[i])
        assert all(torch.equal(a, b) for a, b in zip(expected[i], found, strict=True))
    losses.clear()
    assert host.used_bytes == 0


def test_a_forward_without_a_backward_leaks_nothing() -> None:
    model, (x,) = stack()
    host = Host("1GiB", 1e9)
    forward, _ = compiled(model, host)
    out = forward(x)
    assert host.used_bytes > 0
    del out
    gc.collect()
    assert host.used_bytes == 0
    with torch.no_grad():
        forward(x)
    assert host.peak_bytes == backend_bytes(forward, host, x)


def backend_bytes(forward: Callable[..., Any], host: Host, x: Tensor) -> int:
    """The bytes that one more forward has in use at most."""
    host.restart_peak()
    forward(x)
    return host.peak_bytes


class Fails(torch.autograd.Function):
    """Identity whose backward fails when it is told to."""

    now = False

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        if Fails.now:
            raise RuntimeError("the user's own")
        return gradient


def test_an_error_between_leaks_nothing() -> None:
    """After an error between forward and backward all is given back, and the next step is right."""
    model, (x,) = stack()
    host = Adversary(late=True)
    forward, _ = compiled(model, host)

    def step() -> list[Tensor]:
        torch.manual_seed(5)
        loss = Fails.apply(forward(x)).square().sum()
        return list(torch.autograd.grad(loss, list(model.parameters())))

    expected = step()
    Fails.now = True
    try:
        with pytest.raises(RuntimeError, match="the user's own"):
            step()
    finally:
        Fails.now = False
    gc.collect()
    assert host.used_bytes == 0
    assert all(torch.equal(a, b) for a, b in zip(expected, step(), strict=True))


def test_a_full_tier_ends_the_step_alone() -> None:
    """A second forward in flight does not fit: the error says so, and the next step is right."""
    model, (x,) = stack()
    probe, backend = compiled(model, Host("1GiB", 1e9))
    probe(x)
    (plan,) = backend.plans
    torch._dynamo.reset()
    host = Host(plan.away_bytes, 1e9)
    forward, _ = compiled(model, host)
    first = forward(x)
    with pytest.raises(fxckpt.TierFull, match="values whose backward is still to come"):
        forward(x)
    first.square().sum().backward()
    del first
    gc.collect()
    assert host.used_bytes == 0
    forward(x).square().sum().backward()
    assert host.used_bytes == 0


def test_dynamic_sizes_move_what_there_is() -> None:
    """One graph for many sizes sends the bytes of each."""
    model, _ = stack()
    host = Adversary(late=True)
    forward, _ = compiled(model, host, "300KiB")
    for rows in (256, 200, 130):
        x = torch.randn(rows, 16)
        torch._dynamo.mark_dynamic(x, 0, min=2, max=256)
        torch.manual_seed(2)
        expected = torch.autograd.grad(model(x).square().sum(), list(model.parameters()))
        torch.manual_seed(2)
        found = torch.autograd.grad(forward(x).square().sum(), list(model.parameters()))
        assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))
        assert host.used_bytes == 0
    assert host.sent


@pytest.mark.parametrize("steps", [150, pytest.param(10_000, marks=pytest.mark.sweep)])
@pytest.mark.parametrize("place", [Host, Disk])
def test_many_steps_hold_no_more(place: type[Tier], steps: int, tmp_path: Path) -> None:
    """Blocks, copies, threads, files and the process's memory are those of the first steps."""
    model, (x,) = stack()
    tier = Host("1GiB", 1e9) if place is Host else Disk(tmp_path, "1GiB", 1e9)
    forward, backend = compiled(model, tier)

    def held(steps: int) -> tuple[set[threading.Thread], int, int]:
        """Run steps; return the threads, the open files and the bytes of the process then."""
        for _ in range(steps):
            model.zero_grad(set_to_none=True)
            forward(x).square().sum().backward()
        gc.collect()
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        files = len(os.listdir("/proc/self/fd"))
        return set(threading.enumerate()), files, pages * mmap.PAGESIZE

    threads, files, nbytes = held(steps // 3)
    later_threads, later_files, later_nbytes = held(steps - steps // 3)
    # Threads of earlier tests may end meanwhile.
    assert later_threads <= threads
    assert later_files <= files
    # Less than one value a hundred steps.
    assert later_nbytes - nbytes < max(2**20, steps // 100 * 2**14)
    assert os.listdir(tmp_path) == []
    assert tier.peak_bytes == backend.plans[0].away_bytes
    assert tier.used_bytes == 0 and not tier.copies
    assert tier.reserved_bytes == backend.plans[0].away_bytes


def test_without_offload_nothing_is_sent() -> None:
    """The default plans as before, and a tier that is not needed is not used."""
    model, (x,) = stack()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        plain = fxckpt.plan(model, x, budget=0.6)
    assert not plain.offloads and plain.stall_seconds == 0
    roomy = fxckpt.plan(model, x, budget=1.0, offload=Host("1GiB", 1e9))
    assert not roomy.offloads
