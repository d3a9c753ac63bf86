"""In place: write the result of an op into an operand that dies there.

:class:`~fxckpt.passes.analysis.storage_table.Writable` has the operands that allow it. In a half,
such an operand is written if an op of torch filled its storage there and no later op reads it:
never a saved value, which a second backward over a retained graph reads again, a value that is
returned, one that is sent away, whose last reader waits for its copy, or one that is fetched.

Expects a half that is run op by op, in its order. Leaves names and metadata alone: the value of a
node that writes in place is one of a storage of its own.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import fx

from fxckpt.ops.in_place import in_place_form
from fxckpt.ops.properties import is_mutating, tensors
from fxckpt.passes.analysis.placement import written_storages
from fxckpt.passes.analysis.storage_table import Writable, fills_apart
from fxckpt.passes.meta import RECOMPUTE_OF
from fxckpt.torch_private import is_symbolic, storage_id


def write_in_place(graph: fx.Graph, positions: Mapping[str, tuple[int, ...]]) -> None:
    """Write results of a half into operands that die.

    ``positions`` has the arguments that an op of the joint graph may write, by its name.
    """
    fillers = _fillers(graph)
    last_use = _last_uses(graph, fillers)
    own = {n for n in graph.nodes if n.op == "call_function" and fills_apart(n)}
    for node in graph.nodes:
        if node.op != "call_function":
            continue
        for position in positions.get(node.meta.get(RECOMPUTE_OF, node.name), ()):
            operand = node.args[position]
            held = fillers[operand].items()
            if all(filler in own and last_use[filler, sid] is node for sid, filler in held):
                _write_into(node, operand)
                break


def write_where_dead(graph: fx.Graph) -> None:
    """Write results of a graph that has no plan into operands that die, as in a half.

    Compiled autograd traces the backward of a plan into such a graph, without what it wrote so.
    """
    mutated = written_storages(node for node in graph.nodes if is_mutating(node))
    writable = Writable.of(graph, mutated)
    write_in_place(graph, {node.name: writable.operands(node) for node in graph.nodes})


def _fillers(graph: fx.Graph) -> dict[fx.Node, dict[int, fx.Node]]:
    """Return the nodes that filled the storages that each node holds, by storage id.

    A recomputed or fetched value has the storage id of the original.
    """
    fillers: dict[fx.Node, dict[int, fx.Node]] = {}
    for node in graph.nodes:
        known = {sid: f for arg in node.all_input_nodes for sid, f in fillers[arg].items()}
        fillers[node] = {
            sid: known.get(sid, node) for sid in map(storage_id, tensors(node.meta.get("val")))
        }
    return fillers


def _last_uses(
    graph: fx.Graph, fillers: Mapping[fx.Node, Mapping[int, fx.Node]]
) -> dict[tuple[fx.Node, int], fx.Node]:
    """Return the last node that reads each storage that a node filled.

    An op may fill several, of which one dies before the others. A size is not read from memory.
    """
    last: dict[tuple[fx.Node, int], fx.Node] = {}
    for node in graph.nodes:
        if not is_symbolic(node):
            for arg in node.all_input_nodes:
                last.update(((filler, sid), node) for sid, filler in fillers[arg].items())
    return last


def _write_into(node: fx.Node, operand: fx.Node) -> None:
    form = in_place_form(node.target)
    assert form is not None
    if form.out is not None:
        node.kwargs = {**node.kwargs, form.out: operand}
    node.target = form.target
