"""Policy values: the forward of a program as policies see it.

There is one :class:`~fxckpt.policies.base.Value` for every op that was traced in the forward, in
order. Views have none. Neither have ops of autograd's formulas (``cos`` for ``sin``), though they
read forward values only: an eager step computes them in the backward.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
from torch import fx

from fxckpt.ops.properties import tensors
from fxckpt.passes.analysis.graph_snapshot import module_path, source_line
from fxckpt.passes.analysis.joint import Facts
from fxckpt.passes.meta import NAME
from fxckpt.policies.base import Value
from fxckpt.solver.program import Side
from fxckpt.torch_private import is_pinned_to_backward, is_traced_in_backward, size_hint, storage_id


def values_of(facts: Facts) -> list[Value]:
    """Return the values of a program."""
    program = facts.program
    occurrences: Counter[Any] = Counter()
    values: list[Value] = []
    named_inputs = _named_inputs(facts)
    position: dict[int, int] = {}
    """Positions of values by the index of their op."""
    for index, op in enumerate(program.ops):
        node = facts.op_node[op.name]
        is_of_backward = is_traced_in_backward(node) or is_pinned_to_backward(node)
        if op.side is not Side.FORWARD and is_of_backward:
            continue
        position[index] = len(values)
        first = next(tensors(node.meta.get("val")), None)
        values.append(
            Value(
                op=node.target,
                module=module_path(node),
                names=node.meta.get(NAME, ()),
                shape=() if first is None else tuple(map(size_hint, first.shape)),
                dtype=None if first is None else first.dtype,
                bytes=sum(program.storages[s].bytes for s in op.writes),
                flops=op.flops,
                occurrence=occurrences[node.target],
                source=source_line(node),
                args=fx.map_arg(node.args, _fake_value),
                kwargs=fx.map_arg(node.kwargs, _fake_value),
                output=node.meta.get("val"),
                position=position[index],
                reads=tuple(
                    dict.fromkeys(
                        position[p] for s in op.reads if (p := program.producers[s]) in position
                    )
                ),
                input_names=tuple(
                    dict.fromkeys(
                        name
                        for arg in node.all_input_nodes
                        for t in tensors(arg.meta.get("val"))
                        for name in named_inputs.get(storage_id(t), ())
                    )
                ),
                node=op.name,
            )
        )
        occurrences[node.target] += 1
    return values


def _named_inputs(facts: Facts) -> dict[int, tuple[str, ...]]:
    """Return the user's names of the inputs of the graph, by storage id."""
    graph = next(iter(facts.op_node.values())).graph if facts.op_node else fx.Graph()
    inputs = graph.find_nodes(op="placeholder")
    return {
        storage_id(t): node.meta[NAME]
        for node in inputs
        if NAME in node.meta
        for t in tensors(node.meta.get("val"))
    }


def _fake_value(node: fx.Node) -> torch.Tensor | Any:
    return node.meta.get("val")
