"""Liveness in eager mode, where a region's recorder and autograd's nodes hold more than a graph.

The recorder holds the generator's state before each random op to the end of the forward, and the
results of calls that cannot run again; variables of the region's Python hold others. A node of
autograd's graph has unpacked its saved tensors, and holds them and its incoming gradient until the
last of its ops is done; a compiled backward frees them op by op. So the last op of each node reads
every storage that the ops of the node read, except those they write before it.

Expects the facts of a joint graph whose backward nodes name their autograd node
(``meta["seq_nr"]``), and whose held ops are marked (``HELD``, ``HELD_TO``, ``HAS_STATE``). Leaves
the facts alone; the programs that it returns have more reads, more states, and storages that are
held.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping
from dataclasses import replace
from itertools import groupby

import numpy as np
from torch import fx

from fxckpt.passes.analysis.byte_counts import rng_state_bytes
from fxckpt.passes.analysis.joint import Facts
from fxckpt.passes.meta import CALL, HAS_STATE, HELD, HELD_TO
from fxckpt.solver.program import FORWARD_ONLY, Op, Program, Storage


def held_by_region(facts: Facts) -> Program:
    """Return the program whose storages are live in the forward as long as they were recorded."""
    program = facts.program
    ops, storages = list(program.ops), list(program.storages)
    numbers = [call_of(facts.op_node[op.name]) for op in ops]
    calls = np.maximum.accumulate(numbers)
    last_op = {number: i for i, number in enumerate(numbers)}
    for i, op in enumerate(ops):
        node = facts.op_node[op.name]
        # Of a call that was traced as several ops, the last one returns the results.
        is_last = last_op[numbers[i]] == i
        results: Mapping[tuple[int, ...], tuple[int, int]]
        results = node.meta.get(HELD_TO, {}) if is_last else {}
        for s in op.writes:
            last, nbytes = results.get(_path(facts, storages[s].name), (-1, 0))
            held_to = int(np.searchsorted(calls, last, side="right")) - 1 if last >= 0 else -1
            held_to = len(ops) - 1 if HELD in node.meta else held_to
            # A trace does not know the size of what some kernels save for their backward.
            unknown = max(0, nbytes - storages[s].bytes)
            nbytes = storages[s].bytes + unknown
            storages[s] = replace(storages[s], held_to=held_to, bytes=nbytes)
            workspace = max(0, op.workspace_bytes - unknown)
            ops[i] = op = replace(op, workspace_bytes=workspace)
        if HAS_STATE not in node.meta:
            continue
        state = Storage(
            f"{op.name}.rng_state", rng_state_bytes(node), FORWARD_ONLY, held_to=len(ops) - 1
        )
        if op.rng_state is None:
            ops[i] = replace(op, rng_state=len(storages))
            storages.append(state)
        else:
            storages[op.rng_state] = state
    return replace(program, ops=tuple(ops), storages=tuple(storages))


def _path(facts: Facts, name: str) -> tuple[int, ...]:
    """Return the path of a storage's tensor in what its op returns."""
    owner = facts.owner.get(name)
    if owner is not None and owner.target is operator.getitem:
        return (owner.args[1],)  # type: ignore[return-value]
    return (int(name.split("#")[1]),) if "#" in name else ()


def call_of(node: fx.Node) -> int:
    """Return the number of the call that a node belongs to, or -1."""
    number = node.meta.get("custom", {}).get(CALL, -1)
    return number if isinstance(number, int) else -1


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
