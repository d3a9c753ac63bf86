"""Hold Inductor's scheduler to the order of a planned backward."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from torch._inductor import custom_graph_pass

# torch 2.11 has one class for passes of graphs and of schedules.
_SchedulerPass: Any = getattr(
    custom_graph_pass, "CustomSchedulerPass", custom_graph_pass.CustomGraphPass
)


class KeepExecutionOrder(_SchedulerPass):  # type: ignore[misc]
    """Keeps what a backward runs again from running before its turn, and its own library calls in the order that was planned.

    Kernels that read the same parameters are fused wherever they stand, which would run the same layer's recomputations of many stages at once, with
    all their results alive. A kernel that runs something again is made to wait for the last of the backward's own kernels that come before it
    in the graph: a dependency for the order alone, which keeps nothing alive and costs nothing when the step runs. Library calls, which are not
    fused with each other, wait for the one before: a product put off keeps its operands, and Inductor puts it off where by its own
    estimate, which knows of no kernel that writes over what it reads, the peak is elsewhere.
    """

    def __init__(self, mark: str) -> None:
        self.mark = mark

    def __call__(self, nodes: list[Any]) -> list[Any]:
        """Add the dependencies to a list of scheduler nodes, and sort it by them."""
        from torch._inductor.dependencies import WeakDep
        from torch._inductor.scheduler import FusedSchedulerNode
        from torch._inductor.virtualized import V

        if any(isinstance(node, FusedSchedulerNode) for node in nodes):
            return nodes  # What is one kernel already has no single place.
        places = _places(nodes, self.mark)
        own = sorted(
            (order, i)
            for i, (order, again) in enumerate(places)
            if again is False and nodes[i].get_outputs()
        )
        if not own:
            return nodes

        def wait(node: Any, before: Any) -> None:
            node.add_fake_dep(
                WeakDep(
                    before.get_outputs()[0].get_name(),
                    mutating_buf=node.get_first_name(),
                    is_fake=True,
                )
            )

        for node, (order, again) in zip(nodes, places, strict=True):
            before = bisect_left(own, (order, -1)) if again else 0
            if before:
                wait(node, nodes[own[before - 1][1]])
        calls = [nodes[i] for _, i in own if nodes[i].is_extern()]
        for earlier, later in pairwise(calls):
            wait(later, earlier)
        scheduler = V.graph.scheduler
        scheduler.nodes = scheduler.topological_sort_schedule(nodes)
        scheduler.compute_ancestors()
        return list(scheduler.nodes)

    def uuid(self) -> str:
        """Return what tells this pass from others; where it applies follows from the graph."""
        return f"fxckpt keeps the order of {self.mark}"


def _places(nodes: Sequence[Any], mark: str) -> list[tuple[int, bool | None]]:
    """Return for each node, in an order that dependencies allow, its place and whether it runs something again; None for what has no mark.

    No node is placed before what it depends on, whatever its mark: what Inductor makes of several nodes has no mark of its own. Dependencies on
    what has an earlier place can so make no cycle.
    """
    found: list[tuple[int, bool | None]] = []
    at: dict[str, int] = {}
    for node in nodes:
        order, again = _place(node, mark) or (-1, None)
        order = max([order, *(at[dep.name] for dep in node.unmet_dependencies if dep.name in at)])
        at.update(dict.fromkeys(node.get_buffer_names(), order))
        found.append((order, again))
    return found


def _place(node: Any, mark: str) -> tuple[int, bool] | None:
    """Return the greatest mark among the graph's nodes that a scheduler node was made from; of equals the backward's own."""
    marks = [
        o.meta[mark]
        for n in node.get_nodes()
        if n.node is not None
        for o in n.node.get_origins()
        if mark in o.meta
    ]
    return max(marks, key=lambda m: (m[0], not m[1]), default=None)
