"""Selectors: patterns over modules, names and ops."""

from __future__ import annotations

from typing import Any

import pytest

import fxckpt
from fxckpt.policies import (
    Policy,
    Value,
    block_boundaries,
    recompute,
    save,
    save_attention,
    save_matmuls,
    save_only,
    save_ops,
)
from tests.policies.nets import MUST_SAVE, aten, net


@pytest.mark.parametrize(
    ("policy", "says"),
    [
        (
            save("layer.*.attn"),
            r"no module that computes fits 'layer.\*.attn'. Did you mean 'layers.\*.attn'",
        ),
        (recompute("attn"), r"did you mean '\*\*.attn'"),
        (block_boundaries("blocks.*"), "no module that computes fits"),
        (save_only("attnout"), "no value is named 'attnout'. Did you mean 'attn_out'"),
        (
            save_ops(aten.mm),
            "save_ops.aten.mm. matches no op of the graph. Did you mean 'aten.addmm'",
        ),
        (save("nowhere") | save_matmuls, "no module that computes fits 'nowhere'"),
    ],
)
def test_unmatched_pattern_suggests_the_nearest(policy: Policy, says: str) -> None:
    """A pattern that matches nothing raises and suggests the nearest names."""
    model, inputs = net()
    with pytest.raises(fxckpt.PolicyMatchesNothing, match=says):
        fxckpt.rewrite(model, policy, example_inputs=inputs)


def value(op: Any, module: str = "") -> Value:
    return Value(op, module=module)


@pytest.mark.parametrize(
    ("policy", "op", "expected"),
    [
        (save_ops(aten.add), aten.add.Scalar, True),
        (save_ops(aten.add.Tensor), aten.add.Scalar, False),
        (save_ops(aten.add.Tensor), aten.add.Tensor, True),
        (save_matmuls, aten.bmm.default, True),
        (save_matmuls, aten.sin.default, False),
    ],
    ids=["packet", "another overload", "overload", "product", "pointwise"],
)
def test_ops_are_selected_by_overload_or_all(policy: Policy, op: Any, expected: bool) -> None:
    """A packet selects all its overloads, an overload itself alone."""
    assert (policy.decide(value(op)) is MUST_SAVE) is expected


def test_modules_are_selected_with_what_they_hold() -> None:
    """A module's pattern selects its submodules, and leaves all others open."""
    policy = save("layers.*.attn")
    decided = {
        path: policy.decide(value(aten.sin.default, path))
        for path in ("layers.0.attn", "layers.10.attn.out", "layers.0.mlp", "layers.attn", "")
    }
    assert [path for path, answer in decided.items() if answer is not None] == [
        "layers.0.attn",
        "layers.10.attn.out",
    ]


def test_a_list_of_names_is_cut() -> None:
    """An error lists at most a dozen ops of a graph."""
    names = ("abs", "acos", "asin", "atan", "ceil", "cos", "cosh", "erf", "exp", "floor", "log")
    many = [value(getattr(aten, name).default) for name in (*names, "neg", "sin", "sinh", "tan")]
    with pytest.raises(fxckpt.PolicyMatchesNothing, match=r"and 3 more"):
        save_attention.bind(many)
