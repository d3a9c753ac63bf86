"""Used rows: those rows of a region that any value outside of it depends on.

A loss that leaves out the last position of each sequence slices the logits: those of that position
are computed, stored beside the others, and given a gradient of zeros. If nothing else reads them,
the region needs the rows of the slice alone: what its backward computes of the others is zero.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import fx

from fxckpt.passes.tiles.linear_ops import is_linear, is_zero
from fxckpt.passes.tiles.row_rules import Place, Rows
from fxckpt.torch_private import Size, is_surely_at_most, is_surely_equal, plain_size

aten = torch.ops.aten

Places = Mapping[fx.Node, Place | tuple[Place, ...]]
"""Where the rows of values lie."""


def used_rows(members: Sequence[fx.Node], places: Places, length: Size) -> tuple[Size, Size]:
    """Return the first and the last used row of a region, the last one excluded.

    ``members`` are its ops in the order of the graph.
    """
    kept = [
        rows
        for node in members
        if node.target is aten.slice.Tensor
        and isinstance(rows := places[node], Rows)
        and not _keeps_all(node)
    ]
    if not kept:
        return 0, length
    used = _spanned(kept)
    return used if used and _are_others_unused(members, places, used) else (0, length)


def _keeps_all(node: fx.Node) -> bool:
    """Return whether a slice leaves out nothing, as one of sizes that vary may."""
    whole, part = node.all_input_nodes[0].meta["val"], node.meta["val"]
    return all(map(is_surely_equal, whole.shape, part.shape))


def _spanned(parts: Sequence[Rows]) -> tuple[Size, Size] | None:
    """Return the least and the greatest row of some, or None where sizes that vary hide them."""
    starts = [rows.start for rows in parts]
    ends = [plain_size(rows.start + rows.length) for rows in parts]
    first = (n for n in starts if all(is_surely_at_most(n, other) for other in starts))
    last = (n for n in ends if all(is_surely_at_most(other, n) for other in ends))
    found = next(first, None), next(last, None)
    return None if found[0] is None or found[1] is None else (found[0], found[1])


def _are_others_unused(members: Sequence[fx.Node], places: Places, used: tuple[Size, Size]) -> bool:
    """Return whether all other rows are read by the region alone, or zero where they are not."""

    def has_others(node: fx.Node) -> bool:
        rows = places.get(node)
        return isinstance(rows, Rows) and not (
            is_surely_at_most(used[0], rows.start)
            and is_surely_at_most(plain_size(rows.start + rows.length), used[1])
        )

    zero: set[fx.Node] = set()
    inside = set(members)
    for node in members:
        padded = _padded_with_zeros(node)
        reads_others = any(map(has_others, node.all_input_nodes if padded is None else (padded,)))
        if not reads_others and not has_others(node):
            continue
        is_padded = padded is not None and not reads_others
        reads_zero = not zero.isdisjoint(node.all_input_nodes)
        if is_padded or (reads_zero and is_linear(node, zero)):
            zero.add(node)
        elif not isinstance(places[node], Rows) or (
            has_others(node) and not inside.issuperset(node.users)
        ):
            return False
    return True


def _padded_with_zeros(node: fx.Node) -> fx.Node | None:
    """Return the operand that the gradient of a slice pads with zeros; None for other ops."""
    operands = [n for n in node.args if isinstance(n, fx.Node)]
    if node.target is aten.slice_backward.default:
        return operands[0]
    is_written = node.target is aten.slice_scatter.default and is_zero(operands[0])
    return operands[1] if is_written else None
