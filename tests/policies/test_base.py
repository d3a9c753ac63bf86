"""Policies as values: what they see, how they combine, and their errors."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch

import fxckpt
from fxckpt.policies import (
    Policy,
    Value,
    as_policy,
    every,
    first_match,
    recompute,
    save,
    save_all,
    save_matmuls,
    save_only,
    save_ops,
    sqrt_n,
)
from tests.policies.nets import (
    ANSWERS,
    EXPECTED,
    MUST_RECOMPUTE,
    MUST_SAVE,
    PREFER_RECOMPUTE,
    PREFER_SAVE,
    WIDTH,
    Net,
    aten,
    decided,
    fixed,
    net,
    tanh_alone,
)

EITHER = {
    MUST_SAVE: (MUST_SAVE, MUST_SAVE, MUST_SAVE, "clash", MUST_SAVE),
    PREFER_SAVE: (MUST_SAVE, PREFER_SAVE, PREFER_SAVE, MUST_RECOMPUTE, PREFER_SAVE),
    PREFER_RECOMPUTE: (MUST_SAVE, PREFER_SAVE, PREFER_RECOMPUTE, MUST_RECOMPUTE, PREFER_RECOMPUTE),
    MUST_RECOMPUTE: ("clash", MUST_RECOMPUTE, MUST_RECOMPUTE, MUST_RECOMPUTE, MUST_RECOMPUTE),
    None: ANSWERS,
}


BOTH = {
    MUST_SAVE: (MUST_SAVE, PREFER_SAVE, PREFER_RECOMPUTE, "clash", None),
    PREFER_SAVE: (PREFER_SAVE, PREFER_SAVE, PREFER_RECOMPUTE, MUST_RECOMPUTE, None),
    PREFER_RECOMPUTE: (PREFER_RECOMPUTE, PREFER_RECOMPUTE, PREFER_RECOMPUTE, MUST_RECOMPUTE, None),
    MUST_RECOMPUTE: ("clash", MUST_RECOMPUTE, MUST_RECOMPUTE, MUST_RECOMPUTE, None),
    None: (None,) * 5,
}


@pytest.mark.parametrize(
    ("combine", "table"), [(Policy.__or__, EITHER), (Policy.__and__, BOTH)], ids=["either", "both"]
)
def test_combine_two_answers(
    combine: Callable[[Policy, Policy], Policy], table: dict[Any, tuple[Any, ...]]
) -> None:
    """``|`` and ``&`` combine two answers by their truth tables."""
    for a in ANSWERS:
        for b, expected in zip(ANSWERS, table[a], strict=True):
            made = combine(fixed(a), fixed(b))
            if expected == "clash":
                with pytest.raises(fxckpt.PolicyConflict):
                    decided(made)
            else:
                assert decided(made) is expected, (a, b)


def test_first_match_and_negation() -> None:
    """The first answer decides in first_match, and ``~`` inverts each answer."""
    assert [
        decided(first_match(fixed(None), fixed(a), fixed(MUST_SAVE))) for a in ANSWERS[:4]
    ] == list(ANSWERS[:4])
    assert [decided(~fixed(a)) for a in ANSWERS] == [
        MUST_RECOMPUTE,
        PREFER_RECOMPUTE,
        PREFER_SAVE,
        MUST_SAVE,
        None,
    ]


def test_policies_are_values() -> None:
    """Policies compare, hash, print and pickle by value."""
    for policy, _ in EXPECTED.values():
        if isinstance(policy, Policy):
            assert pickle.loads(pickle.dumps(policy)) == policy
            assert hash(policy) == hash(pickle.loads(pickle.dumps(policy)))
            assert "object at" not in repr(policy)
    assert save("a") == save("a") != recompute("a")
    assert (
        repr(first_match(save("a") | save_matmuls, ~sqrt_n))
        == "first_match((save('a') | save_matmuls), ~sqrt_n)"
    )


def test_policy_sees_each_forward_value_once() -> None:
    """A policy is asked once per forward value, in order, with all its facts."""
    asked: list[Value] = []

    class Listening(Policy):
        def decide(self, value: Value) -> None:
            asked.append(value)

    model, inputs = net()
    fxckpt.plan(model, *inputs, policy=Listening())
    assert [value.position for value in asked] == list(range(len(asked)))
    assert [str(value.op) for value in asked].count("aten.sin.default") == 2
    assert not any("cos" in str(value.op) for value in asked)
    tanh = [value for value in asked if value.op is aten.tanh.default]
    assert [(v.occurrence, v.module, v.shape, v.dtype, v.bytes) for v in tanh] == [
        (i, f"layers.{i}", (2, 8, 2 * WIDTH), torch.float32, 2 * 8 * 2 * WIDTH * 4)
        for i in range(2)
    ]
    assert all(
        v.source.startswith("nets.py:") and v.args[0].shape == v.shape and v.output.shape == v.shape
        for v in tanh
    )
    attention = [value for value in asked if "attn_out" in value.names]
    assert [v.module for v in attention] == ["layers.0.attn", "layers.1.attn"]
    products = [value for value in asked if value.op is aten.addmm.default]
    assert products[0].flops == 2 * 16 * WIDTH * WIDTH
    assert [asked[i].node for i in tanh[0].reads] == ["addmm_1"]


def test_conflict_names_policies_value_and_module() -> None:
    """A conflict names both policies, the value and its module."""
    model, inputs = net()
    policy = save("layers.*.attn") | recompute("layers.0")
    with pytest.raises(fxckpt.PolicyConflict) as info:
        fxckpt.plan(model, *inputs, policy=policy)
    text = str(info.value)
    for part in (
        "save('layers.*.attn')",
        "recompute('layers.0')",
        "addmm (aten.addmm.default, float32[16, 16])",
        "'layers.0.attn.qkv'",
    ):
        assert part in text
    first = fxckpt.plan(
        model, *inputs, policy=first_match(save("layers.*.attn"), recompute("layers.0"))
    )
    assert "addmm" in first.saved


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: as_policy(3), "policy=3 is not a policy"),
        (lambda: as_policy("layers.*"), r"save\('layers.\*'\)"),
        (lambda: as_policy(aten.mm.default), r"save_ops\(torch.ops.aten.mm.default\)"),
        (lambda: as_policy([]), "is not a policy"),
        (lambda: as_policy(every), r"call it, as in policy=every\(2\)"),
        (lambda: save_all | save, r"call it, as in policy=save\('layers.\*.attn'\)"),
        (lambda: save_all | 3, "policy=3 is not a policy"),
        (lambda: save_all & None, "policy=None is not a policy"),
        (
            lambda: as_policy([aten.mm.default, 3]),
            "policy=3 is not a policy|To save what this op gives",
        ),
        (lambda: every(0), "a whole number from 1 up"),
        (lambda: save(), r"Example: save\('layers.\*.attn'\)"),
        (lambda: save_only(3), "give one or more texts"),
        (lambda: save_ops("mm"), "'mm' is not an op"),
        (lambda: save_ops(), "at least one op"),
        (lambda: first_match(), "at least one policy"),
        (lambda: sqrt_n.decide(Value(aten.mm.default)), r"call bind\(values\) first"),
        (
            lambda: fxckpt.rewrite(Net(), lambda *_: 3, example_inputs=(torch.randn(2, 8, WIDTH),)),
            "the policy returned 3",
        ),
        (
            lambda: fxckpt.rewrite(Net(), tanh_alone, example_inputs=(torch.randn(2, 8, WIDTH),)),
            "no other policy to decide",
        ),
    ],
)
def test_invalid_policies_are_refused(make: Callable[[], object], says: str) -> None:
    """An invalid policy or argument raises InvalidOption and names the mistake."""
    with pytest.raises(fxckpt.InvalidOption, match=says):
        make()
