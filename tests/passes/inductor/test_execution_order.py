"""The order of an emitted backward: its marks."""

from __future__ import annotations

import pytest
from torch import fx

from fxckpt.passes.inductor.execution_order import ORDER, mark_execution_order
from fxckpt.passes.transforms.rematerialize import RECOMPUTE_OF


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
    mark_execution_order(marked)
    return marked


def test_a_mark_counts_the_own_nodes_before(backward: fx.GraphModule) -> None:
    marks = {node.name: node.meta[ORDER] for node in backward.graph.nodes if ORDER in node.meta}
    assert marks == {
        "again_0": (0, True),
        "own_0": (0, False),
        "again_1": (1, True),
        "own_1": (1, False),
        "last": (2, False),
    }
