"""Recompute checks: compare every recomputed value with a checksum of the forward's value.

For debugging. The forward returns 8 bytes for every tensor that the backward recomputes. There each
recomputed value passes a check before anything reads it, so that the first op that differs in any
bit is the one that is named. An op that the forward does not run has nothing to compare with.

Expects a rematerialized joint graph whose halves run op by op. Leaves one that computes the same
values, or raises while it runs.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, fx

from fxckpt.errors import RecomputeMismatch
from fxckpt.ops.properties import is_uninitialized, tensors
from fxckpt.passes.analysis.graph_snapshot import module_path, op_name, source_line
from fxckpt.passes.analysis.placement import ancestors, graph_outputs
from fxckpt.passes.meta import CHECKSUM_OF, IS_RECOMPUTE, RECOMPUTE_OF
from fxckpt.passes.transforms.rematerialize import Rematerialized
from fxckpt.torch_private import fake_like, is_pinned_to_backward, tag_side

GOLDEN = 0x9E3779B97F4A7C15 - 2**64
"""Increment of SplitMix64 as a signed integer."""

MIXING = ((30, 0xBF58476D1CE4E5B9 - 2**64), (27, 0x94D049BB133111EB - 2**64))
"""Shifts and multipliers of SplitMix64."""


def insert_checks(
    joint: fx.GraphModule, result: Rematerialized, *, num_fwd_outputs: int
) -> Rematerialized:
    """Insert checksums and checks into ``joint`` in place; return the values to save now."""
    graph = joint.graph
    named = {n.name: n for n in graph.nodes}
    outputs = [o for o in graph_outputs(graph)[:num_fwd_outputs] if isinstance(o, fx.Node)]
    in_forward = ancestors([*outputs, *result.saved, *result.symbolic])
    filled = {
        n: _insert_fill(graph, n)
        for n in list(graph.nodes)
        if n.op == "call_function" and is_uninitialized(n)
    }
    checksums: dict[fx.Node, fx.Node] = {}
    for recompute in [n for n in graph.nodes if n.meta.get(IS_RECOMPUTE)]:
        first = named.get(recompute.meta[RECOMPUTE_OF])
        if (
            first is None
            or first not in in_forward
            or is_uninitialized(first)
            or not any(True for _ in tensors(first.meta.get("val")))
        ):
            continue
        if first not in checksums:
            checksums[first] = _insert_checksum(graph, first)
        _insert_check(graph, recompute, first, checksums[first])
    graph.lint()
    return replace(result, saved=(*(filled.get(n, n) for n in result.saved), *checksums.values()))


def _insert_fill(graph: fx.Graph, node: fx.Node) -> fx.Node:
    """Fill uninitialized memory with zeros: a value may contain the rest that is never written."""
    with graph.inserting_after(node):
        zeros = graph.create_node(
            "call_function", torch.ops.aten.fill.Scalar, (node, 0), name=f"{node.name}_filled"
        )
    zeros.meta = {"val": node.meta["val"], CHECKSUM_OF: node.name}
    tag_side(zeros, backward=is_pinned_to_backward(node))
    node.replace_all_uses_with(zeros, delete_user_cb=lambda user: user is not zeros)
    return zeros


def _insert_checksum(graph: fx.Graph, first: fx.Node) -> fx.Node:
    values = list(tensors(first.meta["val"]))
    with graph.inserting_after(first):
        node = graph.create_node("call_function", checksum, (first,), name=f"{first.name}_checksum")
    node.meta = {"val": fake_like(values[0], (len(values),), torch.int64), CHECKSUM_OF: first.name}
    tag_side(node, backward=False)
    return node


def _insert_check(graph: fx.Graph, recompute: fx.Node, first: fx.Node, expected: fx.Node) -> None:
    arguments = recompute, expected, _description(first)
    with graph.inserting_after(recompute):
        node = graph.create_node(
            "call_function", checked, arguments, name=f"{recompute.name}_checked"
        )
    node.meta = {"val": recompute.meta["val"]}
    tag_side(node, backward=True)
    recompute.replace_all_uses_with(node, delete_user_cb=lambda user: user is not node)


def _description(node: fx.Node) -> str:
    """Return name, op, module and source line of a node, for error messages."""
    module, source = module_path(node), source_line(node)
    found = [f"in module {module!r}" if module else "", f"at {source}" if source else ""]
    return " ".join((f"{node.name!r} ({op_name(node)})", *filter(None, found)))


def checksum(value: Any) -> Tensor:
    """Return a checksum of the bits of every tensor in ``value``, shape (tensors,), int64."""
    found = list(tensors(value))
    return torch.stack([_checksum(t.detach()).to(found[0].device) for t in found])


def _checksum(tensor: Tensor) -> Tensor:
    bits = (
        (torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor)
        .contiguous()
        .view(-1)
        .view(torch.uint8)
    )
    padded = torch.nn.functional.pad(bits, (0, -len(bits) % 8)).view(torch.int64)
    # SplitMix64 (Steele, Lea and Flood 2014) of each word and its position. int64 wraps, and its
    # shifts keep the sign, which does no harm here.
    mixed = padded + GOLDEN * torch.arange(1, len(padded) + 1, device=padded.device)
    for shift, factor in MIXING:
        mixed = (mixed ^ (mixed >> shift)) * factor
    return (mixed ^ (mixed >> 31)).sum()


def checked(value: Any, expected: Tensor, description: str) -> Any:
    """Return ``value`` if its checksum is ``expected``.

    Raises :class:`~fxckpt.errors.RecomputeMismatch` if it differs; ``description`` is of the op.
    """
    found = checksum(value)
    # A recompute may leave out the last results (fxckpt.ops.recompute_forms).
    if not torch.equal(found, expected[: len(found)]):
        raise RecomputeMismatch(
            f"{description} gave other values in the backward than in the forward: the gradients "
            "would be wrong. All ops recomputed before it gave the same values, so it is this op "
            "that does not repeat itself (or its inputs were written in between). Keep its first "
            "result: fxckpt.register_op(op, recompute=False), or a policy that returns MUST_SAVE "
            "for it."
        )
    return value
