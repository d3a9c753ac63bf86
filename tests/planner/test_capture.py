"""Plans without execution: ``fxckpt.plan``."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, fx

import fxckpt
from tests.models.blocks import Net


def test_plan_function_equals_backend_plan() -> None:
    """Planning without execution gives the plan of the backend."""
    model, x = Net(), torch.randn(512, 32)
    planned = fxckpt.plan(model, x, budget=0.6)
    backend = fxckpt.Backend(budget=0.6, inner="aot_eager")
    torch.compile(model, backend=backend)(x).sum().backward()
    (compiled,) = backend.plans
    assert (planned.saved, planned.schedule, planned.peak_bytes) == (
        compiled.saved,
        compiled.schedule,
        compiled.peak_bytes,
    )
    assert next(r for r in planned.rows if r.op.startswith("addmm")).module.startswith("blocks.")


def test_plan_of_a_model_without_memory() -> None:
    with torch.device("meta"):
        model = Net(2, 4096)
    plan = fxckpt.plan(model, torch.empty(8192, 4096, device="meta"), budget=0.8)
    assert 2**29 < plan.peak_bytes <= plan.budget_bytes


def test_plan_prints_and_pickles() -> None:
    plan = fxckpt.plan(Net(), torch.randn(512, 32), budget=0.6)
    assert pickle.loads(pickle.dumps(plan)) == plan
    text = str(plan.explain())
    assert "recomputed" in text and "extra time" in text and "budget" in text
    assert set(plan.reasons) == {*plan.saved, *plan.recomputed}


def test_nothing_to_differentiate() -> None:
    with pytest.raises(fxckpt.CaptureError, match="no output needs a gradient"):
        fxckpt.plan(torch.sin, torch.ones(3))


def test_graph_break_in_plan_is_explained() -> None:
    def broken(x: Tensor) -> Tensor:
        torch._dynamo.graph_break()
        return x.sin()

    with pytest.raises(fxckpt.CaptureError, match="graph break"):
        fxckpt.plan(broken, torch.ones(3, requires_grad=True))


def test_plans_do_not_affect_later_compiles() -> None:
    """After plans of two sizes, a compile of a third still has static sizes."""
    model = Net()
    for rows in (96, 64):
        fxckpt.plan(model, torch.randn(rows, 32))
    shapes: list[Any] = []

    def inner(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        shapes.extend(size for t in example_inputs if isinstance(t, Tensor) for size in t.shape)
        return gm.forward

    torch.compile(model, backend=fxckpt.Backend(inner=inner))(torch.randn(48, 32)).sum().backward()
    assert all(type(size) is int for size in shapes)
