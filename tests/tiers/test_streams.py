"""Copies of a GPU follow what they must, and hold what they read or write, on simulated streams."""

from __future__ import annotations

import gc
import math
import weakref
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import fxckpt
from fxckpt import Backend, policies
from fxckpt.tiers import Disk, Host, Throttled, Tier, streams
from fxckpt.tiers.ops import fetch, fetched, send, sent
from tests.steps import differing, outcome
from tests.tiers.simulated_cuda import DEVICE, Queue, SimulatedCuda

Simulate = Callable[..., SimulatedCuda]
BOTH = pytest.mark.parametrize("late", [False, True], ids=["at once", "late"])


@pytest.fixture
def simulate(monkeypatch: pytest.MonkeyPatch) -> Simulate:
    def simulate(late: bool = True, **options: bool) -> SimulatedCuda:
        cuda = SimulatedCuda(late=late, **options)
        monkeypatch.setattr(streams, "CUDA", cuda)
        return cuda

    return simulate


def there(value: Tensor, tier: Tier) -> Tensor:
    """Send a value away, and spoil it as soon as that is legal."""
    held = sent(send(value, tier.number), value, tier.number)
    value.fill_(math.nan)
    return held


def back(held: Tensor, tier: Tier) -> Tensor:
    return fetched(fetch(held, tier.number, DEVICE), held, tier.number)


@BOTH
def test_a_value_comes_back(simulate: Simulate, late: bool) -> None:
    cuda, host = simulate(late), Host("1MiB", 1e9)
    for i in range(5):  # Blocks are lent again.
        value = torch.randn(100) + i
        expected = value.clone()
        assert torch.equal(back(there(value, host), host), expected)
    assert len(cuda.locked) == 1
    assert host.used_bytes == 0


@BOTH
def test_models_have_the_same_gradients(simulate: Simulate, late: bool) -> None:
    """Compiled steps and eager regions have the gradients of the model as it is."""
    torch.manual_seed(0)
    torch._dynamo.reset()
    model = nn.Sequential(*(nn.Sequential(nn.Linear(16, 32), nn.GELU()) for _ in "1"))
    model.extend(nn.Sequential(nn.Linear(32, 32), nn.GELU()) for _ in "234")
    x = torch.randn(64, 16)
    expected = {n: t.clone() for n, t in outcome(model, model, (x,)).items()}
    cuda, host = simulate(late), Host("1GiB", 1e9)
    backend = Backend(policy=policies.offload("*"), inner="aot_eager", offload=host)
    compiled = torch.compile(model, backend=backend)

    def regions(x: Tensor) -> Tensor:
        for layer in model:
            x = fxckpt.checkpoint(layer, x, offload=host)
        return x

    for step in (compiled, regions):
        host.restart_peak()
        for _ in range(3):
            model.zero_grad(set_to_none=True)
            assert differing(expected, outcome(model, step, (x,))) == []
        assert host.peak_bytes > 0 == host.used_bytes
    assert cuda.locked


def test_a_copy_follows_the_blocks_last(simulate: Simulate) -> None:
    """A block that was given back is not written before the copy from it is made."""
    cuda, host = simulate(), Host("1MiB", 1e9)
    held = there(torch.ones(100), host)
    first, second = Queue(cuda), Queue(cuda)
    cuda.callers = first
    came = back(held, host)
    address = held.data_ptr()
    del held
    cuda.callers = second
    value = torch.full((100,), 2.0)
    held = sent(send(value, host.number), value, host.number)
    assert held.data_ptr() == address
    second.synchronize()
    assert torch.equal(held, torch.full((100,), 2.0))
    assert torch.equal(came, torch.ones(100))


def test_the_beginners_stream_waits_too(simulate: Simulate) -> None:
    """A value that another stream lets go is not written by its own before it was copied."""
    cuda, host = simulate(), Host("1MiB", 1e9)
    cuda.callers = begins = Queue(cuda)
    value = torch.ones(100)
    held = send(value, host.number)
    cuda.callers = Queue(cuda)
    sent(held, value, host.number)
    begins.add(lambda: value.zero_())
    begins.synchronize()
    assert torch.equal(held, torch.ones(100))


@pytest.mark.parametrize("way", ["send", "fetch"])
def test_an_abandoned_copy_leaks_nothing(simulate: Simulate, way: str) -> None:
    """The host waits for a copy that no stream waits for; the memory of the GPU lives till then."""
    cuda, host = simulate(), Host("1MiB", 1e9)
    cuda.callers = Queue(cuda)
    value = torch.ones(100)
    held = send(value, host.number)
    if way == "fetch":
        sent(held, value, host.number)
        value = fetch(held, host.number, DEVICE)
    copy = host.copies[held.data_ptr()]
    assert isinstance(copy, streams.StreamCopy) and copy._value is not None
    del value
    assert host.used_bytes == 400
    del held
    assert copy._value is None
    assert host.used_bytes == 0 == len(host.copies)


def test_memory_is_unlocked_before_it_goes(simulate: Simulate) -> None:
    """Blocks that make room for others, and those of a tier that is gone, are unlocked."""
    cuda, host = simulate(), Host("1000B", 1e9)
    there(torch.ones(100), host)
    there(torch.ones(200), host)
    assert list(cuda.locked.values()) == [800]
    alive = weakref.ref(host)
    del host
    gc.collect()
    assert alive() is None and not cuda.locked


@BOTH
def test_memory_that_is_not_locked_serves(simulate: Simulate, late: bool) -> None:
    cuda, host = simulate(late, refuses=True), Host("1MiB", 1e9)
    value = torch.randn(100)
    expected = value.clone()
    with pytest.warns(UserWarning, match="does not page-lock 400 bytes"):
        held = there(value, host)
    assert torch.equal(back(held, host), expected)
    assert not cuda.locked


@BOTH
@pytest.mark.parametrize("kind", ["disk", "throttled"])
def test_slow_places_serve(simulate: Simulate, late: bool, kind: str, tmp_path: Path) -> None:
    """Threads wait for their copies, and lock no memory."""
    cuda = simulate(late)
    tier: Tier = Disk(tmp_path, "1MiB", 1e9) if kind == "disk" else Throttled("1MiB", 1e7)
    for i in range(3):
        value = torch.randn(100) + i
        expected = value.clone()
        assert torch.equal(back(there(value, tier), tier), expected)
    assert not cuda.locked and tier.used_bytes == 0


def test_memory_goes_from_gpu_to_cpu(simulate: Simulate, monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread of the CPU does not write to a block that a GPU still reads."""
    cuda, host = simulate(), Host("1MiB", 1e9)
    held = there(torch.ones(100), host)
    cuda.callers = Queue(cuda)
    came = back(held, host)
    del held
    monkeypatch.setattr(cuda, "has", lambda device: False)
    there(torch.zeros(100), host)
    cuda.callers.synchronize()
    assert torch.equal(came, torch.ones(100))


def test_captures_are_refused(simulate: Simulate) -> None:
    cuda, host = simulate(), Host("1MiB", 1e9)
    cuda.capturing = True
    with pytest.raises(fxckpt.InvalidOption, match="capture of a CUDA graph"):
        send(torch.ones(3), host.number)
    assert host.used_bytes == 0
