"""Placement of nodes: which half may compute a value, and who holds its storage."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from fxckpt.ops.properties import (
    has_hidden_effect,
    is_collective,
    is_known_pure,
    is_mutating,
    is_random,
    only_computes,
    tensors,
)
from fxckpt.passes.analysis.byte_counts import storage_bytes
from fxckpt.torch_private import (
    frees_incoming_gradients,
    is_pinned_to_backward,
    is_traced_in_backward,
    size_hint,
    storage_id,
    stream_of,
    written_after,
)


@dataclass(frozen=True)
class JointPlacement:
    """The halves of a joint graph, before anything is planned."""

    closure: set[fx.Node]
    """Nodes that must run in the backward."""
    fwd_outputs: list[fx.Node]
    """Outputs of the forward."""
    gradients: list[Any]
    """Outputs of the backward in the order of the graph's inputs; None for an input without one."""
    required_forward: set[fx.Node]
    """Nodes that must run in the forward: its outputs and effects, and all they depend on."""
    mutated: set[int]
    """Ids of the storages that the step writes after they were filled."""
    pure_targets: PureTargets
    """Memo over the targets of the graph."""

    @classmethod
    def of(cls, graph: fx.Graph, num_fwd_outputs: int) -> JointPlacement:
        """Return the placement of a graph with ``num_fwd_outputs`` leading forward outputs."""
        closure = backward_closure(graph)
        pure_targets = PureTargets()
        outputs = graph_outputs(graph)
        fwd_outputs = [o for o in outputs[:num_fwd_outputs] if isinstance(o, fx.Node)]
        effects = [
            n
            for n in graph.nodes
            if n.op == "call_function"
            and n not in closure
            and not pure_targets.only_computes(n)
            and (
                is_random(n)
                or is_mutating(n)
                or is_collective(n)
                or has_hidden_effect(n)
                or not is_known_pure(n)
            )
        ]
        mutated = set(written_storages(n for n in (*effects, *closure) if is_mutating(n)))
        for node in written_after(graph):
            mutated.update(storage_id(t) for t in tensors(node.meta.get("val")))
        return cls(
            closure=closure,
            fwd_outputs=fwd_outputs,
            gradients=outputs[num_fwd_outputs:],
            required_forward=ancestors([*fwd_outputs, *effects]),
            mutated=mutated,
            pure_targets=pure_targets,
        )


@dataclass(frozen=True)
class PureTargets:
    """Memo of :func:`~fxckpt.ops.properties.only_computes`, which depends on the target alone."""

    answers: dict[Any, bool] = field(default_factory=dict)

    def only_computes(self, node: fx.Node) -> bool:
        """Return whether the op of a node has no effect, whatever its arguments are."""
        if node.target not in self.answers:
            self.answers[node.target] = only_computes(node)
        return self.answers[node.target]


def tangents_of(graph: fx.Graph) -> list[fx.Node]:
    """Return the incoming gradients of a joint graph.

    AOTAutograd calls them tangents; strictly they are cotangents.
    """
    return [n for n in graph.find_nodes(op="placeholder") if str(n.target).startswith("tangents")]


def is_held_by_caller(tangent: fx.Node) -> bool:
    """Return whether an incoming gradient lives until the backward returns.

    ``loss.backward()`` holds the gradient it makes, of one element. The autograd engine hands over
    any other, which is freed after its last read; engines that keep a reference hold all of them.
    """
    is_loss = all(
        type(n) is int and n == 1 for t in tensors(tangent.meta.get("val")) for n in t.shape
    )
    return is_loss or not frees_incoming_gradients()


def backward_closure(graph: fx.Graph) -> set[fx.Node]:
    """Return the nodes that must run in the backward.

    They read a tangent; or they were traced in the backward and are random, mutate, or read a
    storage that the backward mutates: moving those would change a random stream or an order. In a
    graph with several streams none may be moved, as events order the streams.
    """
    is_bound = has_streams(graph)
    closure = _closure(graph, frozenset(), is_bound=is_bound)
    written = frozenset(written_storages(n for n in closure if is_mutating(n)))
    return _closure(graph, written, is_bound=is_bound) if written else closure


def readers_through_views(node: fx.Node) -> Iterator[fx.Node]:
    """Yield the readers of a value and of its views."""
    held = {storage_id(t) for t in tensors(node.meta.get("val"))}
    for user in node.users:
        if user.op == "call_function" and any(
            storage_id(t) in held for t in tensors(user.meta.get("val"))
        ):
            yield from readers_through_views(user)
        else:
            yield user


def inputs_read_in_backward(graph: fx.Graph) -> tuple[int, frozenset[int]]:
    """Return the number of inputs of a joint graph, and which of them its backward reads.

    They are positions among the inputs of the forward; a view of an input is read for it. Where
    nothing is recomputed, the forward saves these.
    """
    closure = backward_closure(graph)
    primals = [n for n in graph.find_nodes(op="placeholder") if str(n.target).startswith("primals")]
    read = (i for i, n in enumerate(primals) if not closure.isdisjoint(readers_through_views(n)))
    return len(primals), frozenset(read)


def has_streams(graph: fx.Graph) -> bool:
    """Return whether a node runs on another stream than the current one."""
    return any(stream_of(node) is not None for node in graph.nodes)


def written_storages(nodes: Iterable[fx.Node]) -> Iterator[int]:
    """Yield the ids of the storages that mutating ops write: those of their first argument."""
    return (
        storage_id(t)
        for n in nodes
        for arg in n.all_input_nodes[:1]
        for t in tensors(arg.meta.get("val"))
    )


def _closure(graph: fx.Graph, written: frozenset[int], *, is_bound: bool) -> set[fx.Node]:
    closure = set(tangents_of(graph))
    for node in graph.nodes:
        if node.op == "placeholder" and "bwd_seed" in str(node.target):
            closure.add(node)
        if node.op != "call_function":
            continue
        if not closure.isdisjoint(node.all_input_nodes):
            closure.add(node)
            continue
        if is_pinned_to_backward(node) or (
            is_traced_in_backward(node)
            and ((is_bound and _fills(node)) or _is_bound(node, written))
        ):
            closure.add(node)
    return closure


def _is_bound(node: fx.Node, written: frozenset[int]) -> bool:
    """Return whether moving a node of the backward into the forward would change results."""
    if is_random(node) or is_mutating(node) or has_hidden_effect(node):
        return True
    return bool(written) and any(
        storage_id(t) in written
        for arg in node.all_input_nodes
        for t in tensors(arg.meta.get("val"))
    )


def _fills(node: fx.Node) -> bool:
    """Return whether a node has a storage of its own, which a view has not."""
    read = {storage_id(t) for n in node.all_input_nodes for t in tensors(n.meta.get("val"))}
    return any(storage_id(t) not in read for t in tensors(node.meta.get("val")))


def ancestors(roots: Iterable[fx.Node]) -> set[fx.Node]:
    """Return ``roots`` and all nodes they depend on."""
    seen: set[fx.Node] = set()
    stack = list(roots)
    while stack:
        node = stack.pop()
        if node not in seen:
            seen.add(node)
            stack.extend(node.all_input_nodes)
    return seen


def graph_outputs(graph: fx.Graph) -> list[Any]:
    """Return the flat outputs of a graph."""
    (output,) = graph.find_nodes(op="output")
    return pytree.arg_tree_leaves(*output.args)


def accumulation_bytes(inputs: Sequence[fx.Node], gradients: Sequence[Any]) -> int:
    """Return the bytes that autograd allocates, beyond the returned gradients, to fill ``.grad``.

    ``AccumulateGrad`` clones a gradient that is shared or breaks the gradient layout contract. The
    count takes the gradients one after the other, frees each original at its last clone, and
    assumes that every input is a leaf.
    """
    left = Counter(g for g in gradients if isinstance(g, fx.Node))
    extra = most = 0
    for given, gradient in zip(inputs, gradients, strict=False):
        if not isinstance(gradient, fx.Node):
            continue
        left[gradient] -= 1
        value, parameter = gradient.meta.get("val"), given.meta.get("val")
        # AccumulateGrad takes a sparse gradient by its parts.
        if (
            not isinstance(value, torch.Tensor)
            or not isinstance(parameter, torch.Tensor)
            or value.layout is not torch.strided
        ):
            continue
        if left[gradient] > 0 or not has_layout_of(value, parameter):
            extra += size_hint(value.numel()) * value.element_size()
            most = max(most, extra)
            if left[gradient] == 0:
                extra -= min(storage_bytes(value), extra)
    return most


def has_layout_of(gradient: torch.Tensor, parameter: torch.Tensor) -> bool:
    """Return whether autograd accumulates a gradient without a clone.

    The gradient layout contract asks for the strides of a dense parameter, and for a contiguous
    gradient of any other.
    """
    shape = [size_hint(n) for n in parameter.shape]
    strides = [size_hint(n) for n in parameter.stride()]
    found = [size_hint(n) for n in gradient.stride()]
    if [size_hint(n) for n in gradient.shape] != shape:
        return True
    expected, is_dense = 1, True
    for n, s in sorted(
        (p for p in zip(shape, strides, strict=True) if p[0] != 1), key=lambda p: p[1]
    ):
        is_dense &= s == expected
        expected *= n
    if not is_dense:
        strides = [math.prod(shape[i + 1 :]) for i in range(len(shape))]
    return all(n == 1 or a == b for n, a, b in zip(shape, strides, found, strict=True))
