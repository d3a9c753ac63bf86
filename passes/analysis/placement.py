"""Placement of nodes: which half may compute a value, and who holds its storage."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from fxckpt.ops.properties import has_hidden_effect, is_mutating, is_random, tensors
from fxckpt.passes.analysis.byte_counts import storage_bytes
from fxckpt.torch_private import frees_incoming_gradients, partitioner_tag, size_hint, storage_id


def tangents_of(graph: fx.Graph) -> list[fx.Node]:
    """Return the incoming gradients of a joint graph (strictly cotangents; AOTAutograd calls them tangents)."""
    return [n for n in graph.find_nodes(op="placeholder") if str(n.target).startswith("tangents")]


def is_held_by_caller(tangent: fx.Node) -> bool:
    """Return whether an incoming gradient is there until the backward returns, whoever reads it.

    ``loss.backward()`` holds the gradient it makes, of one element. The autograd engine hands any other over, to be let go of after its last read;
    engines that keep a reference of their own hold all.
    """
    is_loss = all(
        type(n) is int and n == 1 for t in tensors(tangent.meta.get("val")) for n in t.shape
    )
    return is_loss or not frees_incoming_gradients()


def backward_closure(graph: fx.Graph) -> set[fx.Node]:
    """Return the nodes that must run in the backward.

    They read a tangent, or were traced in the backward and are random, or mutate, or read what the backward mutates: moving those would
    change a stream or an order.
    """
    closure = _closure(graph, frozenset())
    written = frozenset(written_storages(n for n in closure if is_mutating(n)))
    return _closure(graph, written) if written else closure


def written_storages(nodes: Iterable[fx.Node]) -> Iterator[int]:
    """Yield the ids of the storages that mutating ops write (their first argument, as ``copy_`` has it)."""
    return (
        storage_id(t)
        for n in nodes
        for arg in n.all_input_nodes[:1]
        for t in tensors(arg.meta.get("val"))
    )


def _closure(graph: fx.Graph, written: frozenset[int]) -> set[fx.Node]:
    closure = set(tangents_of(graph))
    for node in graph.nodes:
        if node.op == "placeholder" and "bwd_seed" in str(node.target):
            closure.add(node)
        if node.op != "call_function":
            continue
        if not closure.isdisjoint(node.all_input_nodes):
            closure.add(node)
            continue
        tag = partitioner_tag(node)
        if tag == "must_be_in_backward" or (tag == "is_backward" and _is_bound(node, written)):
            closure.add(node)
    return closure


def _is_bound(node: fx.Node, written: frozenset[int]) -> bool:
    """Return whether moving a node of the backward into the forward would show."""
    if is_random(node) or is_mutating(node) or has_hidden_effect(node):
        return True
    return bool(written) and any(
        storage_id(t) in written
        for arg in node.all_input_nodes
        for t in tensors(arg.meta.get("val"))
    )


def ancestors(roots: Iterable[fx.Node]) -> set[fx.Node]:
    """Return ``roots`` and all they depend on."""
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
    """Return the bytes autograd allocates beyond the returned gradients while it stores them in ``.grad``.

    A gradient that is shared, or not laid out as its parameter, is cloned (``AccumulateGrad``, the gradient layout contract). Taken one after the
    other, each original released once it was cloned for the last time, and as if every input were a leaf.
    """
    left = Counter(g for g in gradients if isinstance(g, fx.Node))
    extra = most = 0
    for given, gradient in zip(inputs, gradients, strict=False):
        if not isinstance(gradient, fx.Node):
            continue
        left[gradient] -= 1
        value, parameter = gradient.meta.get("val"), given.meta.get("val")
        # A sparse gradient is taken by its parts.
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
    """Return whether a gradient may be taken as it is: the parameter's strides if that is dense, else contiguous."""
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
