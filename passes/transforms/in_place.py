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
from dataclasses import dataclass

from torch import fx

from fxckpt.ops.in_place import in_place_form
from fxckpt.passes.analysis.storage_table import fills_apart, held_storages
from fxckpt.passes.meta import RECOMPUTE_OF
from fxckpt.torch_private import is_symbolic


def write_in_place(graph: fx.Graph, positions: Mapping[str, tuple[int, ...]]) -> None:
    """Write results of a half into operands that die.

    ``positions`` has the arguments that an op of the joint graph may write, by its name.
    """
    dies = Deaths.of(graph, held_storages(graph)).dies
    for node in graph.nodes:
        if node.op != "call_function":
            continue
        for position in positions.get(node.meta.get(RECOMPUTE_OF, node.name), ()):
            if dies(node.args[position], node):
                write_into(node, node.args[position])
                break


@dataclass(frozen=True)
class Deaths:
    """Where the storages of a graph are read for the last time."""

    fillers: Mapping[fx.Node, Mapping[int, fx.Node]]
    """Nodes that filled the storages that each node holds, by storage id."""
    last_use: Mapping[tuple[fx.Node, int], fx.Node]
    """Last node that reads each storage that a node filled."""
    own: frozenset[fx.Node]
    """Nodes whose op fills new storages, before any of them writes into an operand."""

    @classmethod
    def of(cls, graph: fx.Graph, held: Mapping[fx.Node, tuple[int, ...]]) -> Deaths:
        """Return those of a graph whose nodes have the storages ``held``.

        A recomputed or fetched value has the storage id of the original. An op may fill several
        storages, of which one dies before the others. A size is not read from memory.
        """
        fillers: dict[fx.Node, dict[int, fx.Node]] = {}
        last: dict[tuple[fx.Node, int], fx.Node] = {}
        for node in graph.nodes:
            known: dict[int, fx.Node] = {}
            reads = not is_symbolic(node)
            for arg in node.all_input_nodes:
                known.update(given := fillers[arg])
                if reads:
                    for sid, filler in given.items():
                        last[filler, sid] = node
            fillers[node] = {sid: known.get(sid, node) for sid in held[node]}
        own = {n for n in graph.nodes if n.op == "call_function" and fills_apart(n)}
        return cls(fillers, last, frozenset(own))

    def dies(self, operand: fx.Node, reader: fx.Node) -> bool:
        """Return whether the graph fills all storages of a value, and a node reads them last."""
        return all(
            filler in self.own and self.last_use[filler, sid] is reader
            for sid, filler in self.fillers[operand].items()
        )


def write_into(node: fx.Node, operand: fx.Node) -> None:
    """Turn an op into its in-place form, which writes into an operand."""
    form = in_place_form(node.target)
    assert form is not None
    if form.out is not None:
        node.kwargs = {**node.kwargs, form.out: operand}
    node.target = form.target
