"""Policies at every entry point, alone and under a budget: the values that each saves."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.checkpoint import CheckpointPolicy

import fxckpt
from fxckpt.planner.capture import Joint, capture_joint
from fxckpt.planner.planner import planner_of
from fxckpt.policies import (
    Policy,
    Value,
    block_boundaries,
    first_match,
    recompute,
    recompute_all,
    save,
    save_any_except,
    save_attention,
    save_only,
)
from tests.joints import normalize
from tests.policies.nets import (
    ATTENTION,
    EXPECTED,
    PREFER_RECOMPUTE,
    aten,
    net,
    tanh_alone,
    torch_style,
)
from tests.steps import FLOOR, same_at_every_budget


@pytest.fixture(scope="module")
def joint() -> Joint:
    model, inputs = net()
    found = capture_joint(model, inputs, {})
    normalize(found.module)
    return found


@pytest.mark.parametrize("name", EXPECTED)
def test_policy_saves_expected_values(name: str, joint: Joint) -> None:
    """Each policy saves exactly the values that its name promises."""
    policy, expected = EXPECTED[name]
    _, plan = planner_of(None, policy, "roofline").plan(joint)
    assert set(plan.saved) == set(expected.split())


@pytest.mark.parametrize("name", ["save_matmuls", "every", "save", "recompute", "function"])
def test_policy_agrees_across_entry_points(name: str) -> None:
    """A policy saves the same values by rewriting and in an eager region."""
    policy, expected = EXPECTED[name]
    model, inputs = net()
    assert set(
        fxckpt.rewrite(fx.symbolic_trace(model), policy, example_inputs=inputs).plan.saved
    ) == set(expected.split())
    assert set(plan_of_eager_region(policy).saved) == set(expected.split())


def plan_of_eager_region(policy: Any) -> fxckpt.Plan:
    model, inputs = net()
    with fxckpt.record_regions() as found:
        fxckpt.checkpoint(model, *inputs, policy=policy)
    (region,) = found
    assert region.plan is not None
    return region.plan


@pytest.mark.parametrize("name", ["sqrt_n", "block_boundaries", "save_only"])
def test_entry_points_explain_alike(name: str) -> None:
    """A policy changes no number, and plans of all entry points explain alike."""
    policy, _ = EXPECTED[name]
    (compiled,) = same_at_every_budget(net, (None,), policy=policy)
    model, inputs = net()
    assert str(fxckpt.rewrite(model, policy, example_inputs=inputs).plan.explain()) == str(
        compiled.explain()
    )
    assert str(plan_of_eager_region(policy).explain()) == str(compiled.explain())
    for source in (fx.symbolic_trace(model), torch.export.export(model, inputs).module()):
        made = fxckpt.rewrite(source, policy, example_inputs=inputs)
        made(*inputs).backward()
        assert made.plan.saved == compiled.saved
        assert [(row.name, row.module) for row in made.plan.rows] == [
            (row.name, row.module) for row in compiled.rows
        ]


def test_traced_graphs_obey_module_paths() -> None:
    """Every graph that records modules obeys paths; one that does not says so."""
    model, inputs = net()
    assert set(fxckpt.rewrite(make_fx(model)(*inputs), save_only("attn_out")).plan.saved) == set(
        ATTENTION.split()
    )
    with pytest.raises(
        fxckpt.PolicyMatchesNothing, match="The graph says of no op which module made it"
    ):
        fxckpt.rewrite(
            make_fx(lambda x, w: (x @ w).sin().sum())(
                torch.randn(2, 2), w := torch.ones(2, 2, requires_grad=True)
            ),
            save("a"),
        )(torch.randn(2, 2), w)


@pytest.mark.parametrize(
    ("policy", "expected"),
    [
        (save_attention | tanh_alone, f"tanh tanh_1 {ATTENTION}"),
        (tanh_alone | save_attention, f"tanh tanh_1 {ATTENTION}"),
        (save_attention | [aten.tanh], f"tanh tanh_1 {ATTENTION}"),
        (save_any_except("attn_out") & torch_style, "tanh tanh_1"),
        (first_match(tanh_alone, recompute_all), "tanh tanh_1"),
        ([tanh_alone, recompute_all], "tanh tanh_1"),
    ],
    ids=["or", "or, the other way", "or ops", "and", "first", "a list"],
)
def test_torch_forms_compose(policy: Any, expected: str, joint: Joint) -> None:
    """Functions and lists of ops compose with policies; None leaves a value open."""
    _, plan = planner_of(None, policy, "roofline").plan(joint)
    assert set(plan.saved) == set(expected.split())


def test_budget_respects_must() -> None:
    """A budget decides the rest and leaves each MUST alone."""
    for plan in same_at_every_budget(net, (0.9, FLOOR), policy=save("layers.0.attn")):
        assert {"addmm", "getitem"} <= set(plan.saved)
    for plan in same_at_every_budget(net, (None, 1.0, FLOOR), policy=recompute("layers.*.up")):
        assert not {"addmm_1", "addmm_4"} & set(plan.saved)


@dataclasses.dataclass(frozen=True)
class Where(Policy):
    """A user-defined policy: one answer in one module."""

    module: str
    answer: CheckpointPolicy

    def decide(self, value: Value) -> CheckpointPolicy | None:
        return self.answer if value.module.startswith(self.module) else None


def test_preference_breaks_ties_under_budget() -> None:
    """Between equally good plans, a budget takes the preferred one."""
    model = nn.Sequential(
        *(
            nn.Sequential(nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 32), nn.Sigmoid())
            for _ in range(6)
        )
    )
    x = torch.randn(64, 32)
    budget = int(0.95 * fxckpt.plan(model, x).peak_bytes)
    for layer in ("0", "1"):
        plan = fxckpt.plan(model, x, policy=Where(layer, PREFER_RECOMPUTE), budget=budget)
        assert {row.module[0] for row in plan.rows if row.runs} == {layer}


def test_pattern_may_match_one_of_several_graphs() -> None:
    """With a graph break, a pattern need match in only one of the graphs."""

    class Broken(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            y = self.first(x).sin()
            torch._dynamo.graph_break()
            return self.second(y).sin()

    backend = fxckpt.Backend(
        policy=block_boundaries("second") | recompute("first"), inner="aot_eager"
    )
    torch.compile(Broken(), backend=backend)(torch.randn(2, 8)).sum().backward()
    assert len(backend.plans) == 2
