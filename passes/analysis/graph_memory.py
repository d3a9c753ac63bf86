"""Liveness of emitted graphs, read from their nodes alone: the check on the simulator.

The simulator predicts from a :class:`~fxckpt.passes.analysis.joint.Program`; this reads the forward and backward that were really emitted, variable
by variable, as generated code runs them: a variable dies after its last use, a storage with its last variable.
"""

from __future__ import annotations

import operator

from torch import fx

from fxckpt.ops.properties import tensors
from fxckpt.passes.analysis.byte_counts import replay_bytes, storage_bytes
from fxckpt.passes.analysis.placement import is_held_by_caller, tangents_of
from fxckpt.torch_private import storage_id

Instance = tuple[int, fx.Node]


def live_bytes(
    graph: fx.Graph, *, start: int, free: frozenset[str], held: frozenset[str]
) -> tuple[list[int], int]:
    """Return the live bytes at every op that allocates, and what is live when the graph returns.

    ``start`` is added to all. Storages made by nodes in ``free`` are not counted, placeholders in ``held`` stay to the end.
    """
    holds: dict[fx.Node, tuple[Instance, ...]] = {}
    size: dict[Instance, int] = {}
    variables: dict[Instance, int] = {}
    last_use: dict[fx.Node, fx.Node] = {}
    for node in graph.nodes:
        for arg in node.all_input_nodes:
            last_use[arg] = node
    dies: dict[fx.Node, list[fx.Node]] = {}
    for node, at in last_use.items():
        dies.setdefault(at, []).append(node)
    live, profile = start, []
    for node in graph.nodes:
        if node.op == "output":
            break
        before = live
        known = {i[0]: i for arg in node.all_input_nodes for i in holds[arg]}
        instances = []
        for tensor in tensors(node.meta.get("val")):
            sid = storage_id(tensor)
            instance = known.get(sid, (sid, node))
            if instance not in size:
                uncounted = node.op == "get_attr" or node.name in free
                size[instance] = 0 if uncounted else storage_bytes(tensor)
                variables[instance] = 0
                live += size[instance]
            instances.append(instance)
        holds[node] = tuple(dict.fromkeys(instances))
        for instance in holds[node]:
            variables[instance] += 1
        if node.op == "call_function":
            workspace = replay_bytes(node)
            if live != before or workspace:
                profile.append(live + workspace)
        gone = list(dies.get(node, ()))
        if node not in last_use:
            gone.append(node)
        for variable in gone:
            if variable.op == "placeholder" and variable.name in held:
                continue
            for instance in holds[variable]:
                variables[instance] -= 1
                if variables[instance] == 0:
                    live -= size[instance]
    return profile, live


def inner_bytes(node: fx.Node) -> int:
    """Return the bytes that the graphs inside a higher-order op (a branch of ``cond``, the body of a loop) need beyond the op's own outputs."""
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
    profile, _ = live_bytes(body.graph, start=0, free=inputs, held=frozenset())
    return max(profile, default=0)


def emitted_peak(
    forward: fx.GraphModule,
    backward: fx.GraphModule,
    *,
    num_fwd_outputs: int,
    uncounted: frozenset[str] = frozenset(),
) -> int:
    """Return the peak bytes of running ``forward``, then ``backward``, with the forward's outputs held by the user throughout.

    Storages made by the backward's nodes in ``uncounted`` are left out.
    """
    primals = frozenset(n.name for n in forward.graph.find_nodes(op="placeholder"))
    first, _ = live_bytes(forward.graph, start=0, free=primals, held=frozenset())
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
    same = frozenset(
        n.name
        for n in inputs
        if any(
            storage_id(t) in owned or storage_id(t) in free_ids for t in tensors(n.meta.get("val"))
        )
    )
    stays = frozenset(
        n.name for n in tangents_of(backward.graph) if not n.users or is_held_by_caller(n)
    )
    second, _ = live_bytes(
        backward.graph, start=sum(held.values()), free=primals | same | uncounted, held=stays
    )
    return max([*first, *second, 0])
