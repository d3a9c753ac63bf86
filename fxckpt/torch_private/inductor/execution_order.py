"""Scheduler pass that holds Inductor to the execution order of a planned half."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any

from torch import fx
from torch._inductor import custom_graph_pass

# torch 2.11 has one class for passes of graphs and of schedules.
_SchedulerPass: Any = getattr(
    custom_graph_pass, "CustomSchedulerPass", custom_graph_pass.CustomGraphPass
)


class KeepExecutionOrder(_SchedulerPass):  # type: ignore[misc]
    """Keeps recomputations from running early, and a half's own extern kernels in order.

    Inductor fuses kernels that read the same inputs, wherever they are. It would so recompute one
    layer for several stages at once, with all results alive. Here, a kernel that recomputes depends
    on the last of the half's own kernels before it in the graph; the dependency orders the two,
    keeps nothing alive and costs nothing at run time. An extern kernel, which is never fused with
    another, depends on the one before it: a delayed product keeps its operands alive, and Inductor
    delays it if the peak is elsewhere by its estimate, which ignores kernels that overwrite inputs.
    A kernel with the mark ``last`` depends on all other readers of its operands.
    """

    def __init__(self, mark: str, graph: str = "a half", last: str = "") -> None:
        self.mark, self.graph, self.last = mark, graph, last

    def __call__(self, nodes: list[Any]) -> list[Any]:
        """Add the dependencies to a list of scheduler nodes, and sort it by them."""
        from torch._inductor.scheduler import FusedSchedulerNode
        from torch._inductor.virtualized import V

        if any(isinstance(node, FusedSchedulerNode) for node in nodes):
            return nodes  # A fused kernel has no single position.
        scheduler = V.graph.scheduler
        for node in nodes:
            if self._is_last(node):
                for reader in _other_readers(node, scheduler.name_to_buf):
                    # Of two that are last, neither can wait for the other.
                    if not self._is_last(reader):
                        _wait(node, reader)
        nodes = scheduler.topological_sort_schedule(nodes)
        places = _places(nodes, self.mark)
        own = sorted(
            (order, i)
            for i, (order, is_recompute) in enumerate(places)
            if is_recompute is False and nodes[i].get_outputs()
        )
        if not own:
            return nodes

        for node, (order, is_recompute) in zip(nodes, places, strict=True):
            before = bisect_left(own, (order, -1)) if is_recompute else 0
            if before:
                _wait(node, nodes[own[before - 1][1]])
        calls = [nodes[i] for _, i in own if nodes[i].is_extern()]
        for earlier, later in pairwise(calls):
            _wait(later, earlier)
        scheduler.nodes = scheduler.topological_sort_schedule(nodes)
        scheduler.compute_ancestors()
        return list(scheduler.nodes)

    def _is_last(self, node: Any) -> bool:
        return any(self.last in origin.meta for origin in _origins(node))

    def uuid(self) -> str:
        """Return the identity of this pass and its code.

        A half alone determines its compile. What else does is a part of the name ``graph``.
        """
        code = custom_graph_pass.get_hash_for_files((__file__,)).hex()
        return f"fxckpt keeps the order of {self.mark} in {self.graph} by {code}"


def _other_readers(node: Any, buffers: Mapping[str, Any]) -> list[Any]:
    """Return the readers of a scheduler node's operands that do not depend on the node."""
    from torch._inductor.scheduler import OutputNode

    users = (
        user.node
        for dep in node.read_writes.reads
        if dep.name in buffers
        for user in buffers[dep.name].users
        if not user.is_weak
    )
    found = {
        user.get_name(): user
        for user in users
        if not isinstance(user, OutputNode)
        and user is not node
        and node.get_name() not in user.ancestors
        and user.get_outputs()
    }
    return list(found.values())


def _origins(node: Any) -> Iterator[fx.Node]:
    """Yield the graph's nodes that a scheduler node computes."""
    for each in node.get_nodes():
        if each.node is not None:
            yield from each.node.get_origins()


def _wait(node: Any, before: Any) -> None:
    """Make a scheduler node run after another one.

    Inductor moves a node of an eager island between CUDA graphs to the end if no buffer of it has
    another reader, and looks for readers only, not for dependencies. A weak user stops it, and
    costs nothing where none could overwrite the buffer: it is returned, or nothing reads it.
    """
    from torch._inductor.dependencies import WeakDep
    from torch._inductor.scheduler import NodeUser, OutputNode

    buffer = before.get_outputs()[0]
    node.add_fake_dep(WeakDep(buffer.get_name(), mutating_buf=node.get_first_name(), is_fake=True))
    if all(user.is_weak or isinstance(user.node, OutputNode) for user in buffer.users):
        buffer.set_users([*buffer.users, NodeUser(node, is_weak=True)])


def _places(nodes: Sequence[Any], mark: str) -> list[tuple[int, bool | None]]:
    """Return, for each node in topological order, its position and whether it recomputes.

    The latter is None for a node without a mark. No node precedes its dependencies, whatever its
    mark, as nodes that Inductor merged have no mark of their own; so a dependency on a node of an
    earlier position makes no cycle.
    """
    found: list[tuple[int, bool | None]] = []
    at: dict[str, int] = {}
    for node in nodes:
        order, is_recompute = _place(node, mark) or (-1, None)
        order = max([order, *(at[dep.name] for dep in node.unmet_dependencies if dep.name in at)])
        at.update(dict.fromkeys(node.get_buffer_names(), order))
        found.append((order, is_recompute))
    return found


def _place(node: Any, mark: str) -> tuple[int, bool] | None:
    """Return the greatest mark among a scheduler node's origins; of equals the backward's own."""
    marks = [origin.meta[mark] for origin in _origins(node) if mark in origin.meta]
    return max(marks, key=lambda m: (m[0], not m[1]), default=None)
