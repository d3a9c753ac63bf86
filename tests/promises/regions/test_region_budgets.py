"""Budgets of regions: torch's and ours, by every entry point, nested, and beside a peak budget."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch._functorch.config as functorch_config
import torch._inductor.config as inductor_config
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch._inductor.utils import fresh_cache

import fxckpt
from fxckpt.inductor.plan_cache import PlanCache

torch_region: Any = getattr(torch.autograd.graph, "region_activation_memory_budget", None)
needs_torch_regions = pytest.mark.skipif(torch_region is None, reason="torch 2.13 or newer")
INNERS = ("aot_eager", "inductor")
VALUE = 64 * 64 * 4
"""Bytes of one value."""


class Net(nn.Module):
    """Six layers; the regions are entered around the first two, the next two, and one of those."""

    def __init__(self, first: Callable[[], Any], second: Callable[[], Any], inner: Any) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64, bias=False) for _ in range(6))
        self.first, self.second, self.inner = first, second, inner

    def forward(self, x: Tensor) -> Tensor:
        layers = [*self.layers]
        with self.first():
            for layer in layers[:2]:
                x = layer(x).sin()
        with self.second():
            x = layers[2](x).sin()
            with self.inner():
                x = layers[3](x).sin()
        for layer in layers[4:]:
            x = layer(x).sin()
        return x.square().sum()


def entering(budget: Any, region: Any = fxckpt.budget) -> Callable[[], Any]:
    """Return a function that enters a region."""
    return lambda: region(budget)


def plan_of(first: Any, second: Any, inner: Any, rows: int = 64, **options: Any) -> fxckpt.Plan:
    """Return the plan of the net with three budgets of ours."""
    torch.manual_seed(0)
    net = Net(*map(entering, (first, second, inner)))
    return fxckpt.plan(net, torch.randn(rows, 64), cost="flops", **options)


def saved(plan: fxckpt.Plan) -> list[int]:
    """Return the values that are saved of each region."""
    return [region.saved_bytes // VALUE for region in plan.regions]


def step(net: nn.Module, run: Callable[[Tensor], Tensor]) -> list[Tensor]:
    """Return loss and gradients of one step."""
    torch.manual_seed(1)
    net.zero_grad()
    loss = run(torch.randn(64, 64))
    loss.backward()
    return [loss.detach(), *(p.grad.clone() for p in net.parameters() if p.grad is not None)]


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    """Compile anew."""
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def test_extremes_save_nothing_or_everything() -> None:
    """At 0.0 nothing of a region is saved, at 1.0 all that is without a budget, ours beside it."""
    free = plan_of(1.0, 1.0, 1.0)
    assert saved(free) == [2, 2, 1] and not any(region.binds for region in free.regions)
    assert free.recompute_flops == 0 and free.explain().binding() == "no budget"
    least = plan_of(0.0, 1.0, 1.0)
    assert saved(least) == [0, 2, 1]
    assert least.recompute_flops == 2 * 2 * 64**3
    assert [region.binds for region in least.regions] == [True, False, False]
    assert "region test_region_budgets.py:" in least.explain().binding()


def test_nested_regions_count_for_the_outer() -> None:
    """The inner region keeps its own budget, and the outer counts all of its values."""
    assert saved(plan_of(1.0, 1.0, 0.0)) == [2, 1, 0]
    assert saved(plan_of(1.0, 0.0, 1.0)) == [2, 0, 0]
    half = plan_of(1.0, 0.25, 1.0)
    assert half.regions[1].limit_bytes == VALUE and saved(half)[1] == 1
    assert [region.binds for region in half.regions] == [False, True, False]


@pytest.mark.parametrize("limit", ["16KiB", VALUE, 0.25, "25%"])
def test_every_form_of_a_limit(limit: Any) -> None:
    """Bytes and fractions, as numbers and as text."""
    (region, *_) = plan_of(limit, 1.0, 1.0).regions
    assert region.limit_bytes == VALUE == region.saved_bytes and region.binds


def test_peak_and_region_budgets_hold_together() -> None:
    """Both hold, and the report says which of them bind."""
    both = plan_of(1.0, 1.0, 0.0, rows=1024, budget=0.4)
    assert both.budget_bytes is not None and both.peak_bytes <= both.budget_bytes
    assert both.regions[2].saved_bytes == 0
    assert "binds" in str(both.explain()) and "the budget" in both.explain().binding()
    loose = plan_of(0.0, 1.0, 1.0, budget="1GiB")
    assert "the budget" not in loose.explain().binding() and "region" in loose.explain().binding()
    again = fxckpt.Plan.from_json(both.to_json())
    assert again == both and again.regions == both.regions
    assert all(plan.regions[2].saved_bytes == 0 for plan in both.frontier(3).plans)


@pytest.mark.parametrize("scope", ["step", "graph"])
def test_report_names_the_inner_of_two_limits(scope: str) -> None:
    """Of limits that overlap the one that costs time is named, beside a budget of either scope."""

    def model(x: Tensor, w: Tensor) -> Tensor:
        with fxckpt.budget(3 * VALUE, name="outer"), fxckpt.budget(0.0, name="inner"):
            for _ in range(3):
                x = (x @ w).sin()
        return x.square().sum()

    backend = fxckpt.Backend(inner="aot_eager", budget="1GiB", scope=scope)
    x, w = torch.randn(64, 64), torch.randn(64, 64, requires_grad=True)
    torch.compile(model, backend=backend)(x, w).backward()
    assert backend.plans[0].explain().binding() == "region inner"


def test_region_below_its_least_is_named() -> None:
    """What a policy has saved is the least, and less is refused with the region's name."""

    def pinned(x: Tensor, w: Tensor) -> Tensor:
        with fxckpt.budget("1KiB", name="head"):
            x = (x @ w).sin()
            y = (x @ w).cos()
        return (y @ w).sum()

    x, w = torch.randn(64, 64), torch.randn(64, 64, requires_grad=True)
    with pytest.raises(fxckpt.BudgetInfeasible, match=re.escape("region 'head' is 1.0 KiB")):
        fxckpt.plan(pinned, x, w, policy=fxckpt.policies.save_matmuls)


@pytest.mark.parametrize("limit", [1.5, -0.1, float("nan"), 0, "much", None, "auto", True])
def test_invalid_limits_are_refused(limit: Any) -> None:
    """In eager mode and in a compile that falls back to it, with the limit in the message."""

    def model(x: Tensor) -> Tensor:
        with fxckpt.budget(limit):
            return x.sin().sum()

    x = torch.randn(4, requires_grad=True)
    with pytest.raises(fxckpt.InvalidBudget, match="is no budget of a region"):
        model(x)
    with pytest.raises(fxckpt.InvalidBudget, match=r"fraction in \[0, 1\]"):
        torch.compile(model, backend=fxckpt.Backend(inner="aot_eager"))(x)


def test_limit_may_be_an_argument() -> None:
    """A number that Dynamo would follow as a symbol is a limit: neither a break nor lost."""

    def model(x: Tensor, limit: float, rows: int) -> Tensor:
        with fxckpt.budget(limit):
            x = x.sin().exp()
        with fxckpt.budget(4 * rows * x.shape[0]):
            return x.cos().exp().sum()

    backend = fxckpt.Backend(inner="aot_eager")
    compiled = torch.compile(model, backend=backend, dynamic=True, fullgraph=True)
    for size, limit, rows in ((64, 0.5, 1), (64, 0.25, 1), (32, 0.25, 1)):
        compiled(torch.randn(size, requires_grad=True), limit, rows)
    found = [[region.budget for region in plan.regions] for plan in backend.plans]
    assert found == [["0.5", "256 B"], ["0.25", "256 B"], ["0.25", "128 B"]]


@pytest.mark.parametrize("inner", INNERS)
def test_compiled_step_keeps_gradients(inner: str) -> None:
    """Eager mode ignores the region; the compiled step has its values, and saves less."""
    net = Net(*map(entering, (0.0, 0.5, 1.0)))
    expected = step(net, net)
    backend = fxckpt.Backend(inner=inner)
    found = step(net, torch.compile(net, backend=backend))
    if inner == "aot_eager":
        assert all(map(torch.equal, expected, found))
    torch.testing.assert_close(found, expected)
    (plan,) = backend.plans
    assert saved(plan)[0] == 0 and saved(plan)[1] <= plan.regions[1].limit_bytes // VALUE
    assert "test_region_budgets.py" in str(backend.report())


@needs_torch_regions
@pytest.mark.parametrize("inner", INNERS)
def test_torch_regions_bind_nested_and_apart(inner: str) -> None:
    """torch's own regions of one budget are told apart, and an inner one counts for the outer."""
    backend = fxckpt.Backend(inner=inner)
    net = Net(*(entering(b, torch_region) for b in (0.0, 0.0, 1.0)))
    step(net, torch.compile(net, backend=backend))
    (plan,) = backend.plans
    assert [region.budget for region in plan.regions] == ["0", "0", "1"]
    assert saved(plan) == [0, 0, 0]
    torch._dynamo.reset()
    free = fxckpt.Backend(inner=inner)
    net = Net(*(entering(b, torch_region) for b in (1.0, 1.0, 1.0)))
    step(net, torch.compile(net, backend=free))
    assert sum(saved(free.plans[0])) > 0 and free.plans[0].saved_bytes > plan.saved_bytes


def test_budget_decorates_a_function() -> None:
    """A decorated function runs in Python as it is, and is a region where it is compiled."""

    @fxckpt.budget(0.0, name="block")
    def block(x: Tensor, w: Tensor) -> Tensor:
        return (x @ w).sin().exp()

    x, w = torch.randn(16, 16), torch.randn(16, 16, requires_grad=True)
    torch._dynamo.reset()
    backend = fxckpt.Backend(inner="aot_eager")
    assert torch.equal(torch.compile(block, backend=backend)(x, w), block(x, w))
    ((region,),) = (plan.regions for plan in backend.plans)
    assert (region.name, region.saved_bytes) == ("block", 0) and block.__name__ == "block"


@needs_torch_regions
def test_torch_region_outside_its_range_raises() -> None:
    """torch's own line comes through, in Python and where the region is compiled."""

    def model(x: Tensor, w: Tensor) -> Tensor:
        with torch_region(1.5):
            return (x @ w).sin().sum()

    x, w = torch.randn(4, 4), torch.randn(4, 4, requires_grad=True)
    torch._dynamo.reset()
    for function in (model, torch.compile(model, backend=fxckpt.Backend(inner="aot_eager"))):
        with pytest.raises(ValueError, match=r"must be in \[0, 1\], got 1.5"):
            function(x, w)


@needs_torch_regions
def test_break_in_torch_region_as_in_stock() -> None:
    """Where stock torch goes on after the break, both graphs have the region; else it raises."""

    def model(x: Tensor, w: Tensor) -> Tensor:
        x = (x @ w).sin()
        with torch_region(0.0):
            x = (x @ w).sin().exp()
            torch._dynamo.graph_break()
            x = (x @ w).sin().exp()
        return (x @ w).sum()

    def run(backend: Any) -> list[Tensor] | str:
        torch._dynamo.reset()
        torch.manual_seed(0)
        x, w = torch.randn(64, 64, requires_grad=True), torch.randn(64, 64)
        try:
            loss = torch.compile(model, backend=backend)(x, w)
        except RuntimeError as error:
            return str(error)
        return [loss.detach(), *torch.autograd.grad(loss, x)]

    backend = fxckpt.Backend(inner="aot_eager")
    stock, found = run("eager"), run(backend)
    if isinstance(stock, str):
        assert found == stock and "inside a torch.compile region" in stock
        return
    torch.testing.assert_close(found, stock, rtol=0, atol=0)
    assert [region.budget for plan in backend.plans for region in plan.regions] == ["0", "0"]
    assert all(saved(plan) == [0] for plan in backend.plans)


@pytest.mark.parametrize("inner", INNERS)
def test_graph_budget_of_torch_counts_without_ours(inner: str) -> None:
    """torch's budget for whole graphs is that of the ops in no region; ours takes its place."""
    net = Net(*map(entering, (1.0, 1.0, 1.0)))
    with functorch_config.patch(activation_memory_budget=0.0):
        backend = fxckpt.Backend(inner=inner)
        step(net, torch.compile(net, backend=backend))
        (plan,) = backend.plans
        assert plan.regions[-1].name == "torch._functorch.config.activation_memory_budget"
        assert saved(plan)[-1] == 0 and saved(plan)[0] > 0
        assert len(plan_of(1.0, 1.0, 1.0, budget="1GiB").regions) == 3


@pytest.mark.parametrize("budget", [-0.1, 1.5, float("nan"), True, "half"])
def test_graph_budget_of_torch_is_a_fraction(budget: Any) -> None:
    """What torch's own partitioner refuses is refused, by its name."""
    net = Net(*map(entering, (1.0, 1.0, 1.0)))
    compiled = torch.compile(net, backend=fxckpt.Backend(inner="aot_eager"))
    with (
        functorch_config.patch(activation_memory_budget=budget),
        pytest.raises(fxckpt.InvalidBudget, match=r"activation_memory_budget=.* in \[0, 1\]"),
    ):
        step(net, compiled)


def test_partitioner_keys_know_the_regions() -> None:
    """Another budget of a region misses torch's caches; the same one hits them."""
    limit = 0.0

    def model(x: Tensor, w: Tensor) -> Tensor:
        x = (x @ w).sin()
        with fxckpt.budget(limit):
            x = (x @ w).sin()
        return (x @ w).sin().sum()

    x, w = torch.randn(32, 48), torch.randn(48, 48, requires_grad=True)
    regions = []
    # What an earlier run of the tests left in torch's cache on disk would make the first one hit.
    with fresh_cache():
        for limit in (0.0, 1.0, 0.0):  # noqa: B007
            torch._dynamo.reset()
            counters.clear()
            partitioner = fxckpt.Partitioner()
            with inductor_config.patch(custom_partitioner_fn=partitioner):
                torch.compile(model)(x, w).backward()
            hits = counters["aot_autograd"]["autograd_cache_hit"]
            regions.append(
                [hits, *(r.saved_bytes for plan in partitioner.plans for r in plan.regions)]
            )
    assert [each[0] for each in regions] == [0, 0, 1]
    assert regions[0][1] == 0 < regions[1][1]


def test_plan_cache_knows_the_regions(tmp_path: Any) -> None:
    """A plan kept on disk for one budget of a region is not that of another."""
    keys: list[str] = []
    kept = PlanCache.get

    def get(self: PlanCache, key: str) -> Any:
        keys.append(key)
        return kept(self, key)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(PlanCache, "get", get)
        for limit in (0.0, 0.0, 1.0):
            torch._dynamo.reset()
            net = Net(*map(entering, (limit, 1.0, 1.0)))
            step(net, torch.compile(net, backend=fxckpt.Backend()))
    assert len(keys) == 3 and keys[0] == keys[1] != keys[2]


def test_partition_fn_without_dynamo_sees_regions() -> None:
    """A function that AOTAutograd traces itself has its regions too."""
    from functorch.compile import aot_function, make_boxed_func

    def model(x: Tensor) -> Tensor:
        with fxckpt.budget(0.0, name="all"):
            return x.sin().exp().cos().sum()

    partitioner = fxckpt.Partitioner()
    compiled = aot_function(
        model, fw_compiler=lambda gm, _: make_boxed_func(gm.forward), partition_fn=partitioner
    )
    compiled(torch.randn(8, requires_grad=True)).backward()
    (plan,) = partitioner.plans
    assert [(region.name, region.saved_bytes) for region in plan.regions] == [("all", 0)]


def test_rewritten_module_keeps_its_regions() -> None:
    """A rewritten module plans its regions, and a plan applied again says what it saves."""
    net = Net(*map(entering, (0.0, 1.0, 1.0)))
    made = fxckpt.rewrite(net, example_inputs=(torch.randn(64, 64),))
    (plan,) = made.plans
    assert saved(plan)[0] == 0
    again = fxckpt.rewrite(net, plan, example_inputs=(torch.randn(64, 64),))
    assert again.plans[0].saved == plan.saved


def test_scope_of_a_partitioner_is_the_graph() -> None:
    """A budget for the whole step needs the whole step."""
    with pytest.raises(fxckpt.InvalidOption, match=r"scope='step': a Partitioner sees one graph"):
        fxckpt.Partitioner(scope="step")
