"""Gradient ahead: a region's backward without the incoming gradient, which scales its results.

Where a region ends in a loss, its backward is linear in the gradient of the loss, one number. The
backward is computed for 1 in its place, and what leaves the region is multiplied by the number
where it is first read. Nothing in it waits for the backward then: a plan may run it in the forward,
tile by tile, and recompute no logits. The bits are the same for gradients that are powers of two,
but for underflow and overflow.

Expects a joint graph and one of its regions. Leaves a joint graph in which the region, found
again, has no op that reads an incoming gradient.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence

import torch
from torch import fx

from fxckpt.passes.analysis.placement import backward_closure
from fxckpt.passes.tiles.linear_ops import ZEROS, bare_name, is_linear
from fxckpt.passes.tiles.row_regions import RowRegion
from fxckpt.passes.tiles.row_rules import MEAN
from fxckpt.passes.tiles.unroll import emit_call, replace_uses, value_of
from fxckpt.torch_private import fake_like, is_surely_equal

aten = torch.ops.aten

MOST_BETWEEN = 64
"""Most ops between the incoming gradient and the region."""

# fmt: off
VIEWS = frozenset(
    ("_unsafe_view", "alias", "expand", "permute", "squeeze", "t", "transpose", "unsqueeze", "view")
)
# fmt: on


def run_ahead(graph: fx.Graph, region: RowRegion) -> bool:
    """Make the backward of a region independent of the incoming gradient; return whether it is.

    A graph for which it cannot is left alone.
    """
    closure = backward_closure(graph)
    members = set(region.backward)
    before = _between(graph, closure, region)
    if before is None:
        return False
    tangent, between = before
    depends = {tangent}
    for node in (*between, *region.backward):
        if not is_linear(node, depends):
            return False
        if bare_name(node) not in ZEROS:
            depends.add(node)
    losses = [n for n in region.forward if bare_name(n) == "nll_loss_forward"]
    if not all(map(_has_countable_weight, losses)):
        return False
    _count_targets(graph, region)
    _replace_tangent(graph, region, tangent, between)
    order = {node: i for i, node in enumerate(graph.nodes)}
    for node in region.backward:
        if node in depends and any(user not in members for user in node.users):
            _scale(graph, node, tangent, members, order)
    graph.eliminate_dead_code(is_impure_node=_is_kept)
    return True


def _is_kept(node: fx.Node) -> bool:
    return node.op in ("placeholder", "output") or node.is_impure()


def _between(
    graph: fx.Graph, closure: set[fx.Node], region: RowRegion
) -> tuple[fx.Node, list[fx.Node]] | None:
    """Return the one incoming gradient that a region reads, and the ops between the two."""
    members = set(region.backward)
    needed: set[fx.Node] = set()
    stack = list(region.backward)
    while stack:
        for arg in stack.pop().all_input_nodes:
            if arg in closure and arg not in needed and arg not in members:
                needed.add(arg)
                stack.append(arg)
    between = [n for n in graph.nodes if n in needed and n.op == "call_function"]
    tangents = [n for n in needed if n.op == "placeholder"]
    if len(tangents) != 1 or len(between) > MOST_BETWEEN:
        return None
    value = tangents[0].meta["val"]
    is_number = isinstance(value, torch.Tensor) and value.dim() == 0
    return (tangents[0], between) if is_number else None


def _has_countable_weight(loss: fx.Node) -> bool:
    """Return whether the weights of a loss's rows are 1, or not summed for a mean."""
    return loss.args[2] is None or bool(loss.args[3] != MEAN)


def _count_targets(graph: fx.Graph, region: RowRegion) -> None:
    """Let the backward of losses read the count of targets, known before all tiles.

    Only that of a mean divides by it.
    """
    for loss in region.forward:
        if bare_name(loss) != "nll_loss_forward":
            continue
        scores, target, ignored = loss.args[0], loss.args[1], loss.args[4]
        assert isinstance(scores, fx.Node) and isinstance(target, fx.Node)
        dtype = {"dtype": scores.meta["val"].dtype}
        with graph.inserting_before(loss):
            counted = emit_call(graph, aten.ne.Scalar, (target, ignored), {}, target)
            total = emit_call(graph, aten.sum.default, (counted,), {}, target)
            total = emit_call(graph, aten._to_copy.default, (total,), dtype, target)
        for item in list(loss.users):
            if item.args[1] == 1:
                replace_uses(item, total, apart_from=set(item.users).difference(region.backward))


def _replace_tangent(
    graph: fx.Graph, region: RowRegion, tangent: fx.Node, between: Sequence[fx.Node]
) -> None:
    """Let a region's backward read 1 in place of the incoming gradient."""
    value = tangent.meta["val"]
    known: dict[fx.Node, fx.Node] = {}
    first = min([region.backward[0], *between[:1]])
    with graph.inserting_before(first):
        options = {"dtype": value.dtype, "device": value.device, "pin_memory": False}
        one = graph.create_node("call_function", aten.full.default, ([], 1), options)
        one.meta["val"] = fake_like(value, (), value.dtype)
        known[tangent] = one
    for node in between:
        # There it has what it reads beside the gradient, as of another loss of the region.
        with graph.inserting_before(node):
            known[node] = graph.node_copy(node, lambda arg: known.get(arg, arg))
            known[node].meta = copy.copy(node.meta)
            known[node].meta["val"] = value_of(known[node])
    for node in region.backward:
        node.args = fx.map_arg(node.args, lambda arg: known.get(arg, arg))
        node.kwargs = fx.map_arg(node.kwargs, lambda arg: known.get(arg, arg))


def _scale(
    graph: fx.Graph,
    node: fx.Node,
    tangent: fx.Node,
    members: set[fx.Node],
    order: dict[fx.Node, int],
) -> None:
    """Multiply what leaves the region by the incoming gradient, where it is first read."""
    while len(node.users) == 1 and bare_name(view := next(iter(node.users))) in VIEWS:
        node = view
    readers = [user for user in node.users if user not in members]
    if len(readers) == 1 and (total := readers[0]).target is aten.add.Tensor:
        added = _add_scaled(graph, node, tangent, total)
        if added is not None:
            # It may read another value that leaves the region.
            order[added] = order[total]
            return
    with graph.inserting_before(min(readers, key=lambda user: order[user])):
        scaled = emit_call(graph, aten.mul.Tensor, (node, tangent), {}, node)
    replace_uses(node, scaled, apart_from=members)


def _add_scaled(graph: fx.Graph, node: fx.Node, tangent: fx.Node, total: fx.Node) -> fx.Node | None:
    """Scale a value in the sum that reads it, so that it is not copied.

    Return what replaces the sum, or None where it cannot be.
    """
    others = [n for n in total.args[:2] if n is not node]
    if len(others) != 1 or not isinstance(others[0], fx.Node) or total.kwargs:
        return None
    value, *values = (n.meta["val"] for n in (node, others[0], total))
    for other in values:
        if other.dim() != value.dim() or other.dtype != value.dtype:
            return None
        if not all(map(is_surely_equal, other.shape, value.shape)):
            return None
    with graph.inserting_before(total):
        new = emit_call(graph, aten.addcmul.default, (others[0], node, tangent), {}, total)
    replace_uses(total, new)
    graph.erase_node(total)
    return new
