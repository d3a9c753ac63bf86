"""Workspace of kernels, measured by the allocator's events."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from fxckpt.costs import workspace
from fxckpt.costs.workspace import MeasuredWorkspace
from tests.costs.nodes import node_of


def test_a_pointwise_op_has_none() -> None:
    """An op that allocates only its result has no workspace."""
    assert MeasuredWorkspace()(node_of(lambda x: x.sin(), torch.ones(64, 64))) == 0


def test_a_sort_has_some() -> None:
    """A sort along a strided dimension copies at least a part of its operand."""
    assert MeasuredWorkspace()(node_of(lambda x: x.sum(0).cumsum(0), torch.ones(4, 4))) >= 0
    node = node_of(
        lambda x, w: F.conv2d(x, w, padding=1), torch.ones(4, 8, 16, 16), torch.ones(8, 8, 3, 3)
    )
    assert MeasuredWorkspace()(node) > 0


def test_each_call_is_measured_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Equal calls run once, others again."""
    ran: list[int] = []
    real = workspace.allocation_events
    monkeypatch.setattr(workspace, "allocation_events", lambda fn: (ran.append(1), real(fn))[1])
    measured = MeasuredWorkspace()
    for size in (8, 8, 9):
        measured(node_of(lambda x: x.cumsum(0), torch.ones(size)))
    assert len(ran) == 2


def test_dense_products_are_not_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """A product that a BLAS reads in place is not measured; one with a copied operand is."""
    ran: list[int] = []
    real = workspace.allocation_events
    monkeypatch.setattr(workspace, "allocation_events", lambda fn: (ran.append(1), real(fn))[1])
    x = torch.ones(8, 8)
    measured = MeasuredWorkspace()
    assert measured(node_of(lambda x: x @ x.t(), x)) == 0 and ran == []
    measured(node_of(lambda x: x @ x[:1].expand(8, 8), x))
    measured(node_of(lambda x: x @ x, x.bfloat16()))
    assert len(ran) == 2


def test_off_the_cpu_nothing_is_measured() -> None:
    """An op on another device counts no workspace."""
    assert MeasuredWorkspace()(node_of(lambda x: x.cumsum(0), torch.ones(8, device="meta"))) == 0


def test_an_op_that_refuses_is_planned_as_none(caplog: pytest.LogCaptureFixture) -> None:
    """An op that raises on synthetic inputs counts none, and the log says so."""
    node = node_of(lambda a: torch.linalg.cholesky_ex(a, check_errors=True)[0], -torch.eye(3))
    refusing = next(n for n in node.graph.nodes if "cholesky" in str(n.target))
    with caplog.at_level("INFO", "fxckpt"):
        assert MeasuredWorkspace()(refusing) == 0
    assert "not measured" in caplog.text
