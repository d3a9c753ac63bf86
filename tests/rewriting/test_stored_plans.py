"""Stored plans: applied unchanged, moved between entry points, compared, refused."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

import fxckpt
from fxckpt import policies
from fxckpt.torch_private import frees_incoming_gradients
from tests.rewriting.sources import ROUTES, either, gpt, resnet, stack
from tests.steps import loss_of


@either
def test_stored_plan_is_applied_unchanged(of: Callable[[nn.Module], nn.Module]) -> None:
    """A plan read from JSON is applied unchanged, and refused for other shapes or a budget."""
    x = torch.randn(4, 8)
    plan = fxckpt.rewrite(of(stack()), policies.save_matmuls, example_inputs=(x,)).plan
    stored = fxckpt.Plan.from_json(plan.to_json())
    assert stored == plan
    assert stored.digest == plan.digest
    made = fxckpt.rewrite(of(stack()), stored)
    made(x).sum().backward()
    assert made.plan == plan
    with pytest.raises(fxckpt.PlanMismatch, match=r"float32\[4, 8\](.|\n)*float32\[5, 8\]"):
        made(torch.randn(5, 8))
    with pytest.raises(fxckpt.InvalidOption, match="a plan is applied as it is"):
        fxckpt.rewrite(of(stack()), stored, budget=0.5)


def test_plans_move_between_compile_and_rewrite() -> None:
    """A plan of fxckpt.plan fits both fxckpt.rewrite and fxckpt.Backend."""
    x = torch.randn(4, 8)
    plan = fxckpt.plan(stack(), x, policy=policies.save_matmuls)
    made = fxckpt.rewrite(stack(), plan, example_inputs=(x,))
    assert made.plan == plan
    backend = fxckpt.Backend(policy=plan, inner="aot_eager")
    torch.compile(stack(), backend=backend)(x)
    assert backend.plans == (plan,)


@pytest.mark.parametrize("make", [gpt, resnet])
def test_plans_move_between_capture_routes(make: Callable[[], Any]) -> None:
    """A plan applies to every capture of a model, at the same peak and digest."""
    torch.manual_seed(0)
    model, inputs = make()
    plan = fxckpt.plan(model, *inputs, budget=0.8)
    # The engine may hold the gradient of the last op outside, one float, while the model's run.
    held = 0 if frees_incoming_gradients() else 4
    for route in ("symbolic_trace", "export", "dynamo"):
        source, given = ROUTES[route](model, inputs)
        made = fxckpt.rewrite(source, fxckpt.Plan.from_json(plan.to_json()), example_inputs=given)
        assert made.plan == plan
        loss_of(made(*given)).backward()
        for tensor in (*model.parameters(), *source.parameters(), *given):
            tensor.grad = None
        measured = fxckpt.measure_peak(
            lambda made=made, given=given: loss_of(made(*given)).backward()
        )
        assert measured == plan.peak_bytes + held
        own = fxckpt.rewrite(source, budget=0.8, example_inputs=given).plan
        assert own.digest == plan.digest


def test_digest_ignores_only_input_order() -> None:
    """Graphs that differ in more than the order of inputs have different digests."""

    def of(f: Callable[..., Tensor]) -> str:
        return fxckpt.plan(f, *(torch.randn(3, 3, requires_grad=True) for _ in range(2))).digest

    assert of(lambda x, y: (x @ y).sin().sum()) == of(lambda x, y: (y @ x).sin().sum())
    assert of(lambda x, y: (x @ y + x).sin().sum()) != of(lambda x, y: (x @ y + y).sin().sum())
    assert of(lambda x, y: (x @ y).sin().sum()) != of(
        lambda x, y: (x @ x).sin().sum() + 0 * y.sum()
    )


def test_stored_plan_diffs_like_any_other() -> None:
    """diff of stored plans equals that of fresh ones."""
    x = torch.randn(4, 8)
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8), nn.GELU())
    one, other = (
        fxckpt.plan(model, x, policy=policy)
        for policy in (policies.save_all, policies.recompute_all)
    )
    stored = fxckpt.Plan.from_json(one.to_json())
    expected = str(one.diff(other))
    assert "recomputed" in expected
    assert str(stored.diff(other)) == expected
    assert "recomputed" in str(stored.diff(fxckpt.Plan.from_json(other.to_json())))
    with pytest.raises(fxckpt.InvalidOption, match="different graphs"):
        stored.diff(fxckpt.plan(model, x[:2]))


def test_missing_plan_field_takes_default() -> None:
    """A field absent from an older plan takes its default; a required one is an error."""
    plan = fxckpt.plan(stack(), torch.randn(4, 8))
    figures = {
        name: value
        for name, value in json.loads(plan.to_json()).items()
        if name not in ("form", "checksum", "frees_early")
    }
    digest = hashlib.sha256(json.dumps(figures, sort_keys=True).encode()).hexdigest()
    older = {"form": "fxckpt plan 1", "checksum": digest[:16], **figures}
    assert fxckpt.Plan.from_json(json.dumps(older)) == plan
    with pytest.raises(fxckpt.InvalidPlan, match="'rows'"):
        fxckpt.Plan.from_json(
            json.dumps({name: value for name, value in older.items() if name != "rows"})
        )


def test_invalid_plan_text_is_refused() -> None:
    """Text that is not a valid, unchanged plan raises InvalidPlan with the cause."""
    text = fxckpt.plan(stack(), torch.randn(4, 8)).to_json()
    for wrong, says in (
        ("{", "not JSON"),
        ("[]", "of form None"),
        (text.replace("fxckpt plan 1", "fxckpt plan 0"), "reads 'fxckpt plan 1'"),
        (text.replace('"saved_bytes"', '"spared_bytes"'), "spared_bytes"),
        (text.replace('"decision": "saved"', '"decision": "lost"'), "lost"),
        (text.replace('"runs": 0', '"runs": 1', 1), "changed since it was written"),
        (text.replace('"saved_bytes": ', '"saved_bytes": 1', 1), "changed since it was written"),
        (text.replace('"saved": [', '"saved": ["other", ', 1), "changed since it was written"),
    ):
        with pytest.raises(fxckpt.InvalidPlan, match=says):
            fxckpt.Plan.from_json(wrong)


def test_hand_edited_plan_is_refused() -> None:
    """A plan edited after it was made raises InvalidPlan or VerifyError."""
    x = torch.randn(4, 8)
    plan = fxckpt.rewrite(
        fx.symbolic_trace(stack()), policies.recompute_all, example_inputs=(x,)
    ).plan
    for schedule in (
        (fxckpt.Recompute("nothing", "output"),),
        (fxckpt.Recompute("addmm", "nowhere"),),
    ):
        with pytest.raises(fxckpt.InvalidPlan, match="changed by hand"):
            fxckpt.rewrite(
                fx.symbolic_trace(stack()),
                dataclasses.replace(plan, schedule=schedule),
                example_inputs=(x,),
            )
    with pytest.raises(fxckpt.VerifyError, match="which the plan does not save"):
        fxckpt.rewrite(
            fx.symbolic_trace(stack()),
            dataclasses.replace(plan, schedule=plan.schedule[1:], saved=()),
            example_inputs=(x,),
        )
