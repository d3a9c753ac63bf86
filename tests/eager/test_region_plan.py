"""Eager regions under a policy or budget: planned at the first call, followed thereafter."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import fxckpt
from fxckpt import policies
from fxckpt.reason import Decision
from tests.eager.regions import Counting, ops_of_the_backward, plain
from tests.steps import differing, outcome


class Attention(nn.Module):
    def __init__(self, width: int, dropout: float) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.dropout = nn.Dropout(dropout) if dropout else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (t.unflatten(-1, (4, -1)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        weights = self.dropout((q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5).softmax(-1))
        return self.out(fxckpt.name((weights @ v).transpose(1, 2).flatten(2), "attn_out"))  # type: ignore[no-any-return]


class Block(nn.Module):
    def __init__(self, width: int, dropout: float) -> None:
        super().__init__()
        self.norm, self.attn = nn.LayerNorm(width), Attention(width, dropout)
        self.mlp = nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.norm(x))
        return x + self.mlp(x)  # type: ignore[no-any-return]


class Net(nn.Module):
    def __init__(self, layers: int = 2, width: int = 32, dropout: float = 0.0) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block(width, dropout) for _ in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def step(net: Net, checkpoint: Callable[..., Any], batch: int = 4) -> dict[str, Tensor]:
    net.zero_grad()
    x = torch.ones(batch, 16, 32).cumsum(1).sin().requires_grad_()
    return outcome(net, lambda x: checkpoint(net, x), (x,))


def within(budget: Any, **options: Any) -> Callable[..., Any]:
    return functools.partial(fxckpt.checkpoint, budget=budget, **options)


def plan_of(checkpoint: Callable[..., Any], net: nn.Module, *inputs: Tensor) -> fxckpt.Plan:
    with fxckpt.record_regions() as found:
        checkpoint(net, *inputs)
    assert found[-1].plan is not None
    return found[-1].plan


BUDGETS = (1.0, 0.8, 0.6, 0.5)


@pytest.mark.parametrize("budget", BUDGETS)
def test_a_budget_changes_no_bit(budget: float) -> None:
    net = Net(3, dropout=0.1)
    expected = step(net, plain)
    for _ in range(2):
        assert differing(expected, step(net, within(budget))) == []


@pytest.mark.parametrize("budget", [0.8, 0.5, 0.4])
def test_the_first_call_keeps_the_planned_peak(budget: float) -> None:
    """From the first call on, the measured peak exceeds the plan's by at most 3%."""
    x = torch.randn(16, 16, 32, requires_grad=True)
    plan = plan_of(within(budget), Net(4, dropout=0.1), x)
    fresh = Net(4, dropout=0.1)
    peaks = []
    for _ in range(2):
        fresh.zero_grad()
        x.grad = None
        peaks.append(fxckpt.measure_peak(lambda: within(budget)(fresh, x).sum().backward()))
    assert plan.budget_bytes is not None and plan.peak_bytes <= plan.budget_bytes
    # What the region's own variables hold while its forward runs is not in the plan.
    assert max(peaks) <= 1.03 * plan.peak_bytes


def test_what_runs_again_is_what_the_plan_says() -> None:
    net = Net(3)
    x = torch.randn(16, 16, 32, requires_grad=True)
    plan = plan_of(within(0.5), net, x)
    op_of = {row.name: row.op.rpartition(".")[0] or row.op for row in plan.rows}
    with Counting() as whole:
        plain(net, x).sum().backward()
    without = ops_of_the_backward(plain(net, x))
    ran = ops_of_the_backward(within(0.5)(net, x))
    again = Counter(run.name for run in plan.schedule)
    assert again and plan.recompute_flops > 0
    for op in ("addmm", "gelu", "_softmax", "native_layer_norm"):
        expected = sum(
            runs for name, runs in again.items() if op_of.get(name, "").split(".")[0] == op
        )
        assert ran[op] - without[op] == expected, op
    assert whole.ran["addmm"] == 12


def test_a_second_call_reuses_the_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    """A second call of the same region follows the plan of the first and plans nothing."""
    net = Net()
    expected = step(net, within(0.7))
    monkeypatch.setattr("fxckpt.eager.region_cache.region_plan_of", None)
    assert differing(expected, step(net, within(0.7))) == []
    assert differing(step(net, plain), expected) == []


def test_other_shapes_are_planned_again_and_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    net = Net()
    for batch in (4, 8):
        step(net, within(0.7), batch=batch)
    monkeypatch.setattr("fxckpt.eager.region_cache.region_plan_of", None)
    for batch in (4, 8):
        assert differing(step(net, plain, batch=batch), step(net, within(0.7), batch=batch)) == []


def test_a_region_on_another_branch_is_planned_anew() -> None:
    """A region that takes another branch is planned anew and keeps its exact gradients."""
    ways = [True]

    def region(x: Tensor) -> Tensor:
        y = (x @ x).sin()
        return (y.exp() if ways[-1] else y.tanh().cos()).sinh() @ x

    def gradient(checkpoint: Callable[..., Any]) -> Tensor:
        x = torch.ones(8, 8).cumsum(0).div(8).requires_grad_()
        return torch.autograd.grad(checkpoint(region, x).sum(), x)[0]

    for way in (True, True, False, False, True, False):
        ways.append(way)
        assert torch.equal(gradient(plain), gradient(within(None, policy=policies.save_matmuls)))


def test_a_planned_region_takes_further_backwards() -> None:
    net, x = Net(dropout=0.1), torch.randn(4, 16, 32, requires_grad=True)
    out = within(0.6)(net, x).square().sum()
    grads = [torch.autograd.grad(out, x, retain_graph=True)[0] for _ in range(2)]
    assert torch.equal(*grads)
    (again,) = torch.autograd.grad(out, x, create_graph=True)
    assert torch.equal(again, grads[0])
    again.sum().backward()


def test_a_planned_region_writes_in_place() -> None:
    def region(x: Tensor, w: Tensor) -> Tensor:
        y = x @ w
        y[1:].mul_(2)
        return F.relu(F.relu(y, inplace=True) @ w, inplace=True).sin() @ w

    def run(checkpoint: Callable[..., Any]) -> dict[str, Tensor]:
        torch.manual_seed(0)
        x, w = torch.randn(32, 32, requires_grad=True), torch.randn(32, 32, requires_grad=True)
        return outcome(region, lambda *given: checkpoint(region, *given), (x, w))

    for checkpoint in (
        within(0.9),
        within(0.9),
        within(None, policy=policies.save_matmuls),
        within(None, policy=policies.save_matmuls),
    ):
        assert differing(run(plain), run(checkpoint)) == []


def test_a_budget_that_no_plan_fits() -> None:
    with pytest.raises(fxckpt.BudgetInfeasible, match="below the least peak"):
        within(64)(Net(), torch.randn(2, 16, 32))
    assert not torch.utils._python_dispatch._get_current_dispatch_mode_stack()


def test_a_region_without_gradients_needs_no_plan() -> None:
    assert torch.equal(within(0.7)(torch.sin, torch.zeros(2)), torch.zeros(2))


SAVED = {
    "composed": policies.save_matmuls | policies.save("**.norm"),
    "modules": policies.recompute("**.mlp.*"),
    "function": lambda ctx, op, *args, **kwargs: op is torch.ops.aten.bmm.default,
}


@pytest.mark.parametrize("policy", SAVED.values(), ids=SAVED)
def test_a_policy_saves_what_the_compile_door_saves(policy: Any) -> None:
    net, x = Net(), torch.randn(2, 16, 32, requires_grad=True)
    backend = fxckpt.Backend(policy=policy, inner="aot_eager")
    torch.compile(net, backend=backend)(x).sum().backward()
    compiled, region = backend.plans[0], plan_of(within(None, policy=policy), net, x)
    assert compiled.saved == region.saved
    assert str(compiled.explain()) == str(region.explain())
    assert differing(step(net, plain), step(net, within(None, policy=policy))) == []


def test_kept_is_what_the_policy_said() -> None:
    net, x = Net(), torch.randn(2, 16, 32, requires_grad=True)
    for _ in range(2):
        with fxckpt.record_regions() as found:
            fxckpt.checkpoint(net, x, policy=policies.save_matmuls)
        (region,) = found
        assert region.plan is not None
        kept = {row.op for row in region.rows if row.what == "kept"}
        assert kept <= {"aten.addmm.default", "aten.bmm.default"}
        saved = [row for row in region.plan.rows if row.decision is Decision.SAVED]
        assert len(saved) == sum(row.what == "kept" for row in region.rows)
        assert "addmm" in str(region) and "layers.0.attn" in str(region)


# --- what plans are for ---


def test_regions_within_regions_are_planned() -> None:
    inner = lambda x: F.dropout(x.tanh()).sin()  # noqa: E731
    for _ in range(3):
        x = torch.randn(4, 4, requires_grad=True)
        grads = []
        for checkpoint in (plain, within(1.0)):
            torch.manual_seed(0)
            out = checkpoint(lambda x: F.dropout(checkpoint(inner, x).exp()), x)  # noqa: B023
            grads.append(torch.autograd.grad(out.sum(), x)[0])
        assert torch.equal(*grads)


def test_regions_that_write_a_buffer_before_one_backward() -> None:
    def gradient(checkpoint: Callable[..., Any]) -> Tensor:
        state, x = torch.ones(4, 4), torch.ones(4, 4, requires_grad=True)

        def region(x: Tensor) -> Tensor:
            state.mul_(1.5)
            return (x * state.clone()).sin()

        return torch.autograd.grad(checkpoint(region, checkpoint(region, x)).sum(), x)[0]

    for _ in range(2):
        assert torch.equal(
            gradient(plain), gradient(within(None, policy=policies.recompute_pointwise))
        )


@pytest.mark.parametrize("budget", [1.3, 1.8])
def test_the_peak_counts_what_autograd_holds(budget: float) -> None:
    """A sine keeps its argument; a compiled backward could keep the cosine instead."""
    weights = [(torch.randn(64, 64) / 8).requires_grad_() for _ in range(6)]
    x = torch.randn(1024, 64, requires_grad=True)

    def region(x: Tensor) -> Tensor:
        for weight in weights:
            x = torch.sin(30 * (x @ weight))
        return x.sum()

    with pytest.raises(fxckpt.BudgetInfeasible) as caught:
        within(1)(region, x)
    limit = int(budget * caught.value.floor_bytes)

    def run() -> None:
        torch.autograd.grad(within(limit)(region, x), [x, *weights])

    run()
    assert fxckpt.measure_peak(run) <= 1.01 * limit


def test_other_types_or_gradients_get_another_plan(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each combination of dtypes and inputs that require gradients is planned once."""
    planned: list[int] = []
    import sys

    module = sys.modules["fxckpt.eager.region_cache"]
    real = module.region_plan_of
    monkeypatch.setattr(module, "region_plan_of", lambda *args: planned.append(1) or real(*args))
    region = lambda x, w: (x @ w).sin().exp()  # noqa: E731
    for dtype, needs in [(torch.float32, False), (torch.float64, False), (torch.float32, True)] * 2:
        x = torch.randn(8, 8, dtype=dtype, requires_grad=True)
        within(1.0)(region, x, torch.randn(8, 8, dtype=dtype, requires_grad=needs))
    assert len(planned) == 3


def test_nothing_to_plan_is_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    """A region with nothing to differentiate is examined on its first call only."""
    frozen = nn.Linear(4, 4).requires_grad_(False)
    within(None, policy=policies.save_matmuls)(frozen, torch.randn(2, 4))
    monkeypatch.setattr("fxckpt.eager.region_cache.region_plan_of", None)
    within(None, policy=policies.save_matmuls)(frozen, torch.randn(2, 4))


def test_two_policies_are_not_taken_for_one_another() -> None:
    class Saving:
        def __init__(self, op: Any) -> None:
            self.op = op

        def policy(self, ctx: Any, op: Any, *args: Any, **kwargs: Any) -> bool:
            return bool(op is self.op)

    region = lambda x: (x @ x).sin().exp().cosh()  # noqa: E731
    x = torch.randn(4, 4, requires_grad=True)
    for op in (torch.ops.aten.mm.default, torch.ops.aten.sin.default):
        with fxckpt.record_regions() as found:
            fxckpt.checkpoint(region, x, policy=Saving(op).policy)
        assert [row.op for row in found[0].rows if row.what == "kept"] == [str(op)]


def test_untraceable_regions_drop_policies_and_refuse_budgets() -> None:
    """If a region cannot be traced, a policy is dropped with a warning and a budget is refused."""
    given = torch.sparse_coo_tensor(
        torch.tensor([[0, 1], [1, 0]]), torch.ones(2), (2, 2), check_invariants=False
    )
    region = lambda x: torch.sparse.mm(given, x.sin()).exp()  # noqa: E731
    x = torch.randn(2, 2, requires_grad=True)
    (expected,) = torch.autograd.grad(region(x).sum(), x)
    with pytest.warns(UserWarning, match="is not applied"):
        out = within(None, policy=policies.save_matmuls)(region, x)
    assert torch.equal(torch.autograd.grad(out.sum(), x)[0], expected)
    with pytest.raises(fxckpt.CaptureError, match="A budget needs a plan"):
        within(0.9)(region, x)


@pytest.mark.parametrize("policy", [policies.recompute_all, policies.save_all])
def test_values_that_steer_python_and_norms_of_parameters(policy: Any) -> None:
    torch.manual_seed(0)
    normed = nn.utils.parametrizations.spectral_norm(nn.Linear(8, 8))

    def region(x: Tensor) -> Tensor:
        y = normed(x)
        scale = 2.0 if y.sum().item() > -1e9 else 1.0
        return (y * scale).sin()

    normed.eval()
    x = torch.randn(4, 8, requires_grad=True)
    (expected,) = torch.autograd.grad(region(x).sum(), x)
    for _ in range(2):
        assert torch.equal(
            torch.autograd.grad(within(None, policy=policy)(region, x).sum(), x)[0], expected
        )


def test_threads_plan_at_the_same_time() -> None:
    import threading

    errors: list[BaseException] = []

    def work(width: int) -> None:
        try:
            net = nn.Sequential(nn.Linear(width, width), nn.GELU(), nn.Linear(width, width))
            for _ in range(2):
                within(None, policy=policies.save("0"))(net, torch.randn(2, width)).sum().backward()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(width,)) for width in (4, 6, 8, 10)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
