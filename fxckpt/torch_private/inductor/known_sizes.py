"""Sizes that became numbers after they were traced as symbols, written as numbers."""

from __future__ import annotations

import torch
from torch import fx


def write_known_sizes(gm: fx.GraphModule) -> None:
    """Replace sizes of a half that are numbers by now, for the ops and sizes that take them.

    A lowering may find that a symbol has one value. Inductor then computes with the number where
    the graph has the symbol, and its code for a quotient of floats knows none.
    """
    numbers = {node: number for node in gm.graph.nodes if (number := _number(node)) is not None}
    if not numbers:
        return
    for node in gm.graph.nodes:
        if node.op != "output":
            node.args, node.kwargs = fx.map_arg(
                (node.args, node.kwargs), lambda arg: numbers.get(arg, arg)
            )
    for node in reversed(numbers):
        if node.op == "call_function" and not node.users:
            gm.graph.erase_node(node)
    gm.recompile()


def _number(node: fx.Node) -> int | float | None:
    """Return the number that a symbolic size is by now, if it is one."""
    value = node.meta.get("val")
    if not isinstance(value, (torch.SymInt, torch.SymFloat)) or not value.node.expr.is_number:
        return None
    kind = int if isinstance(value, torch.SymInt) else float
    return kind(value.node.expr)
