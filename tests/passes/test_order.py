"""The order of an emitted backward: its marks, and its beginning."""

from __future__ import annotations

import operator

import pytest
from torch import fx

from fxckpt.passes.order import ORDER, beginning, mark_order
from fxckpt.passes.rematerialize import RECOMPUTE_OF


@pytest.fixture
def backward() -> fx.GraphModule:
    """Two stages: each runs something again and uses it."""
    graph = fx.Graph()
    saved, late, tangent = (graph.placeholder(name) for name in ("saved", "late", "tangents_1"))
    node = tangent
    for stage in range(2):
        again = graph.call_function(abs, (saved,), name=f"again_{stage}")
        again.meta[RECOMPUTE_OF] = "again"
        node = graph.call_function(max, (again, node), name=f"own_{stage}")
    graph.output((node, graph.call_function(min, (late, node), name="last")))
    marked = fx.GraphModule({}, graph)
    mark_order(marked)
    return marked


def test_a_mark_counts_the_own_nodes_before(backward: fx.GraphModule) -> None:
    marks = {node.name: node.meta[ORDER] for node in backward.graph.nodes if ORDER in node.meta}
    assert marks == {"again_0": (0, True), "own_0": (0, False), "again_1": (1, True), "own_1": (1, False), "last": (2, False)}


def test_the_beginning_returns_what_the_rest_reads(backward: fx.GraphModule) -> None:
    first, later = beginning(backward, "own_0")
    assert [node.name for node in first.graph.nodes] == ["saved", "late", "tangents_1", "again_0", "own_0", "output"]
    assert [arg.name for arg in first.graph.output_node().args[0]] == ["own_0"]
    assert later == {"saved", "late"}


@pytest.mark.parametrize("name", ["last", "output"])
def test_a_backward_without_a_rest_is_returned_as_it_is(backward: fx.GraphModule, name: str) -> None:
    assert beginning(backward, name) == (backward, frozenset())


def test_a_tuple_leaves_the_beginning_as_its_items() -> None:
    graph = fx.Graph()
    pair = graph.call_function(divmod, (graph.placeholder("tangents_1"), 2), name="pair")
    items = [graph.call_function(operator.getitem, (pair, i), name=f"item_{i}") for i in range(2)]
    graph.output((graph.call_function(max, tuple(items), name="last"),))
    marked = fx.GraphModule({}, graph)
    mark_order(marked)
    first, _ = beginning(marked, "pair")
    assert [arg.name for arg in first.graph.output_node().args[0]] == ["item_0", "item_1"]
