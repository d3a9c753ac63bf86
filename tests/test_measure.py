"""Measured peaks of calls whose allocations are known."""

from __future__ import annotations

import gc

import torch

import fxckpt


def test_counts_what_is_live_together() -> None:
    def two_of_three() -> None:
        a = torch.empty(1000, dtype=torch.uint8)
        b = torch.empty(500, dtype=torch.uint8)
        del a, b
        torch.empty(1200, dtype=torch.uint8)

    assert fxckpt.measure_peak(two_of_three) == 1500


def test_starts_from_zero_whatever_is_allocated() -> None:
    before = torch.empty(10_000, dtype=torch.uint8)
    assert fxckpt.measure_peak(lambda: torch.empty(64, dtype=torch.uint8)) == 64
    assert before.numel() == 10_000


def test_earlier_garbage_does_not_lower_the_peak() -> None:
    """Garbage that an earlier measurement left in a cycle does not lower the next peak."""

    def leave_a_cycle() -> None:
        cycle: list[object] = [torch.empty(1 << 18)]
        cycle.append(cycle)

    def collect_and_allocate() -> None:
        gc.collect()
        torch.empty(1 << 18)

    fxckpt.measure_peak(leave_a_cycle)
    assert fxckpt.measure_peak(collect_and_allocate) == 1 << 20
