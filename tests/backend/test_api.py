"""The ``torch.compile`` backend as users meet it."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

import fxckpt
from tests.models.blocks import Net, gradients


def test_found_by_name_without_import() -> None:
    program = (
        "import torch, sys\n"
        "m = torch.nn.Linear(4, 4)\n"
        "c = torch.compile(m, backend='fxckpt', options={'inner': 'aot_eager', 'budget': 1.0})\n"
        "c(torch.ones(2, 4)).sum().backward()\n"
        "assert 'fxckpt' in sys.modules and m.weight.grad is not None\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True, env=dict(os.environ), timeout=120)


def test_a_backend_is_pickled_by_its_options() -> None:
    """What it compiled stays in the process; an equal one compiles anew."""
    backend = fxckpt.Backend(budget=0.8, inner="aot_eager", policy=fxckpt.policies.save_matmuls)
    model, x = Net(), torch.randn(512, 32)
    gradients(model, torch.compile(model, backend=backend), x)
    other = pickle.loads(pickle.dumps(backend))
    assert repr(other) == repr(backend) and not other.plans
    gradients(model, torch.compile(model, backend=other), x)
    assert [plan.digest for plan in other.plans] == [plan.digest for plan in backend.plans]


def test_loss_computed_outside() -> None:
    model, x = Net(), torch.randn(512, 32)
    expected = gradients(model, model, x)
    backend = fxckpt.Backend(budget=0.6, inner="aot_eager")
    got = gradients(model, torch.compile(model, backend=backend), x)
    assert all(torch.equal(a, b) for a, b in zip(expected, got, strict=True))
    assert backend.plans[0].schedule


def test_inner_callable_gets_forward_then_backward() -> None:
    seen: list[int] = []

    def inner(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        seen.append(len(gm.graph.nodes))
        return gm.forward

    model, x = Net(), torch.randn(512, 32)
    expected = gradients(model, model, x)
    backend = fxckpt.Backend(budget=0.6, inner=inner, scope="graph")
    got = gradients(model, torch.compile(model, backend=backend), x)
    assert len(seen) == 2 and seen[1] > seen[0]
    assert all(torch.equal(a, b) for a, b in zip(expected, got, strict=True))


def test_inference_needs_no_plan() -> None:
    model = Net().eval()
    backend = fxckpt.Backend(inner="aot_eager")
    with torch.no_grad():
        assert torch.equal(
            torch.compile(model, backend=backend)(torch.ones(2, 32)), model(torch.ones(2, 32))
        )
    assert backend.plans == () and "no graph" in str(backend.report())


def test_graph_break_makes_two_plans_and_two_tables() -> None:
    model = Net(2)

    def broken(x: Tensor) -> Tensor:
        y = model(x)
        torch._dynamo.graph_break()
        return model(y)

    backend = fxckpt.Backend(inner="aot_eager")
    torch.compile(broken, backend=backend)(torch.randn(4, 32)).sum().backward()
    assert len(backend.plans) == 2
    assert len(backend.report().table()) == 2


def test_report_without_graphs_names_graph_breaks_log() -> None:
    """The report names TORCH_LOGS if Dynamo compiled no graph of the model."""

    def broken(x: Tensor) -> Tensor:
        for _ in range(2):
            x = x.sin()
            torch._dynamo.graph_break()
        return x.sum()

    backend = fxckpt.Backend(inner="aot_eager")
    torch.compile(broken, backend=backend)(torch.randn(4, 32, requires_grad=True)).backward()
    assert backend.plans == ()
    assert "TORCH_LOGS=graph_breaks" in str(backend.report())


def test_report_of_graphs_without_a_seen_break() -> None:
    """The report says if its graphs may be parts of a step that Dynamo left to Python."""
    layers = nn.ModuleList([Net(), Net()])

    def broken(x: Tensor) -> Tensor:
        for layer in layers:
            x = layer(x)
            torch._dynamo.graph_break()
        return x.sum()

    backend = fxckpt.Backend(inner="aot_eager")
    torch.compile(broken, backend=backend)(torch.randn(4, 32)).backward()
    assert len(backend.plans) > 1
    assert "TORCH_LOGS=graph_breaks" in str(backend.report())


def test_state_dict_keeps_its_keys() -> None:
    model = Net()
    keys = list(model.state_dict())
    torch.compile(model, backend=fxckpt.Backend(inner="aot_eager"))(
        torch.randn(4, 32)
    ).sum().backward()
    assert list(model.state_dict()) == keys


def test_infeasible_share_after_graph_break() -> None:
    """An infeasible share of a small graph says that the model broke into graphs."""
    model = Net()

    def broken(x: Tensor) -> Tensor:
        y = model(x)
        torch._dynamo.graph_break()
        return y.sin().sum()

    with pytest.raises(
        fxckpt.BudgetInfeasible, match="This is graph 2 of those that the model broke into"
    ) as error:
        torch.compile(broken, backend=fxckpt.Backend(budget=0.9, inner="aot_eager", scope="graph"))(
            torch.randn(512, 32)
        )
    torch._dynamo.reset()
    with pytest.raises(fxckpt.BudgetInfeasible, match="This is graph 1 of the step"):
        torch.compile(broken, backend=fxckpt.Backend(budget="1B", inner="aot_eager"))(
            torch.randn(512, 32)
        )
    assert error.value.floor_bytes > error.value.budget_bytes


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"bugdet": 1}, "Did you mean 'budget'"),
        ({"options": "x"}, "Give a dict"),
        ({"inner": "inductr"}, "'inductor', 'aot_eager'"),
        ({"budget": "lots"}, "does not parse"),
        ({"cost": "time"}, "'roofline', 'flops', 'measured'"),
        ({"policy": 3}, "is not a policy"),
    ],
)
def test_wrong_option_is_named(options: dict[str, Any], says: str) -> None:
    with pytest.raises(fxckpt.FxckptError, match=says):
        torch.compile(Net(), backend="fxckpt", options=options)(torch.randn(2, 32))


def test_defect_of_planner_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """A defect of the planner raises PlanningFailed, and the step does not run."""
    from torch._subclasses.fake_tensor import DataDependentOutputException

    def broken(*args: object, **kwargs: object) -> object:
        raise DataDependentOutputException("aten.item")

    monkeypatch.setattr("fxckpt.planner.planner.prepare", broken)
    with pytest.raises(fxckpt.PlanningFailed, match=r"(?s)defect.*meanwhile, leave out fxckpt"):
        torch.compile(Net(2), backend=fxckpt.Backend(inner="aot_eager"))(torch.randn(8, 32))
