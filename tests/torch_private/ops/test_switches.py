"""Switches by which torch selects kernels."""

from __future__ import annotations

import pytest
import torch

from fxckpt.torch_private import kernel_switches


def test_a_switch_shows() -> None:
    """The text changes with a switch, and is the same after it is set back."""
    before = kernel_switches()
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        assert kernel_switches() != before
    assert kernel_switches() == before


def test_precision_is_a_switch() -> None:
    """The precision of float32 products selects kernels."""
    precision = torch.get_float32_matmul_precision()
    before = kernel_switches()
    torch.set_float32_matmul_precision("medium")
    try:
        assert kernel_switches() != before
    finally:
        torch.set_float32_matmul_precision(precision)


def test_a_missing_switch_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """A version of torch may lack a switch."""
    monkeypatch.delattr(torch._C, "_get_nnpack_enabled")
    assert "nnpack" not in kernel_switches() and "mkldnn_enabled" in kernel_switches()
