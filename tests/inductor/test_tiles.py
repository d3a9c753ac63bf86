"""Tiles where Inductor compiles the halves."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend

import fxckpt
from fxckpt.inductor.planner import InductorPlanner
from fxckpt.passes.graphs import Joint

X = torch.randint(0, 2000, (512,))


class Head(nn.Module):
    """A table, a layer, and a head whose loss is in the graph."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table, self.up = nn.Embedding(2000, 32), nn.Linear(32, 32)
        self.head = nn.Linear(32, 2000, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.cross_entropy(self.head(self.up(self.table(x)).sin()), x)


def gradients(model: nn.Module, backend: object) -> list[Tensor]:
    """Return the gradients of one step of a model that is compiled."""
    model.zero_grad()
    torch._dynamo.reset()
    torch.compile(model, backend=backend)(X).backward()  # type: ignore[call-overload]
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


def measured(model: nn.Module, backend: fxckpt.Backend) -> int:
    """Return the peak of a later step of a model that is compiled."""
    compiled = torch.compile(model, backend=backend)

    def step() -> None:
        model.zero_grad()
        compiled(X).backward()

    step()
    model.zero_grad()
    return fxckpt.measure_peak(step)


def test_tiles_are_kept_apart() -> None:
    """The measured peak is the compiled one, far below that of the whole logits."""
    model = Head()
    expected = gradients(model, "inductor")
    whole = fxckpt.Backend("min", inner="inductor", cost="flops", scope="graph")
    gradients(model, whole)
    backend = fxckpt.Backend("min", inner="inductor", cost="flops", scope="graph", tile=4)
    torch.testing.assert_close(gradients(model, backend), expected, rtol=1e-4, atol=1e-7)
    (plan,), (untiled,) = backend.plans, whole.plans
    assert plan.tiling is not None and plan.tiling.count == 4
    assert plan.compiled_peak_bytes is not None and untiled.compiled_peak_bytes is not None
    assert plan.compiled_peak_bytes < 0.6 * untiled.compiled_peak_bytes
    assert measured(model, backend) == plan.compiled_peak_bytes


@pytest.mark.parametrize(("budget", "is_tiled"), [("16MiB", False), ("3MiB", True)])
def test_auto_tiles_where_the_budget_asks(budget: str, is_tiled: bool) -> None:
    """A budget that the untiled graph meets without recomputing takes no tiles."""
    model = Head()
    backend = fxckpt.Backend(budget, inner="inductor", cost="flops", tile="auto")
    gradients(model, backend)
    (plan,) = backend.plans
    assert (plan.tiling is not None) == is_tiled
    assert plan.compiled_peak_bytes is not None and plan.budget_bytes is not None
    assert plan.compiled_peak_bytes <= plan.budget_bytes


def test_what_excludes_tiles_is_an_error() -> None:
    """It is whether or not the budget asks for tiles."""
    model = Head()
    roomy: dict[str, Any] = {"budget": "1GiB", "inner": "inductor", "cost": "flops"}
    policy = fxckpt.policies.tile("haed")
    with pytest.raises(fxckpt.PolicyMatchesNothing, match="'head'"):
        gradients(model, fxckpt.Backend(policy=policy, **roomy))


def test_one_graph_for_sizes_that_vary() -> None:
    """Loss and gradients are those of each size, and the peak is the compiled one."""
    model = Head()
    backend = fxckpt.Backend("min", inner="inductor", cost="flops", scope="graph", tile=3)
    counter = CompileCounterWithBackend(backend)
    step = torch.compile(model, backend=counter, dynamic=True)
    compiles = []
    for rows in (512, 509, 33):
        found, given = [], X[:rows].clone()
        for run in (step, model):
            model.zero_grad()
            run(given).backward()
            found.append([p.grad.clone() for p in model.parameters() if p.grad is not None])
        torch.testing.assert_close(*found, rtol=1e-4, atol=1e-7)
        compiles.append(counter.frame_count)
    assert len(set(compiles)) == 1
    (plan,) = backend.plans
    assert plan.tiling is not None and plan.tiling.count == 3
    model.zero_grad()
    peak = fxckpt.measure_peak(lambda: step(X).backward())
    assert peak == plan.compiled_peak_bytes


class ShiftedHead(Head):
    """A head whose loss leaves out the last position."""

    def forward(self, x: Tensor) -> Tensor:
        logits = self.head(self.up(self.table(x)).sin())[:, :-1]
        return nn.functional.cross_entropy(logits.flatten(0, 1), x[:, 1:].flatten())


@pytest.mark.parametrize("dynamic", [False, True])
def test_shifted_heads_are_tiled(dynamic: bool) -> None:
    """Loss and gradients are those in float64, and the peak is the compiled one."""
    model = ShiftedHead()
    backend = fxckpt.Backend("min", inner="inductor", cost="flops", scope="graph", tile=3)
    step = torch.compile(model, backend=backend, dynamic=dynamic)
    exact = copy.deepcopy(model).double()
    for shape in ((8, 64), (5, 41), (3, 7)) if dynamic else ((8, 64),):
        found, given = [], X[: shape[0] * shape[1]].clone().view(shape)
        for each, run in ((model, step), (exact, exact)):
            each.zero_grad()
            run(given).backward()
            found.append([p.grad.float() for p in each.parameters() if p.grad is not None])
        torch.testing.assert_close(*found, rtol=1e-4, atol=1e-7)
    (plan,) = backend.plans
    assert plan.tiling is not None and plan.tiling.count == 3
    assert any("head" in name for name in plan.tiling.regions)
    model.zero_grad()
    given = X.view(8, 64)
    peak = fxckpt.measure_peak(lambda: step(given).backward())
    assert peak == plan.compiled_peak_bytes
    assert peak < given.numel() * 2000 * 4  # The logits.


@pytest.mark.sweep
def test_a_kept_plan_has_its_tiles() -> None:
    """A second compile takes the plan of the first, tiles included, without a search."""
    model = Head()
    plans = []
    for _ in range(2):
        backend = fxckpt.Backend("3MiB", inner="inductor", cost="flops", tile=8)
        gradients(model, backend)
        plans.append(backend.plans[0])
    assert plans[0].tiling == plans[1].tiling is not None
    assert plans[0] == plans[1]
    fixed = fxckpt.Backend(policy=plans[0], inner="inductor", cost="flops")
    gradients(model, fixed)
    assert fixed.plans[0].digest == plans[0].digest


@pytest.mark.sweep
def test_budget_below_the_floor_tells_what_tiles_reach() -> None:
    """The error has the least peak of all that was lowered."""
    backend = fxckpt.Backend("256KiB", inner="inductor", cost="flops", tile="auto")
    with pytest.raises(fxckpt.BudgetInfeasible, match="tile='auto' reaches") as raised:
        gradients(Head(), backend)
    assert raised.value.floor_bytes < 4e6


def test_sums_in_half_precision_are_kept_apart() -> None:
    """Sums in float32 are overwritten from tile to tile, and the measured peak is the compiled."""
    model = Head().bfloat16()
    expected = gradients(model, "inductor")
    backend = fxckpt.Backend("min", inner="inductor", cost="flops", scope="graph", tile=4)
    torch.testing.assert_close(gradients(model, backend), expected, rtol=3e-2, atol=1e-3)
    (plan,) = backend.plans
    assert plan.tiling is not None and plan.tiling.count == 4
    assert measured(model, backend) == plan.compiled_peak_bytes


@pytest.mark.parametrize("error", [fxckpt.PlanningFailed("no kernel"), ValueError("no kernel")])
def test_variant_that_is_not_lowered_is_left_out(
    error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A warning has its name and the reason, and the untiled graph is compiled."""
    monkeypatch.setenv("FXCKPT_STRICT", "0")
    search = InductorPlanner._halves_by_search

    def broken(planner: InductorPlanner, joint: Joint, *given: Any) -> Any:
        if any("_tile_" in node.name for node in joint.module.graph.nodes):
            raise error
        return search(planner, joint, *given)

    monkeypatch.setattr(InductorPlanner, "_halves_by_search", broken)
    model = Head()
    backend = fxckpt.Backend("min", inner="inductor", cost="flops", scope="graph", tile="auto")
    with pytest.warns(UserWarning, match="left out, .*head.*no kernel"):
        found = gradients(model, backend)
    torch.testing.assert_close(found, gradients(model, "inductor"), rtol=1e-4, atol=1e-7)
    assert backend.plans[0].tiling is None
    asked = fxckpt.Backend("min", inner="inductor", cost="flops", scope="graph", tile=4)
    monkeypatch.setenv("FXCKPT_STRICT", "1")
    with pytest.raises(fxckpt.PlanningFailed, match="no kernel"):
        gradients(model, asked)
