"""Dead operands: write results of a whole backward into them, as in the halves of a plan.

Compiled autograd traces the planned parts without what they wrote so. Expects and leaves what
:mod:`~fxckpt.passes.transforms.in_place` does.
"""

from __future__ import annotations

from torch import fx

from fxckpt.ops.in_place import in_place_form
from fxckpt.ops.properties import is_mutating
from fxckpt.passes.analysis.placement import written_storages
from fxckpt.passes.analysis.storage_table import Writable, held_storages
from fxckpt.passes.transforms.in_place import Deaths, write_into
from fxckpt.torch_private import OpOverload


def write_where_dead(graph: fx.Graph) -> None:
    """Write results of a graph that has no plan into operands that die; in place."""
    held = held_storages(graph)
    mutated = written_storages(node for node in graph.nodes if is_mutating(node))
    writable = Writable.of(graph, mutated, held)
    dies = Deaths.of(graph, held).dies
    for node in graph.nodes:
        form = in_place_form(node.target) if isinstance(node.target, OpOverload) else None
        for position in form.operands if form is not None else ():
            operand = node.args[position] if position < len(node.args) else None
            # Few operands die: that is asked first, as to compare geometries takes longer.
            if isinstance(operand, fx.Node) and dies(operand, node):
                if writable.allows(node, position):
                    write_into(node, operand)
                    break
