"""Raise getitems: items of a tuple follow its op at once."""

from __future__ import annotations

import torch
from expecttest import assert_expected_inline
from torch import Tensor

from fxckpt.passes.transforms.raise_getitems import raise_getitems
from tests.passes.graphs import text_of, traced


def example(x: Tensor) -> Tensor:
    largest, others = x.topk(2)
    return x.sin()[others] + largest


def test_items_follow_their_op() -> None:
    """Items that are taken late stand behind ``topk`` afterwards, in their order."""
    joint = traced(example, torch.ones(3))
    index, add = (n for n in joint.graph.nodes if n.name in ("index", "add"))
    first, second = (n for n in joint.graph.nodes if n.name.startswith("getitem"))
    index.prepend(second)
    add.prepend(first)
    raise_getitems(joint.graph)
    joint.graph.lint()
    assert_expected_inline(
        text_of(joint.graph),
        """\
x_1: input
topk = topk(x_1, 2)
getitem = getitem(topk, 0)
getitem_1 = getitem(topk, 1)
sin = sin(x_1)
index = index(sin, [getitem_1])
add = add(index, getitem)
return add""",
    )
