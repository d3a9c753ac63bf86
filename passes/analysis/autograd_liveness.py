"""Eager: what autograd holds while one of its nodes runs, which a compiled backward frees op by op.

A node of autograd's graph has unpacked all that it saved, and holds its incoming gradient, until the last of its ops is done. So the last op of
each node reads what any of them read from before it.

Expects the facts of a joint graph whose backward nodes say which node of autograd they come from (``meta["seq_nr"]``). Leaves a program with more
reads.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import groupby

from fxckpt.passes.analysis.joint import Facts
from fxckpt.solver.program import Op, Program


def held_by_nodes(facts: Facts) -> Program:
    """Return the program with what autograd's nodes hold."""
    nodes = {node.name: node for node in facts.tangent_closure}

    def node_of(op: Op) -> int | str:
        node = nodes.get(op.name)
        number = None if node is None else node.meta.get("seq_nr")
        return op.name if number is None else int(number)

    backward: list[Op] = []
    for _, ops in groupby(facts.program.backward, key=node_of):
        *others, last = ops
        written = {storage for op in others for storage in op.writes}
        before = [
            storage for op in (*others, last) for storage in op.reads if storage not in written
        ]
        backward += [*others, replace(last, reads=tuple(dict.fromkeys((*last.reads, *before))))]
    return replace(facts.program, backward=tuple(backward))
