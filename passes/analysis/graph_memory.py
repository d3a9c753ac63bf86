"""Graph memory: liveness of emitted graphs, read from their nodes alone.

It checks the simulator. The simulator predicts from a :class:`~fxckpt.solver.program.Program`; this
reads the emitted forward and backward in the order in which generated code runs them. A variable
dies after its last use, and a storage with its last variable. The result of an op that writes an
argument and returns it is in the storage of that argument.

Expects graphs with ``meta["val"]``. Leaves them alone.
"""

from __future__ import annotations

import operator
from collections import Counter

from torch import fx

from fxckpt.ops.properties import tensors, written_argument
from fxckpt.passes.analysis.byte_counts import gradient_bytes, replay_bytes, storage_bytes
from fxckpt.passes.analysis.placement import is_held_by_caller, tangents_of
from fxckpt.passes.meta import AWAY
from fxckpt.torch_private import storage_id

Allocation = tuple[int, fx.Node]
"""Storage id and the node that fills it: a copy of a node has the storage id of the original."""


def memory_profile(
    graph: fx.Graph, *, start: int, free: frozenset[str], held: frozenset[str]
) -> tuple[list[int], int]:
    """Return the live bytes at every op that allocates, and those at the return of the graph.

    All counts begin at ``start``. Storages of nodes in ``free`` do not count; placeholders in
    ``held`` live to the end.
    """
    deaths = _deaths(graph, held)
    tangents = frozenset(tangents_of(graph))
    holds: dict[fx.Node, dict[int, Allocation]] = {}
    live = _LiveAllocations(start)
    profile: list[int] = []
    for node in graph.nodes:
        if node.op == "output":
            break
        before = live.bytes
        is_counted = node.op != "get_attr" and node.name not in free and AWAY not in node.meta
        known = {sid: a for arg in node.all_input_nodes for sid, a in holds[arg].items()}
        written = written_argument(node)
        bytes_of = gradient_bytes if node in tangents else storage_bytes
        sizes: dict[Allocation, int] = {}
        holds[node] = {}
        for tensor in tensors(node.meta.get("val")):
            sid = storage_id(tensor)
            size = bytes_of(tensor) if is_counted else 0
            if written is not None:
                (holds[node][sid],) = holds[written].values()
            else:
                holds[node].setdefault(sid, known.get(sid, (sid, node)))
            sizes.setdefault(holds[node][sid], size)
        for allocation, size in sizes.items():
            live.hold(allocation, size)
        workspace = replay_bytes(node)
        if node.op == "call_function" and (live.bytes != before or workspace):
            profile.append(live.bytes + workspace)
        for variable in deaths.get(node, ()):
            for allocation in set(holds[variable].values()):
                live.release(allocation)
    return profile, live.bytes


def _deaths(graph: fx.Graph, held: frozenset[str]) -> dict[fx.Node, list[fx.Node]]:
    """Return the variables that die with each node: at their last use, or unused where they begin.

    Placeholders in ``held`` never die.
    """
    last_use = {node: node for node in graph.nodes}
    for node in graph.nodes:
        for arg in node.all_input_nodes:
            last_use[arg] = node
    deaths: dict[fx.Node, list[fx.Node]] = {}
    for variable, at in last_use.items():
        if variable.op != "placeholder" or variable.name not in held:
            deaths.setdefault(at, []).append(variable)
    return deaths


class _LiveAllocations:
    """Bytes of the allocations that some variable holds."""

    def __init__(self, start: int) -> None:
        self.bytes = start
        self._size: dict[Allocation, int] = {}
        self._variables: Counter[Allocation] = Counter()

    def hold(self, allocation: Allocation, size: int) -> None:
        """Let one more variable hold an allocation; the first one allocates it."""
        if allocation not in self._size:
            self._size[allocation] = size
            self.bytes += size
        self._variables[allocation] += 1

    def release(self, allocation: Allocation) -> None:
        """Let one variable die; the last one frees the allocation."""
        self._variables[allocation] -= 1
        if self._variables[allocation] == 0:
            self.bytes -= self._size[allocation]


def inner_bytes(node: fx.Node) -> int:
    """Return the bytes that the subgraphs of a higher-order op need beyond the op's own outputs."""
    module = node.graph.owning_module
    bodies = [
        operator.attrgetter(str(arg.target))(module)
        for arg in node.all_input_nodes
        if arg.op == "get_attr" and module is not None
    ]
    peaks = [_body_peak(body) for body in bodies if isinstance(body, fx.GraphModule)]
    if not peaks:
        return 0
    outputs = {storage_id(t): storage_bytes(t) for t in tensors(node.meta.get("val"))}
    return max(0, max(peaks) - sum(outputs.values()))


def _body_peak(body: fx.GraphModule) -> int:
    inputs = frozenset(n.name for n in body.graph.find_nodes(op="placeholder"))
    profile, _ = memory_profile(body.graph, start=0, free=inputs, held=frozenset())
    return max(profile, default=0)


def emitted_peak(
    forward: fx.GraphModule,
    backward: fx.GraphModule,
    *,
    num_fwd_outputs: int,
    uncounted: frozenset[str] = frozenset(),
) -> int:
    """Return the peak bytes of a step, ``forward`` then ``backward``.

    The user holds the forward's outputs throughout. Storages of the backward's nodes in
    ``uncounted`` do not count.
    """
    primals = frozenset(n.name for n in forward.graph.find_nodes(op="placeholder"))
    first, _ = memory_profile(forward.graph, start=0, free=primals, held=frozenset())
    (output,) = forward.graph.find_nodes(op="output")
    owned: dict[int, int] = {}
    free_ids = {
        storage_id(t)
        for n in forward.graph.find_nodes(op="placeholder")
        for t in tensors(n.meta.get("val"))
    }
    for node in output.args[0][:num_fwd_outputs]:
        if isinstance(node, fx.Node):
            owned.update({storage_id(t): storage_bytes(t) for t in tensors(node.meta.get("val"))})
    held = {sid: n for sid, n in owned.items() if sid not in free_ids}
    inputs = backward.graph.find_nodes(op="placeholder")
    tangents = frozenset(tangents_of(backward.graph))
    same = frozenset(
        n.name
        for n in inputs
        if n not in tangents
        and any(
            storage_id(t) in owned or storage_id(t) in free_ids for t in tensors(n.meta.get("val"))
        )
    )
    stays = frozenset(n.name for n in tangents if not n.users or is_held_by_caller(n))
    second, _ = memory_profile(
        backward.graph, start=sum(held.values()), free=primals | same | uncounted, held=stays
    )
    return max([*first, *second, 0])
