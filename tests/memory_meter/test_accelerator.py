"""Watches over a device whose statistics know one peak, against the true peaks."""

from __future__ import annotations

import pytest
import torch

from fxckpt import measure_peak
from fxckpt.errors import FxckptError
from fxckpt.memory_meter import AcceleratorMeter, meter_of


class Device:
    """A device's statistics: what is in use, and the peak since somebody reset it."""

    def __init__(self) -> None:
        self.now = self.most = 0

    def take(self, nbytes: int) -> None:
        self.now += nbytes
        self.most = max(self.most, self.now)

    def reset(self) -> None:
        self.most = self.now

    def meter(self) -> AcceleratorMeter:
        return AcceleratorMeter(lambda: (self.now, self.most), self.reset)


def test_peak_above_an_earlier_one_is_exact() -> None:
    device = Device()
    device.take(100)
    watch = device.meter().watch()
    device.take(50)
    device.take(-150)
    assert (watch.peak(), watch.exact, device.most) == (150, True, 150)


def test_peak_below_an_earlier_one_is_bounded() -> None:
    """Below the peak of somebody before, the watch returns that one, and says so."""
    device = Device()
    device.take(100)
    device.take(-90)
    watch = device.meter().watch()
    device.take(20)
    assert (watch.peak(), watch.seen(), watch.exact) == (100, 30, False)
    device.take(70)
    assert (watch.peak(), watch.seen(), watch.exact) == (100, 100, True)
    watch.close()
    device.take(900)
    assert (watch.peak(), watch.exact) == (100, True)


def test_own_reset_keeps_what_watches_know() -> None:
    device = Device()
    meter = device.meter()
    outer = meter.watch()
    device.take(300)
    device.take(-200)
    meter.restart_peak()
    inner = meter.watch()
    device.take(50)
    assert (inner.peak(), outer.peak(), device.most) == (150, 300, 150)
    assert inner.exact and outer.exact


def test_foreign_reset_makes_a_lower_bound() -> None:
    device = Device()
    device.take(500)
    device.take(-400)
    watch = device.meter().watch()
    device.take(100)
    device.reset()
    device.take(-200)
    assert (watch.peak(), watch.exact) == (200, False)
    watch.reset()
    device.take(300)
    assert (watch.peak(), watch.exact) == (300, True)


def test_figures_are_torchs(monkeypatch: pytest.MonkeyPatch) -> None:
    """The meter reads torch's own statistics, of the device that was asked for."""
    asked: list[object] = []

    def statistics(device: torch.device) -> dict[str, object]:
        asked.append(device)
        return {"allocated_bytes": {"all": {"current": 512, "peak": 1024}}} if asked[1:] else {}

    monkeypatch.setattr(torch.cuda, "memory_stats_as_nested_dict", statistics)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 6)
    meter = meter_of("cuda")
    assert meter is meter_of("cuda:6") and meter is not meter_of("cuda:5")
    assert [meter.allocated() for _ in range(2)] == [0, 512]
    assert set(asked) == {torch.device("cuda", 6)}


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_peak_of_a_real_device() -> None:
    """A peak measured inside a watch is reset by it, and the watch keeps its own."""
    meter = meter_of("cuda")
    torch.cuda.reset_peak_memory_stats()
    start = meter.allocated()
    with meter.watch() as watch:
        torch.empty(1 << 20, device="cuda", dtype=torch.uint8)
        inner = measure_peak(lambda: torch.empty(1 << 19, device="cuda", dtype=torch.uint8))
    assert (watch.peak() - start, watch.exact, inner) == (1 << 20, True, 1 << 19)


@pytest.mark.parametrize("name", ["mps:0", "meta"])
def test_device_without_statistics_is_refused(name: str) -> None:
    with pytest.raises(FxckptError, match=f"The memory in use on {name} was asked for"):
        meter_of(name)
