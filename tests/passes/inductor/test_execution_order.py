"""Execution order: marks of the nodes of an emitted backward."""

from __future__ import annotations

import pytest
from expecttest import assert_expected_inline
from torch import fx

from fxckpt.passes.inductor.execution_order import ORDER, mark_execution_order
from fxckpt.passes.transforms.rematerialize import RECOMPUTE_OF
from tests.passes.graphs import lines_of


@pytest.fixture
def backward() -> fx.GraphModule:
    """Two stages: each recomputes a value and reads it."""
    graph = fx.Graph()
    saved, late, tangent = (graph.placeholder(name) for name in ("saved", "late", "tangents_1"))
    node = tangent
    for stage in range(2):
        again = graph.call_function(abs, (saved,), name=f"again_{stage}")
        again.meta[RECOMPUTE_OF] = "again"
        node = graph.call_function(max, (again, node), name=f"own_{stage}")
    graph.output((node, graph.call_function(min, (late, node), name="last")))
    marked = fx.GraphModule({}, graph)
    mark_execution_order(marked.graph)
    return marked


def test_mark_counts_own_nodes_before(backward: fx.GraphModule) -> None:
    """A recomputation has the number of the own node that it precedes."""
    marks = {node.name: node.meta[ORDER] for node in backward.graph.nodes if ORDER in node.meta}
    assert marks == {
        "again_0": (0, True),
        "own_0": (0, False),
        "again_1": (1, True),
        "own_1": (1, False),
        "last": (2, False),
    }


def test_graph_of_two_stages(backward: fx.GraphModule) -> None:
    """Each recomputation stands in front of its reader, under the number of that reader."""
    lines = [f"{node.meta.get(ORDER, '-')} {line}" for node, line in lines_of(backward.graph)]
    assert_expected_inline(
        "\n".join(lines),
        """\
- saved: input
- late: input
- tangents_1: input
(0, True) again_0 = abs(saved)
(0, False) own_0 = max(again_0, tangents_1)
(1, True) again_1 = abs(saved)
(1, False) own_1 = max(again_1, own_0)
(2, False) last = min(late, own_1)
- return [own_1, last]""",
    )
