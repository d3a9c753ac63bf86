"""Differences between plans."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import fxckpt


def test_diff_lists_changed_values(curve: fxckpt.Frontier) -> None:
    """A difference lists the values whose decision changes, and no others."""
    tight, loose = curve.plans[0], curve.plans[-1]
    change = tight.diff(loose)
    assert {(b or a).name for b, a in change.rows if (b or a)} >= set(tight.recomputed) - set(
        loose.recomputed
    )
    assert "not needed" in str(change) and f"{len(change.rows)} values" in str(change)
    assert "the same decisions" in str(tight.diff(tight))
    other = fxckpt.plan(nn.Linear(4, 4), torch.randn(2, 4))
    with pytest.raises(fxckpt.InvalidOption, match="different graphs"):
        tight.diff(other)


def test_diff_refuses_other_objects(plan: fxckpt.Plan) -> None:
    """A plan is compared with a plan only."""
    with pytest.raises(
        fxckpt.InvalidOption, match=r"diff\(None\): that is no plan. Give another plan"
    ):
        plan.diff(None)  # type: ignore[arg-type]
