"""Order: marks of the nodes of a whole backward."""

from __future__ import annotations

from expecttest import assert_expected_inline
from torch import fx

from fxckpt.passes.meta import ORDER
from fxckpt.passes.whole_backward.mark_order import mark_whole_backward
from tests.passes.graphs import lines_of


def test_what_reads_no_gradient_recomputes() -> None:
    """An op that the incoming gradient does not reach has the number of the own one after it."""
    graph = fx.Graph()
    gradient, saved = graph.placeholder("gradient"), graph.placeholder("saved")
    again = graph.call_function(abs, (saved,), name="again")
    own = graph.call_function(max, (gradient, again), name="own")
    later = graph.call_function(abs, (again,), name="later")
    graph.output(graph.call_function(min, (own, later), name="last"))
    mark_whole_backward(graph)
    lines = [f"{node.meta.get(ORDER, '-')} {line}" for node, line in lines_of(graph)]
    assert_expected_inline(
        "\n".join(lines),
        """\
- gradient: input
- saved: input
(0, True) again = abs(saved)
(0, False) own = max(gradient, again)
(1, True) later = abs(again)
(1, False) last = min(own, later)
- return last""",
    )
