"""Plans for Inductor: the default choice, budgets, least peaks and gradients."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._inductor import config
from torch._inductor.utils import run_and_get_code
from torch.nn import functional as F
from torch.utils.checkpoint import (
    CheckpointPolicy,
)

import fxckpt
from fxckpt import budgets
from fxckpt.inductor.planner import InductorPlanner
from fxckpt.passes.analysis.byte_counts import RNG_STATE_BYTES
from fxckpt.passes.graphs import Joint
from fxckpt.planner.planner import Planner
from tests.inductor.models import (
    Constants,
    images,
    next_tokens,
)
from tests.joints import inductor_joint
from tests.steps import peak_of


def test_unbounded_convolutions_take_no_more_than_inductor() -> None:
    """Without a budget the default choice is taken, and its measured peak is no higher."""
    backend = fxckpt.Backend(cost="flops")
    measured = peak_of(backend, images)
    assert measured <= peak_of("inductor", images)
    assert not backend.plans[0].keeps_order


class Biased(nn.Module):
    """Attention under one mask, with a bias that all layers share.

    Its gradient is a sum under the mask in every layer of the backward.
    """

    def __init__(self) -> None:
        super().__init__()
        self.project, self.back = (
            nn.ModuleList(nn.Linear(128, n) for _ in range(3)) for n in (384, 128)
        )
        self.bias = nn.Parameter(torch.zeros(4, 128))

    def forward(self, x: Tensor) -> Tensor:
        for project, back in zip(self.project, self.back, strict=True):
            query, key, value = (
                project(F.layer_norm(x, (128,))).unflatten(-1, (3, 4, 32)).permute(2, 0, 3, 1, 4)
            )
            scores = query @ key.mT + self.bias[:, None]
            x = x + back((scores.tril().softmax(-1) @ value).transpose(1, 2).flatten(2))
        return x.square().mean()


def test_unbounded_plan_does_not_save_a_shared_mask() -> None:
    """Saved, the mask would fuse the bias gradients of all layers into one kernel at the end."""

    def make() -> tuple[nn.Module, Tensor]:
        return Biased(), torch.randn(2, 128, 128)

    assert peak_of(fxckpt.Backend(cost="flops"), make) <= peak_of("inductor", make)


def test_default_choice_compiles_to_the_same_calls() -> None:
    """Inductor returns saved values in another order, which is no work."""

    def called(backend: Any) -> list[list[str]]:
        torch._dynamo.reset()
        model, x = images()
        with config.patch(fx_graph_cache=False):
            _, codes = run_and_get_code(lambda: torch.compile(model, backend=backend)(x).backward())
        return [
            re.findall(
                r"^ +(?:\w+ = )?(?:cpp_fused|extern_kernels|torch\.ops|empty_strided|del ).*",
                code,
                re.MULTILINE,
            )
            for code in codes
        ]

    forward, backward = called(fxckpt.Backend(cost="flops"))
    assert [forward, backward] == called("inductor")
    assert len(forward) > 10 and len(backward) > 10


def planned_images(budget: Any) -> fxckpt.Plan:
    """The plan of convolutions within a budget; nothing is compiled."""
    joint, count = inductor_joint(*images())
    return InductorPlanner(Planner(budget=budget, cost="flops")).partition(Joint(joint, count))[2]


def least_of_images(budget: int) -> int:
    """The least peak that the error of a small budget names."""
    with pytest.raises(fxckpt.BudgetInfeasible) as caught:
        planned_images(budget)
    return caught.value.floor_bytes


def test_least_peak_of_convolutions_is_feasible() -> None:
    """The least peak that an error names is the one of ``budget="min"``."""
    plan = planned_images("min")
    assert plan.compiled_peak_bytes == plan.budget_bytes == least_of_images(1)


@pytest.mark.sweep
def test_least_peak_does_not_depend_on_the_budget() -> None:
    """A budget of one byte less names the same, and one of just that has a plan."""
    floor = least_of_images(1)
    assert least_of_images(floor - 1) == floor
    plan = planned_images(floor)
    assert plan.compiled_peak_bytes is not None and plan.compiled_peak_bytes <= floor


def test_least_compiled_memory_within_a_time() -> None:
    """Inductor's plan for a target in time keeps to it, and saves memory."""
    joint, count = inductor_joint(*images())
    planned = [
        InductorPlanner(Planner(budget=budgets.LeastMemory(share), cost="flops")).partition(
            Joint(joint, count)
        )[2]
        for share in (0.0, 0.2)
    ]
    least, less = (plan.compiled_peak_bytes for plan in planned)
    assert least is not None and less is not None and less < least
    for plan, share in zip(planned, (0.0, 0.2), strict=True):
        assert plan.recompute_seconds <= share * plan.step_seconds


class Alignment(nn.Module):
    """A loss of sequences, on which the model of what Inductor stores is wrong."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 20))

    def forward(self, x: Tensor) -> Tensor:
        lengths, targets = torch.full((4,), 30), torch.ones(4, 5, dtype=torch.long)
        return F.ctc_loss(self.layers(x).log_softmax(-1), targets, lengths, torch.full((4,), 5))


def test_least_peak_is_at_most_the_default_choice() -> None:
    """The default choice is a last resort, where the fusion model is wrong."""
    joint, count = inductor_joint(Alignment(), torch.randn(30, 4, 32))
    default = InductorPlanner(Planner(cost="flops")).partition(Joint(joint, count))[2]
    with pytest.raises(fxckpt.BudgetInfeasible) as caught:
        InductorPlanner(Planner(budget=1, cost="flops")).partition(Joint(joint, count))
    assert (
        default.compiled_peak_bytes is not None
        and caught.value.floor_bytes <= default.compiled_peak_bytes
    )


class Collects(nn.Module):
    """Layers that collect masks and values, whose recomputation reads many buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        masks, kept = torch.zeros(4, *x.shape, dtype=torch.bool), torch.zeros(4, *x.shape)
        for i, layer in enumerate(self.layers):
            x = layer(x)
            masks[i], kept[i] = x > 0, x.detach()
            x = x * masks[i].clone() + kept[i] * 0.1
            masks[i, ::2] = False
        return (x * masks.sum(0)).square().mean()


def test_no_plan_is_below_the_named_least_peak() -> None:
    """Larger budgets find no plan below the least peak that an error names."""
    joint, count = inductor_joint(Collects(), torch.randn(1024, 64))
    with pytest.raises(fxckpt.BudgetInfeasible) as caught:
        InductorPlanner(Planner(budget=1, cost="flops")).partition(Joint(joint, count))
    for share in (0.75, 0.85):
        plan = InductorPlanner(Planner(budget=share, cost="flops")).partition(Joint(joint, count))[
            2
        ]
        assert (
            plan.compiled_peak_bytes is not None
            and plan.compiled_peak_bytes >= caught.value.floor_bytes
        )


def test_seeds_are_saved_whatever_a_policy_says(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Seeds of random ops are saved even under MUST_RECOMPUTE."""
    monkeypatch.setitem(RNG_STATE_BYTES, "cpu", 4)

    def scaled(x: Tensor) -> Tensor:
        return 3 * F.dropout(x, 0.5)

    torch._dynamo.reset()
    backend = fxckpt.Backend(policy=lambda *_, **__: CheckpointPolicy.MUST_RECOMPUTE)
    x = torch.rand(64, 64).add(1).requires_grad_()
    y = torch.compile(scaled, backend=backend)(x)
    y.sum().backward()
    torch.testing.assert_close(x.grad, (y / x).detach())
    assert any("seeds" in name for name in backend.plans[0].saved)


def test_gradient_of_sliced_logits_overwrites_them() -> None:
    """Inductor allocates it beside them."""
    backend = fxckpt.Backend(cost="flops")
    logits = 8 * 64 * 1000 * 4
    default, ours = peak_of("inductor", next_tokens), peak_of(backend, next_tokens)
    assert default - ours > 0.9 * logits
    assert backend.plans[0].compiled_peak_bytes == ours


def test_head_gradient_does_not_wait_for_the_embedding() -> None:
    """Waiting, the gradient of the logits would live beside the saved values of all layers."""
    joint, count = inductor_joint(*next_tokens())
    with pytest.raises(fxckpt.BudgetInfeasible) as caught:
        InductorPlanner(Planner(budget=1, cost="flops")).partition(Joint(joint, count))
    logits, table = 8 * 64 * 1000 * 4, 1000 * 32 * 4
    assert caught.value.floor_bytes < 1.1 * (logits + table)


def test_gradients_of_sliced_logits_equal_inductor() -> None:
    """Gradients equal those of Inductor with and without a budget."""

    def gradients(backend: Any) -> list[Tensor]:
        torch._dynamo.reset()
        model, x = next_tokens()
        torch.compile(model, backend=backend)(x).backward()
        return [p.grad for p in model.parameters() if p.grad is not None]

    expected = gradients("inductor")
    for budget in (None, 0.45):
        for one, other in zip(
            gradients(fxckpt.Backend(budget=budget, cost="flops")), expected, strict=True
        ):
            torch.testing.assert_close(one, other)


def test_budget_holds_for_the_largest_marked_size() -> None:
    """One plan for all sizes of a marked range stays within the budget at the largest."""

    def compiled(budget: int) -> tuple[Any, nn.Module, fxckpt.Backend]:
        torch._dynamo.reset()
        backend = fxckpt.Backend(budget=budget, cost="flops")
        layers = nn.Sequential(
            nn.Linear(48, 48), nn.GELU(), nn.Linear(48, 48), nn.GELU(), nn.Linear(48, 48)
        )
        run = torch.compile(lambda x: layers(x).square().sum(), backend=backend)
        x = torch.randn(200, 48)
        torch._dynamo.mark_dynamic(x, 0, min=128, max=512)
        run(x).backward()
        return run, layers, backend

    with pytest.raises(fxckpt.BudgetInfeasible) as caught:
        compiled(1)
    run, layers, backend = compiled(caught.value.floor_bytes)
    layers.zero_grad(set_to_none=True)
    largest = torch.randn(512, 48)
    measured = fxckpt.measure_peak(lambda: run(largest).backward())
    assert len(backend.plans) == 1
    assert measured <= caught.value.floor_bytes


def test_traced_compile_is_planned(tmp_path: Any) -> None:
    """TORCH_COMPILE_DEBUG and a budget go together."""
    with config.patch(
        {"trace.enabled": True, "trace.debug_dir": str(tmp_path), "fx_graph_cache": False}
    ):
        torch._dynamo.reset()
        torch.compile(Constants(), backend=fxckpt.Backend(budget=0.9, cost="flops"))(
            torch.rand(512, 48)
        ).backward()
    assert list(tmp_path.rglob("output_code.py"))


class Masked(nn.Module):
    """A head, with a bias, that is the embedding too, after layers without biases.

    Nodes that Inductor makes of both gradients have no mark of their own.
    """

    def __init__(self) -> None:
        super().__init__()
        self.table, self.bias = nn.Embedding(128, 64), nn.Parameter(torch.zeros(128))
        layers = (
            nn.Sequential(
                nn.LayerNorm(64),
                nn.Linear(64, 256, bias=False),
                nn.GELU(),
                nn.Linear(256, 64, bias=False),
            )
            for _ in range(4)
        )
        self.layers = nn.ModuleList(layers)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.table(tokens)
        for layer in self.layers:
            x = x + layer(x)
        return F.cross_entropy(F.linear(x, self.table.weight, self.bias), tokens.flip(0))


def test_kept_order_has_no_cycles() -> None:
    """Nodes that Inductor merged have no mark; dependencies on them make no cycle."""
    joint, count = inductor_joint(Masked(), torch.randint(0, 128, (32,)))
    default = (
        InductorPlanner(Planner(cost="flops")).partition(Joint(joint, count))[2].compiled_peak_bytes
    )
    assert default is not None
    with pytest.raises(fxckpt.BudgetInfeasible) as caught:
        InductorPlanner(Planner(budget=1, cost="flops")).partition(Joint(joint, count))
    assert caught.value.floor_bytes <= default


@pytest.mark.parametrize("scope", ["graph", "step"])
def test_whole_fractions_of_tiny_models_fit(scope: str) -> None:
    """Such a model compiles to more than planned; the step has the limit of its plan."""

    class Gated(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = torch.nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y: torch.Tensor = self.linear(self.linear(x).tanh() * x.sigmoid())
            return y

    backend = fxckpt.Backend(1.0, scope=scope)
    model = Gated()
    run = torch.compile(model, backend=backend)
    for _ in range(3):
        model.zero_grad()
        run(torch.ones(1, 4, requires_grad=True)).sum().backward()
    plan = backend.plans[0]
    assert plan.compiled_peak_bytes == plan.budget_bytes
    assert plan.budget_bytes is not None and plan.budget_bytes > plan.baseline_peak_bytes
    step = backend.report().step
    assert (step is None) == (scope == "graph")
    assert step is None or step.budget_bytes == plan.budget_bytes
