"""Policies in torch's form, in both directions."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.checkpoint import CheckpointPolicy

import fxckpt
from fxckpt.policies import Value, as_policy, save, save_matmuls
from fxckpt.policies.torch_form import AskedByOp, FunctionPolicy
from fxckpt.torch_private import policy_context
from tests.policies.nets import MUST_SAVE, PREFER_RECOMPUTE, aten


def asked(answer: Any, **options: Any) -> Any:
    """Return the decision of a function that gives this answer."""
    return FunctionPolicy(lambda *args, **kwargs: answer, **options).decide(Value(aten.sin.default))


@pytest.mark.parametrize(
    ("answer", "expected"),
    [(True, MUST_SAVE), (False, PREFER_RECOMPUTE), *((a, a) for a in CheckpointPolicy)],
)
def test_answers_of_a_function(answer: Any, expected: CheckpointPolicy) -> None:
    """A policy's own words pass, and a bool means what it means to torch."""
    assert asked(answer) is expected


@pytest.mark.parametrize("answer", [None, 3, "save"])
def test_other_answers_are_refused(answer: object) -> None:
    """The error names the op and what a function may return."""
    with pytest.raises(fxckpt.InvalidOption, match=r"for aten.sin.default"):
        asked(answer)


def test_a_part_may_leave_a_value_open() -> None:
    """None is an answer only where another policy decides."""
    assert asked(None, is_part=True) is None


def test_a_function_gets_the_call() -> None:
    """Op, arguments and output are those of the value."""
    seen: list[Any] = []

    def policy(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> bool:
        seen.append((op, args, kwargs, ctx.op_output))
        return True

    output = torch.ones(2)
    as_policy(policy).decide(
        Value(aten.add.Tensor, args=(1, 2), kwargs={"alpha": 3}, output=output)
    )
    assert seen == [(aten.add.Tensor, (1, 2), {"alpha": 3}, output)]


def test_an_error_of_a_function_names_the_value() -> None:
    """The function's error is told, with the reason why values cannot be read."""

    def failing(*_: Any) -> bool:
        raise KeyError("layer")

    with pytest.raises(fxckpt.InvalidOption, match=r"the policy raised KeyError.*layer"):
        as_policy(failing).decide(Value(aten.sin.default))


def test_a_policy_answers_in_torch_s_form() -> None:
    """Asked op by op, a policy decides, and what it leaves open is recomputed."""
    context = policy_context(torch.ones(2, 2))
    assert AskedByOp(save_matmuls)(context, aten.mm.default) is MUST_SAVE
    assert AskedByOp(save("nowhere"))(context, aten.mm.default) is PREFER_RECOMPUTE
