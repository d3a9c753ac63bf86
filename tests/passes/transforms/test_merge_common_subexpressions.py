"""Merge common subexpressions: equal calls of pure ops are one value."""

from __future__ import annotations

from collections.abc import Callable

import torch
from expecttest import assert_expected_inline
from torch import Tensor
from torch.nn import functional as F

import fxckpt
from fxckpt.passes.transforms.merge_common_subexpressions import merge_common_subexpressions
from fxckpt.torch_private import storage_id
from tests.joints import normalize
from tests.passes.graphs import text_of, traced


def calls(f: Callable[..., object], *inputs: Tensor) -> list[str]:
    """The ops that preparing leaves of the trace of ``f``."""
    joint = traced(f, *inputs)
    normalize(joint)
    return [str(n.target) for n in joint.graph.nodes if n.op == "call_function"]


def test_merges_an_example() -> None:
    """The second ``sin`` is the first; ``exp``, which nobody reads, is another pass's business."""

    def f(x: Tensor) -> Tensor:
        y = x.sin()
        y.exp()
        return y * x.sin()

    joint = traced(f, torch.ones(3))
    merge_common_subexpressions(joint.graph)
    joint.graph.lint()
    assert_expected_inline(
        text_of(joint.graph),
        """\
x_1: input
sin = sin(x_1)
exp = exp(sin)
mul = mul(sin, sin)
return mul""",
    )


def test_equal_calls_merge() -> None:
    """Two calls of a pure op on the same arguments are one value."""
    assert calls(lambda x: x.sin() + x.sin(), torch.ones(3)).count("aten.sin.default") == 1


def test_types_of_arguments_differ() -> None:
    """1, 1.0 and True are different arguments."""
    assert (
        calls(lambda x: (x + 1) * (x + 1.0) * (x + True), torch.ones(3)).count("aten.add.Tensor")
        == 3
    )


def test_random_ops_stay() -> None:
    """Two draws are two values."""
    ops = calls(lambda x: F.dropout(x) + F.dropout(x), torch.ones(3))
    assert sum("dropout" in op or "bernoulli" in op for op in ops) == 2


def test_merged_storages_are_shared() -> None:
    """Items and views of the second call lie in the storages of the first."""

    def f(x: Tensor) -> tuple[Tensor, ...]:
        return (
            x.topk(2).indices * 1,
            x.topk(2).values.view(4) * 1,
            x.sin() * 1,
            x.sin()[0].view(3) * 1,
        )

    joint = traced(f, torch.ones(2, 3))
    normalize(joint)
    for node in joint.graph.nodes:
        if str(node.target).startswith(("aten.view", "aten.select")):
            assert storage_id(node.meta["val"]) == storage_id(node.args[0].meta["val"]), node
        if "getitem" in node.name:
            parent, item = node.args
            assert storage_id(node.meta["val"]) == storage_id(parent.meta["val"][item])


def test_reads_around_a_write_stay() -> None:
    """A read before a write and one after it are two values."""

    def f(x: Tensor) -> Tensor:
        y = x.clone()
        before = y.sin()
        y.add_(1)
        return before + y.sin()

    assert calls(f, torch.ones(3)).count("aten.sin.default") == 2


def test_outputs_stay_apart() -> None:
    """An in-place op of the user on one output changes no other, and no saved value."""

    def f(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        y = x.sin()
        return x.sin(), x.sin(), (y * y).sum()

    x = torch.ones(3, requires_grad=True)
    a, b, loss = torch.compile(f, backend=fxckpt.Backend(inner="aot_eager"))(x)
    with torch.no_grad():
        a.mul_(2)
    assert torch.equal(b, x.sin())
    loss.backward()
    assert torch.equal(x.grad, 2 * x.detach().sin() * x.detach().cos())


def test_merges_equal_collectives() -> None:
    """Two equal gathers are one, with one wait; gathers over other groups stay apart."""

    def f(x: Tensor) -> Tensor:
        functional = torch.ops._c10d_functional
        one, two, other = (
            functional.wait_tensor(functional.all_gather_into_tensor(x, 2, group))
            for group in ("0", "0", "1")
        )
        return one.sin() + two.cos() + other

    names = calls(f, torch.ones(4))
    assert sum("all_gather" in name for name in names) == 2
    assert sum("wait_tensor" in name for name in names) == 2
