"""Plans without execution: ``fxckpt.plan``."""

from __future__ import annotations

import logging
import pickle
import traceback
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

import fxckpt
from tests.models.blocks import Net

log = logging.getLogger(__name__)


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


def test_captures_count_in_no_limit() -> None:
    """However many models of a class were planned, a later one is planned and compiled."""

    def model() -> nn.Module:
        return nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8))

    with torch._dynamo.config.patch(accumulated_recompile_limit=4, recompile_limit=4):
        for _ in range(6):
            fxckpt.plan(model(), torch.randn(4, 8))
            fxckpt.plan_step(model(), torch.randn(4, 8), budget=1.0)
        backend = fxckpt.Backend(inner="aot_eager")
        torch.compile(model(), backend=backend)(torch.randn(4, 8)).sum().backward()
    assert len(backend.plans) == 1


def test_a_function_closes_over_a_meta_model() -> None:
    """A function that closes over a model on the meta device is planned as the model is."""
    with torch.device("meta"):
        model, x = (
            nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64)),
            torch.empty(8, 64),
        )
    plan = fxckpt.plan(lambda x: model(x).sin().sum(), x)
    real = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64))
    assert plan.digest == fxckpt.plan(lambda x: real(x).sin().sum(), torch.empty(8, 64)).digest


class Logs(nn.Linear):
    """A layer that logs in its forward."""

    def forward(self, x: Tensor) -> Tensor:
        log.warning("a call")
        return super().forward(x).sin()


def test_log_calls_are_left_out() -> None:
    """A model that calls a logger is captured whole."""
    plan = fxckpt.plan(Logs(8, 8), torch.randn(4, 8))
    plain = fxckpt.plan(nn.Sequential(nn.Linear(8, 8), _Sin()), torch.randn(4, 8))
    assert (plan.saved, plan.peak_bytes) == (plain.saved, plain.peak_bytes)


class _Sin(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.sin()


class Branches(nn.Linear):
    """A layer whose forward branches on its values."""

    def forward(self, x: Tensor) -> Tensor:
        if x.sum() > 0:  # the line
            return x
        return super().forward(x)


def test_capture_error_shows_the_line() -> None:
    """The error has the user's line and few others, and Dynamo's own stack is left out."""
    with pytest.raises(fxckpt.CaptureError, match="does not capture as one graph") as error:
        fxckpt.plan(nn.Sequential(Branches(8, 8)), torch.randn(4, 8))
    told = str(error.value).splitlines()
    assert len(told) <= 6 and "if x.sum() > 0:  # the line" in told[1] and __file__ in told[1]
    assert "torch/_dynamo" not in "".join(traceback.format_exception(error.value))
