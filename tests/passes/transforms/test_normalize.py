"""Normalize: names become metadata, equal calls merge, dead code goes, items follow their op."""

from __future__ import annotations

from collections.abc import Callable

import torch
from expecttest import assert_expected_inline
from torch import Tensor
from torch.nn import functional as F

import fxckpt
from fxckpt.passes.meta import NAME
from fxckpt.passes.transforms.normalize import (
    eliminate_dead_code,
    merge_common_subexpressions,
    raise_getitems,
    take_names,
)
from fxckpt.torch_private import storage_id
from tests.joints import normalize
from tests.passes.graphs import text_of, traced


def calls(f: Callable[..., object], *inputs: Tensor) -> list[str]:
    """The ops that normalizing leaves of the trace of ``f``."""
    joint = traced(f, *inputs)
    normalize(joint)
    return [str(n.target) for n in joint.graph.nodes if n.op == "call_function"]


def example(x: Tensor) -> Tensor:
    y = x.sin()
    y.exp()
    largest, others = x.topk(2)
    product = y * x.sin()
    return product[others] + largest


def test_normalizes_an_example() -> None:
    """The second ``sin`` is the first, ``exp`` is gone, and items stand behind ``topk``."""
    joint = traced(example, torch.ones(3))
    items = [node for node in joint.graph.nodes if node.name.startswith("getitem")]
    joint.graph.output_node().prepend(items[0])
    joint.graph.find_nodes(op="call_function", target=torch.ops.aten.index.Tensor)[0].prepend(
        items[1]
    )
    joint.graph.find_nodes(op="call_function", target=torch.ops.aten.add.Tensor)[0].prepend(
        items[0]
    )
    eliminate_dead_code(joint.graph)
    merge_common_subexpressions(joint.graph)
    raise_getitems(joint.graph)
    joint.graph.lint()
    assert_expected_inline(
        text_of(joint.graph),
        """\
x_1: input
sin = sin(x_1)
topk = topk(x_1, 2)
getitem = getitem(topk, 0)
getitem_1 = getitem(topk, 1)
mul = mul(sin, sin)
index = index(mul, [getitem_1])
add = add(index, getitem)
return add""",
    )


def test_name_moves_to_its_op() -> None:
    """A name of a view names the op that fills its storage, and the call of ``name`` is gone."""
    joint = traced(lambda x: fxckpt.name(x.sin().view(2, 2), "hidden").exp(), torch.ones(4))
    take_names(joint.graph)
    joint.graph.lint()
    assert {n.name: n.meta[NAME] for n in joint.graph.nodes if NAME in n.meta} == {
        "sin": ("hidden",)
    }
    assert_expected_inline(
        text_of(joint.graph),
        """\
x_1: input
sin = sin(x_1)
view = view(sin, [2, 2])
exp = exp(view)
return exp""",
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
