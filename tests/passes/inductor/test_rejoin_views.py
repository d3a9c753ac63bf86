"""Rejoin views: a view of a copy that was removed is in the storage of the copy's source."""

from __future__ import annotations

import torch
from expecttest import assert_expected_inline
from torch import Tensor, fx

from fxckpt.passes.inductor.rejoin_views import rejoin_views
from tests.passes.graphs import storages_of, text_of, traced

clone = torch.ops.aten.clone.default


def without_copies(graph: fx.Graph) -> fx.Graph:
    """Remove the copies of a graph, as Inductor does, and leave the fake values."""
    for node in graph.find_nodes(op="call_function", target=clone):
        node.replace_all_uses_with(node.args[0])
        graph.erase_node(node)
    return graph


def test_storages_of_an_example() -> None:
    """Views of a removed copy, and views of these, begin where they do in its source."""

    def f(x: Tensor) -> Tensor:
        rows = (x * 2)[1:].clone().view(4, 2)
        return rows[1].view(torch.int32).bitwise_not() + rows.split(1)[1].sum()

    graph = without_copies(traced(f, torch.rand(3, 4)).graph)
    before = text_of(graph)
    rejoin_views(graph)
    assert text_of(graph) == before
    assert_expected_inline(
        storages_of(graph),
        """\
x_1: input: 48 B from 0
mul = mul(x_1, 2): 48 B from 0
slice_1 = slice(mul, 0, 1, 9223372036854775807): 48 B from 4
view = view(slice_1, [4, 2]): 48 B from 4
select = select(view, 0, 1): 48 B from 6
view_1 = view(select, torch.int32): 48 B from 6
detach = detach(view_1): 48 B from 6
bitwise_not = bitwise_not(detach): 8 B from 0
getitem = getitem(split, 0): 48 B from 4
getitem_1 = getitem(split, 1): 48 B from 6
getitem_2 = getitem(split, 2): 48 B from 8
getitem_3 = getitem(split, 3): 48 B from 10
sum_1 = sum(getitem_1): 4 B from 0
add = add(bitwise_not, sum_1): 8 B from 0""",
    )


def test_values_that_lie_together_stay() -> None:
    """Without a removed copy nothing moves; a real copy keeps a storage of its own."""

    def f(x: Tensor) -> Tensor:
        return (x * 2).clone().view(2, 6)[1].cos()

    graph = traced(f, torch.rand(3, 4)).graph
    before = [node.meta.get("val") for node in graph.nodes]
    rejoin_views(graph)
    assert all(node.meta.get("val") is val for node, val in zip(graph.nodes, before, strict=True))
