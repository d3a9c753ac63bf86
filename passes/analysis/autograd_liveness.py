"""Liveness under autograd: in eager mode a node of autograd's graph frees nothing before it ends.

The node has unpacked its saved tensors, and holds them and its incoming gradient until the last of
its ops is done; a compiled backward frees them op by op. So the last op of each node reads every
storage that the ops of the node read, except those they write before it.

Expects the facts of a joint graph whose backward nodes name their autograd node
(``meta["seq_nr"]``). Leaves the facts alone; the program it returns has more reads.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import groupby

from fxckpt.passes.analysis.joint import Facts
from fxckpt.solver.program import Op, Program


def held_by_nodes(facts: Facts) -> Program:
    """Return the program whose backward ops free operands at the end of their autograd node."""
    nodes = {node.name: node for node in facts.tangent_closure}

    def autograd_node(op: Op) -> int | str:
        node = nodes.get(op.name)
        number = None if node is None else node.meta.get("seq_nr")
        return op.name if number is None else int(number)

    backward: list[Op] = []
    for _, ops in groupby(facts.program.backward, key=autograd_node):
        *others, last = ops
        written = {storage for op in others for storage in op.writes}
        before = [
            storage for op in (*others, last) for storage in op.reads if storage not in written
        ]
        backward += [*others, replace(last, reads=tuple(dict.fromkeys((*last.reads, *before))))]
    return replace(facts.program, backward=tuple(backward))
