"""Used rows: those rows of a region that any value outside of it depends on.

A loss that leaves out the last position of each sequence slices the logits: those of that position
are computed, stored beside the others, and given a gradient of zeros. If nothing else reads them,
the region needs the rows of the slice alone: what its backward computes of the others is zero.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import fx

from fxckpt.passes.tiles.linear_ops import is_linear
from fxckpt.passes.tiles.row_rules import Place, Rows

aten = torch.ops.aten

Places = Mapping[fx.Node, Place | tuple[Place, ...]]
"""Where the rows of values lie."""


def used_rows(members: Sequence[fx.Node], places: Places, length: int) -> tuple[int, int]:
    """Return the first and the last used row of a region, the last one excluded.

    ``members`` are its ops in the order of the graph.
    """
    kept = [
        rows
        for node in members
        if node.target is aten.slice.Tensor and isinstance(rows := places[node], Rows)
    ]
    if not kept:
        return 0, length
    used = min(rows.start for rows in kept), max(rows.start + rows.length for rows in kept)
    return used if _are_others_unused(members, places, used) else (0, length)


def _are_others_unused(members: Sequence[fx.Node], places: Places, used: tuple[int, int]) -> bool:
    """Return whether all other rows are read by the region alone, or zero where they are not."""

    def has_others(node: fx.Node) -> bool:
        rows = places.get(node)
        return isinstance(rows, Rows) and (
            rows.start < used[0] or rows.start + rows.length > used[1]
        )

    zero: set[fx.Node] = set()
    inside = set(members)
    for node in members:
        reads_others = any(map(has_others, node.all_input_nodes))
        if not reads_others and not has_others(node):
            continue
        is_padded = node.target is aten.slice_backward.default and not reads_others
        reads_zero = not zero.isdisjoint(node.all_input_nodes)
        if is_padded or (reads_zero and is_linear(node, zero)):
            zero.add(node)
        elif not isinstance(places[node], Rows) or (
            has_others(node) and not inside.issuperset(node.users)
        ):
            return False
    return True
