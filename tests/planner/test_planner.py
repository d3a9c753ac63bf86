"""The planner's errors, and the sizes that a plan holds for."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx
from torch._subclasses import FakeTensorMode

import fxckpt
from fxckpt.planner.planner import device_of, planner_of
from tests.models.blocks import Net


def test_budget_below_floor_names_feasible_one() -> None:
    """The error of an infeasible budget names a feasible one."""
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


@pytest.mark.parametrize("answer", [float("nan"), -1.0, float("inf"), 1e300, 10**400])
def test_wrong_cost_names_the_node(answer: float) -> None:
    class Odd:
        name = "odd"

        def seconds(self, node: fx.Node) -> float:
            return answer

        def flops(self, node: fx.Node) -> int:
            return 0

    with pytest.raises(fxckpt.InvalidCost, match="node 'sin'"):
        fxckpt.plan(lambda x: x.sin().sum(), torch.ones(3, requires_grad=True), cost=Odd())


@pytest.mark.parametrize(
    "read", [lambda t: t.sum().item(), lambda t: bool(t.max() > 1), lambda t: {}["no"]]
)
def test_raising_policy_or_cost_fails_the_step(
    read: Callable[[Tensor], Any],
) -> None:
    """A policy or cost that raises fails the step, which does not run without a budget."""

    def policy(ctx: object, op: object, *args: Any, **kwargs: Any) -> Any:
        return read(next(a for a in args if isinstance(a, Tensor)))

    class Reading:
        name = "reading"

        def seconds(self, node: fx.Node) -> float:
            return read(node.meta["val"])

        def flops(self, node: fx.Node) -> int:
            return 0

    model, x = Net(2), torch.randn(8, 32)
    with pytest.raises(fxckpt.InvalidOption, match="the policy raised"):
        torch.compile(model, backend=fxckpt.Backend(budget=0.7, inner="aot_eager", policy=policy))(
            x
        )
    torch._dynamo.reset()
    with pytest.raises(fxckpt.InvalidCost, match=r"raised .* of node"):
        torch.compile(model, backend=fxckpt.Backend(budget=0.7, inner="aot_eager", cost=Reading()))(
            x
        )


def test_plan_is_not_used_for_larger_sizes() -> None:
    """A plan is not used for inputs larger than those that it was made for."""
    model = Net()
    backend = fxckpt.Backend(budget=0.8, inner="aot_eager", scope="graph")
    compiled = torch.compile(model, backend=backend, dynamic=True)

    def peak(rows: int) -> int:
        x = torch.randn(rows, 32)
        compiled(x).square().mean().backward()
        model.zero_grad()
        return fxckpt.measure_peak(lambda: compiled(x).square().mean().backward())

    peaks = [peak(rows) for rows in (64, 32, 256)]
    small, large = backend.plans
    assert max(peaks[:2]) <= small.budget_bytes < peaks[2] <= large.budget_bytes


def test_a_plan_takes_no_budget() -> None:
    """A plan is applied as it is; a budget beside it is refused."""
    plan = fxckpt.plan(Net(1), torch.randn(8, 32))
    assert planner_of(None, plan, "flops").known == (plan,)
    with pytest.raises(fxckpt.InvalidOption, match="a plan were given"):
        planner_of(0.5, plan, "flops")


def test_options_are_checked_before_planning() -> None:
    """An invalid budget, cost or policy raises without a graph."""
    for budget, policy, cost in ((-1, None, "flops"), (None, None, "minutes"), (None, 3, "flops")):
        with pytest.raises(fxckpt.FxckptError):
            planner_of(budget, policy, cost)


def test_the_device_is_the_first_accelerator() -> None:
    """A graph with values on an accelerator is that device's, whatever else it reads."""
    graph = fx.Graph()
    for device in ("cpu", "meta", "cpu"):
        graph.placeholder(device).meta["val"] = torch.empty(2, device=device)
    assert device_of(graph) == torch.device("meta")
    assert device_of(fx.Graph()) == torch.device("cpu")


@pytest.mark.parametrize("device", ["cpu", "cuda:0"])
def test_graph_of_dynamo_has_its_device(device: str) -> None:
    """Dynamo keeps the values of its graph under another name than a joint graph."""
    found = []

    def backend(gm: fx.GraphModule, inputs: Any) -> Any:
        found.append(device_of(gm.graph))
        return gm

    with FakeTensorMode():
        x = torch.ones(2, 4, device=device)
        torch.compile(torch.sin, backend=backend, fullgraph=True)(x)
    assert found == [torch.device(device)]
