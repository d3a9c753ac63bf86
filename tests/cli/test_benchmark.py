"""Comparisons of steps; the command line tests run one."""

from __future__ import annotations

import pytest
import torch

import fxckpt
from fxckpt.cli.benchmark import Run, _verdict, compare, table
from fxckpt.cli.factory import Target


def test_compare_refuses_steps_that_cannot_run() -> None:
    """A benchmark needs a timed step, and a model with memory."""
    target = Target(torch.sin, (torch.ones(2, requires_grad=True),), {})
    with pytest.raises(fxckpt.InvalidOption, match="at least one step"):
        compare(target, [0.5], steps=0)
    on_meta = Target(torch.sin, (torch.ones(2, device="meta"),), {})
    with pytest.raises(fxckpt.CaptureError, match="meta device"):
        compare(on_meta, [0.5], steps=1)


def test_verdict() -> None:
    """Gradients are equal, equal up to rounding, or different."""
    a = torch.ones(3)
    assert _verdict([a], [a.clone()]) == "equal, bitwise"
    assert _verdict([a], [a + 1e-6]) == "equal up to rounding"
    assert _verdict([a], [a + 1]) == _verdict([a], []) == "DIFFERENT"


def test_table_leaves_unknown_predictions_empty() -> None:
    """A run without a single plan has no prediction."""
    rows = table([Run("uncheckpointed", 2048, None, 0.5, 1.0, "")])
    assert rows.records()[0]["predicted_bytes"] is None
    assert str(rows).splitlines()[-1].split() == [
        "uncheckpointed",
        "2.0",
        "KiB",
        "500.00",
        "ms",
        "1.00",
    ]
