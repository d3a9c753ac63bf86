"""Watches over a device whose statistics know one peak, against the true peaks."""

from __future__ import annotations

import pytest
import torch

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
    assert (watch.peak(), watch.exact) == (100, False)
    device.take(70)
    assert (watch.peak(), watch.exact) == (100, True)
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


def test_device_without_statistics_is_refused() -> None:
    with pytest.raises(FxckptError, match="The memory in use on mps:0 was asked for"):
        meter_of(torch.device("mps", 0))
