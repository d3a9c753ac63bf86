"""Comparisons of steps; the command line tests run one."""

from __future__ import annotations

import pytest
import torch

import fxckpt
from fxckpt.cli.benchmark import Run, _verdict, compare, table
from fxckpt.cli.factory import ModelCall


def test_compare_refuses_steps_that_cannot_run() -> None:
    """A benchmark needs a timed step, and a model with memory."""
    target = ModelCall(torch.sin, (torch.ones(2, requires_grad=True),), {})
    with pytest.raises(fxckpt.InvalidOption, match="at least one step"):
        compare(target, [0.5], steps=0)
    on_meta = ModelCall(torch.sin, (torch.ones(2, device="meta"),), {})
    with pytest.raises(fxckpt.CaptureError, match="meta device"):
        compare(on_meta, [0.5], steps=1)


def test_infeasible_budget_keeps_other_rows() -> None:
    """A budget that is infeasible has a row with the least peak; the others have figures."""
    model = torch.nn.Sequential(*(torch.nn.Linear(32, 32) for _ in range(4)))
    target = ModelCall(model, (torch.randn(256, 32),), {})
    runs = compare(target, ["1B", "min"], steps=1)
    assert [run.infeasible is None for run in runs] == [True, False, True]
    assert runs[2].gradients == "equal, bitwise" and runs[2].seconds is not None
    refused = table(runs).records()[1]
    assert refused["peak_bytes"] is refused["seconds"] is None
    assert "infeasible: the least is" in str(table(runs))


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
