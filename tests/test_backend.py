"""The compile door as users meet it."""

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
from fxckpt.backend import _InductorPartitioner


class Net(nn.Module):
    """Blocks with dropout."""

    def __init__(self, blocks: int = 4, width: int = 32) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width), nn.Dropout(0.2)) for _ in range(blocks)
        )

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(x)
        return x


def gradients(model: nn.Module, forward: Callable[..., Tensor], x: Tensor) -> list[Tensor]:
    model.zero_grad(set_to_none=True)
    torch.manual_seed(3)
    forward(x).square().mean().backward()
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


def test_found_by_name_without_import() -> None:
    program = (
        "import torch, sys\n"
        "m = torch.nn.Linear(4, 4)\n"
        "c = torch.compile(m, backend='fxckpt', options={'inner': 'aot_eager', 'budget': 1.0})\n"
        "c(torch.ones(2, 4)).sum().backward()\n"
        "assert 'fxckpt' in sys.modules and m.weight.grad is not None\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True, env=dict(os.environ), timeout=120)


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
    got = gradients(model, torch.compile(model, backend=fxckpt.Backend(budget=0.6, inner=inner)), x)
    assert len(seen) == 2 and seen[1] > seen[0]
    assert all(torch.equal(a, b) for a, b in zip(expected, got, strict=True))


def test_inference_needs_no_plan() -> None:
    model = Net().eval()
    backend = fxckpt.Backend(inner="aot_eager")
    with torch.no_grad():
        assert torch.equal(torch.compile(model, backend=backend)(torch.ones(2, 32)), model(torch.ones(2, 32)))
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
    assert "graph 2 of 2" in str(backend.report())


def test_state_dict_keeps_its_keys() -> None:
    model = Net()
    keys = list(model.state_dict())
    torch.compile(model, backend=fxckpt.Backend(inner="aot_eager"))(torch.randn(4, 32)).sum().backward()
    assert list(model.state_dict()) == keys


def test_in_place_ops_and_plain_arguments() -> None:
    def f(x: Tensor, scale: float, flags: dict[str, bool]) -> Tensor:
        y = x.sin()
        y.mul_(scale)
        if flags["twice"]:
            y[0] += 1.0
        return (y.exp().sin().exp().sin().exp().sin() * x).sum()

    x = torch.randn(100, requires_grad=True)
    (expected,) = torch.autograd.grad(f(x, 2.0, {"twice": True}), x)
    compiled = torch.compile(f, backend=fxckpt.Backend(budget=0.8, inner="aot_eager"))
    (got,) = torch.autograd.grad(compiled(x, 2.0, {"twice": True}), x)
    assert torch.equal(expected, got)


def test_budget_below_the_floor_says_what_would_do() -> None:
    model, x = Net(), torch.randn(512, 32)
    with pytest.raises(fxckpt.BudgetInfeasible, match="least peak") as error:
        torch.compile(model, backend=fxckpt.Backend(budget="1B", inner="aot_eager"))(x)
    torch._dynamo.reset()
    backend = fxckpt.Backend(budget=error.value.floor_bytes, inner="aot_eager")
    torch.compile(model, backend=backend)(x).sum().backward()
    assert backend.plans[0].peak_bytes <= error.value.floor_bytes


def test_infeasible_pickles() -> None:
    error = pickle.loads(pickle.dumps(fxckpt.BudgetInfeasible("no", floor_bytes=7, budget_bytes=3)))
    assert (str(error), error.floor_bytes, error.budget_bytes) == ("no", 7, 3)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"bugdet": 1}, "unknown option 'bugdet'"),
        ({"inner": "inductr"}, "'inductor', 'aot_eager'"),
        ({"budget": "lots"}, "does not parse"),
        ({"cost": "time"}, "'roofline', 'flops'"),
        ({"policy": 3}, "not callable"),
    ],
)
def test_wrong_option_is_named(options: dict[str, Any], says: str) -> None:
    with pytest.raises(fxckpt.FxckptError, match=says):
        torch.compile(Net(), backend="fxckpt", options=options)(torch.randn(2, 32))


def test_uuid_changes_with_options() -> None:
    def uuid(**options: Any) -> str:
        return _InductorPartitioner(fxckpt.Backend(**options)).uuid()

    assert uuid(budget=0.5) == uuid(budget=0.5)
    assert len({uuid(), uuid(budget=0.5), uuid(budget=0.6), uuid(cost="flops")}) == 4


def test_plan_without_execution_is_the_backend_s_plan() -> None:
    model, x = Net(), torch.randn(512, 32)
    planned = fxckpt.plan(model, x, budget=0.6)
    backend = fxckpt.Backend(budget=0.6, inner="aot_eager")
    torch.compile(model, backend=backend)(x).sum().backward()
    (compiled,) = backend.plans
    assert (planned.saved, planned.schedule, planned.peak_bytes) == (compiled.saved, compiled.schedule, compiled.peak_bytes)
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


@pytest.mark.parametrize("answer", [float("nan"), -1.0, float("inf")])
def test_wrong_cost_names_the_node(answer: float) -> None:
    class Odd:
        name = "odd"

        def seconds(self, node: fx.Node) -> float:
            return answer

        def flops(self, node: fx.Node) -> int:
            return 0

    with pytest.raises(fxckpt.InvalidCost, match="node 'sin'"):
        fxckpt.plan(lambda x: x.sin().sum(), torch.ones(3, requires_grad=True), cost=Odd())


def test_policy_binds() -> None:
    from torch.utils.checkpoint import CheckpointPolicy

    def save_no_matmul(ctx: object, op: object, *args: object, **kwargs: object) -> CheckpointPolicy:
        matmul = op is torch.ops.aten.addmm.default
        return CheckpointPolicy.MUST_RECOMPUTE if matmul else CheckpointPolicy.PREFER_SAVE

    model, x = Net(), torch.randn(512, 32)
    backend = fxckpt.Backend(policy=save_no_matmul, inner="aot_eager")
    expected = gradients(model, model, x)
    got = gradients(model, torch.compile(model, backend=backend), x)
    assert all(torch.equal(a, b) for a, b in zip(expected, got, strict=True))
    assert not any(name.startswith("addmm") for name in backend.plans[0].saved)
    assert any(name.startswith("addmm") for name in backend.plans[0].recomputed)


def test_inductor_inside() -> None:
    model, x = Net(2), torch.randn(512, 32)
    model.eval()  # Inductor draws other random numbers than eager
    expected = gradients(model, model, x)
    backend = fxckpt.Backend(budget=0.7)
    got = gradients(model, torch.compile(model, backend=backend), x)
    assert all(torch.allclose(a, b, atol=1e-6) for a, b in zip(expected, got, strict=True))
    assert backend.plans[0].schedule
