"""The ``torch.compile`` backend as users meet it."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch.utils.checkpoint import checkpoint

import fxckpt
from fxckpt.backend import _InductorPartitioner
from fxckpt.torch_private.inductor.lowering import Lowerings


class Net(nn.Module):
    """Blocks with dropout."""

    def __init__(self, blocks: int = 4, width: int = 32) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(
                nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width), nn.Dropout(0.2)
            )
            for _ in range(blocks)
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
    assert "graph 2 of 2" in str(backend.report())


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


def test_budget_below_floor_names_feasible_one() -> None:
    """The error of an infeasible budget names a feasible one."""
    model, x = Net(), torch.randn(512, 32)
    with pytest.raises(fxckpt.BudgetInfeasible, match="least peak") as error:
        torch.compile(model, backend=fxckpt.Backend(budget="1B", inner="aot_eager"))(x)
    torch._dynamo.reset()
    backend = fxckpt.Backend(budget=error.value.floor_bytes, inner="aot_eager")
    torch.compile(model, backend=backend)(x).sum().backward()
    assert backend.plans[0].peak_bytes <= error.value.floor_bytes


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
        torch.compile(broken, backend=fxckpt.Backend(budget=0.9, inner="aot_eager"))(
            torch.randn(512, 32)
        )
    torch._dynamo.reset()
    with pytest.raises(fxckpt.BudgetInfeasible, match="This is graph 1 of those"):
        torch.compile(broken, backend=fxckpt.Backend(budget="1B", inner="aot_eager"))(
            torch.randn(512, 32)
        )
    assert error.value.floor_bytes > error.value.budget_bytes


def test_infeasible_pickles() -> None:
    error = pickle.loads(pickle.dumps(fxckpt.BudgetInfeasible("no", floor_bytes=7, budget_bytes=3)))
    assert (str(error), error.floor_bytes, error.budget_bytes) == ("no", 7, 3)


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


def test_uuid_changes_with_options() -> None:
    def uuid(**options: Any) -> str:
        return _InductorPartitioner(fxckpt.Backend(**options), Lowerings(None)).uuid()

    assert uuid(budget=0.5) == uuid(budget=0.5)
    assert len({uuid(), uuid(budget=0.5), uuid(budget=0.6), uuid(cost="flops")}) == 4


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


def test_defect_of_planner_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """A defect of the planner raises PlanningFailed, and the step does not run."""
    from torch._subclasses.fake_tensor import DataDependentOutputException

    def broken(*args: object, **kwargs: object) -> object:
        raise DataDependentOutputException("aten.item")

    monkeypatch.setattr("fxckpt.planner.planner.prepare", broken)
    with pytest.raises(fxckpt.PlanningFailed, match="defect"):
        torch.compile(Net(2), backend=fxckpt.Backend(inner="aot_eager"))(torch.randn(8, 32))


def test_policy_binds() -> None:
    from torch.utils.checkpoint import CheckpointPolicy

    def save_no_matmul(
        ctx: object, op: object, *args: object, **kwargs: object
    ) -> CheckpointPolicy:
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


INDUCTOR_STEP = """
import torch, fxckpt
from torch._dynamo.utils import counters
torch.manual_seed(0)
from torch import nn
block = lambda: nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 64), nn.GELU(), nn.Linear(64, 8))
model = nn.Sequential(*(block() for _ in range(3)))
backend = fxckpt.Backend(budget={budget})
torch.compile(model, backend=backend)(torch.randn(64, 8)).sum().backward()
print(len(backend.plans), counters["inductor"]["fxgraph_cache_hit"])
"""


def run_inductor(
    folder: str, budget: float, **environment: str
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", INDUCTOR_STEP.format(budget=budget)],
        capture_output=True,
        text=True,
        env={**os.environ, "TORCHINDUCTOR_CACHE_DIR": folder, **environment},
        timeout=300,
    )


def test_inductor_cache_across_processes(tmp_path: Path) -> None:
    """Inductor's cache serves a second process with the same budget, and no other."""
    first, second, other = (run_inductor(str(tmp_path), budget) for budget in (1.0, 1.0, 0.9))
    assert (first.stdout.split(), second.stdout.split(), other.stdout.split()) == (
        ["1", "0"],
        ["1", "2"],
        ["1", "0"],
    )


def test_no_compiler_names_two_ways_out(tmp_path: Path) -> None:
    failed = run_inductor(str(tmp_path), 1.0, CXX="/nonexistent")
    assert "InnerCompilerMissing" in failed.stderr
    assert "install a compiler" in failed.stderr and "aot_eager" in failed.stderr


class Regions(nn.Module):
    """Blocks, each in a ``torch.utils.checkpoint`` by the user."""

    def __init__(self, net: Net) -> None:
        super().__init__()
        self.net = net

    def forward(self, x: Tensor) -> Tensor:
        for block in self.net.blocks:
            x = x + checkpoint(block, x, use_reentrant=False)
        return x


def test_checkpoint_regions_bind_without_budget() -> None:
    """The user's regions bind without a budget, and are no better than a plan with one."""
    plain, x = Net(), torch.randn(512, 32)
    marked = Regions(plain)
    expected = gradients(plain, plain, x)

    def planned(model: nn.Module, budget: int | None) -> fxckpt.Plan:
        torch._dynamo.reset()
        backend = fxckpt.Backend(budget=budget, inner="aot_eager")
        got = gradients(plain, torch.compile(model, backend=backend), x)
        assert all(torch.equal(a, b) for a, b in zip(expected, got, strict=True)), budget
        return backend.plans[0]

    unmarked, regions = planned(plain, None), planned(marked, None)
    assert regions.peak_bytes < 0.75 * unmarked.peak_bytes
    tight = planned(marked, regions.peak_bytes)
    assert tight.peak_bytes <= regions.peak_bytes
    assert tight.recompute_seconds <= regions.recompute_seconds


def test_branches_of_cond_count_in_the_peak() -> None:
    weight = torch.randn(32, 32, requires_grad=True)

    def f(x: Tensor) -> Tensor:
        h = torch.cond(x.sum() > 0, lambda t: (t.sin() * t).exp(), lambda t: t.cos(), (x @ weight,))
        return (h @ weight).tanh().sum()

    x = torch.ones(64, 32)
    backend = fxckpt.Backend(budget=1.0, inner="aot_eager")
    compiled = torch.compile(f, backend=backend)
    compiled(x).backward()
    weight.grad = None
    measured = fxckpt.measure_peak(lambda: compiled(x).backward())
    assert measured <= backend.plans[0].peak_bytes <= 1.01 * measured


@pytest.mark.parametrize("budget", [None, 0.9, 0.8])
def test_dynamic_rows_and_gradient_accumulation(budget: float | None) -> None:
    """Any number of rows, two forwards before a backward, and accumulated gradients."""

    def run(backend: object) -> list[Tensor]:
        torch._dynamo.reset()
        torch.manual_seed(5)
        model = Net()
        compiled = torch.compile(model, backend=backend, dynamic=True) if backend else model
        for rows in (64, 33):
            first, second = (compiled(torch.randn(rows, 32)).square().mean() for _ in range(2))
            second.backward(retain_graph=True)
            second.backward()
            first.backward()
        return [torch.get_rng_state(), *(p.grad for p in model.parameters() if p.grad is not None)]

    backend = fxckpt.Backend(budget=budget, inner="aot_eager")
    expected, got = run(None), run(backend)
    assert all(torch.equal(a, b) for a, b in zip(expected, got, strict=True))
    assert len(backend.plans) == 1


class ReadThenWrite(torch.autograd.Function):
    """A function whose backward reads a buffer for the gradient, then writes it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, buffer: Tensor) -> Tensor:
        ctx.buffer = buffer
        return x.sum()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        out = ctx.buffer.sin()
        ctx.buffer.add_(1.0)
        return out, None


@pytest.mark.parametrize("budget", [None, 1.0])
def test_backward_reads_buffer_before_writing_it(budget: float | None) -> None:
    """A buffer that the backward writes is read before the write."""
    x, buffer = torch.ones(64, 8, requires_grad=True), torch.ones(64, 8)
    backend = fxckpt.Backend(budget=budget, inner="aot_eager")
    torch.compile(lambda x, b: ReadThenWrite.apply(x, b), backend=backend)(x, buffer).backward()
    assert torch.equal(x.grad, torch.ones(64, 8).sin())
    assert torch.equal(buffer, torch.full((64, 8), 2.0))


def test_plan_is_not_used_for_larger_sizes() -> None:
    """A plan is not used for inputs larger than those that it was made for."""
    model = Net()
    backend = fxckpt.Backend(budget=0.8, inner="aot_eager")
    compiled = torch.compile(model, backend=backend, dynamic=True)

    def peak(rows: int) -> int:
        x = torch.randn(rows, 32)
        compiled(x).square().mean().backward()
        model.zero_grad()
        return fxckpt.measure_peak(lambda: compiled(x).square().mean().backward())

    peaks = [peak(rows) for rows in (64, 32, 256)]
    small, large = backend.plans
    assert max(peaks[:2]) <= small.budget_bytes < peaks[2] <= large.budget_bytes


def test_attention_of_tensor_with_itself() -> None:
    """An attention reads one tensor as query, key and value."""
    weight = torch.randn(32, 32, requires_grad=True)

    def f(x: Tensor) -> Tensor:
        h = (x @ weight).view(2, 16, 4, 8).transpose(1, 2)
        return nn.functional.scaled_dot_product_attention(h, h, h).square().sum()

    x = torch.randn(2, 16, 32)
    (expected,) = torch.autograd.grad(f(x), weight)
    (got,) = torch.autograd.grad(
        torch.compile(f, backend=fxckpt.Backend(inner="aot_eager"))(x), weight
    )
    assert torch.equal(expected, got)


def test_cloned_gradients_count_in_peak() -> None:
    """Gradients that autograd clones count in the peak."""
    a, b, c = (torch.randn(64, 32, requires_grad=True) for _ in range(3))

    def f(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
        return ((a + b).sin() + c.sum()).sum()

    backend = fxckpt.Backend(budget=1.0, inner="aot_eager")
    compiled = torch.compile(f, backend=backend)

    def step() -> None:
        compiled(a, b, c).backward()

    step()
    a.grad = b.grad = c.grad = None
    assert fxckpt.measure_peak(step) <= backend.plans[0].peak_bytes


def test_output_under_recompute_policy_is_live() -> None:
    """An output that a policy wants recomputed is live anyway."""
    from torch.utils.checkpoint import CheckpointPolicy

    def f(x: Tensor) -> tuple[Tensor, Tensor]:
        y = x.exp()
        return y, y.sin().sum()

    backend = fxckpt.Backend(
        policy=lambda ctx, op, *args, **kwargs: CheckpointPolicy.MUST_RECOMPUTE, inner="aot_eager"
    )
    x = torch.ones(16, requires_grad=True)
    torch.compile(f, backend=backend)(x)[1].backward()
    assert torch.equal(x.grad, x.detach().exp().cos() * x.detach().exp())


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
