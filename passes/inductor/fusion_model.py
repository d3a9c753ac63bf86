"""Fusion model: the values that a fusing compiler never stores.

Inductor inlines an element-wise op into the fused kernels that read it: its value has no memory,
is recomputed in every kernel at next to no cost, and its inputs live until the last of them has
run. To planning, such a value is a view. A value is realized all the same if it is needed in
memory: by an extern kernel, by the caller, or by the compiler's thresholds on the reads of one
kernel and on repeated heavy work. A value much smaller than its inputs (the sum of two, a mask) is
also planned as realized, so that a plan may save it in their place.

Reads the graph without changing it. This is the model on which plans are searched;
:mod:`fxckpt.inductor.memory` asks Inductor about a plan.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection
from dataclasses import dataclass

from torch import fx

from fxckpt.ops.properties import tensors
from fxckpt.passes.analysis.byte_counts import storage_bytes
from fxckpt.passes.analysis.placement import backward_closure, graph_outputs
from fxckpt.torch_private import OpOverload, is_symbolic, storage_id
from fxckpt.torch_private.inductor.default_partitioner import fuses

HEAVY = frozenset(
    ("exp", "log", "log10", "log1p", "log2", "sigmoid", "tanh", "erf", "inductor_random")
)
"""Ops that are realized if they are read more than once."""


@dataclass(frozen=True)
class FusionModel:
    """Finds the values of a joint graph that are never stored."""

    fuses: Callable[[fx.Node], bool]
    """Whether the compiler lowers an op to a loop that it may inline."""
    most_reads: int = 8
    """Most buffers that an inlined value reads (Inductor's ``realize_acc_reads_threshold``)."""
    most_reads_reused: int = 4
    """The same for a value with several readers (Inductor's ``realize_reads_threshold``)."""
    most_bytes: float = 1.5
    """Most bytes that an inlined value reads, as a multiple of its own."""

    def __call__(self, graph: fx.Graph, stored: Collection[str] = ()) -> frozenset[fx.Node]:
        """Return the values that are never stored.

        Values named in ``stored`` are realized whatever the rules say. Excepted are masks and
        indices computed from loop counters alone: recomputing them costs less than reading them,
        and kernels that read one mask would be fused for it, however far apart they are.
        """
        visitor = _FusionVisitor(self, graph)
        return frozenset(
            node
            for node in graph.nodes
            if node.op == "call_function" and visitor.visit(node, node.name in stored)
        )


class _FusionVisitor:
    """Visits the nodes of one graph in order."""

    def __init__(self, rules: FusionModel, graph: fx.Graph) -> None:
        self.rules = rules
        self.closure = backward_closure(graph)
        self.outputs = {
            storage_id(t)
            for o in graph_outputs(graph)
            if isinstance(o, fx.Node)
            for t in tensors(o.meta.get("val"))
        }
        self.free = {
            storage_id(t)
            for n in graph.nodes
            if n.op != "call_function"
            for t in tensors(n.meta.get("val"))
        }
        self.sources: dict[fx.Node, dict[int, int]] = {}
        """Storages read through each node, with their bytes; inputs of the graph count none."""
        self.heavy: set[fx.Node] = set()

    def visit(self, node: fx.Node, is_stored: bool) -> bool:
        """Visit the next node; return whether it is never stored."""
        below: dict[int, int] = {}
        for arg in node.all_input_nodes:
            below.update(
                self.sources[arg]
                if arg in self.sources
                else {storage_id(t): 0 for t in tensors(arg.meta.get("val"))}
            )
        own = {storage_id(t): storage_bytes(t) for t in tensors(node.meta.get("val"))}
        is_stored = is_stored and not (
            _is_index(node) and not below and self._is_inlined(node, own, below)
        )
        if not is_stored and own and not is_symbolic(node) and self._is_view(node, own):
            self.sources[node] = below
            if any(arg in self.heavy for arg in node.all_input_nodes):
                self.heavy.add(node)
            return False
        if is_stored or not own or not self._is_inlined(node, own, below):
            self.sources[node] = {
                sid: 0 if sid in self.free else nbytes for sid, nbytes in own.items()
            }
            return False
        self.sources[node] = below
        if _is_heavy(node) or any(arg in self.heavy for arg in node.all_input_nodes):
            self.heavy.add(node)
        return True

    def _is_view(self, node: fx.Node, own: dict[int, int]) -> bool:
        return all(
            any(
                sid == storage_id(t)
                for arg in node.all_input_nodes
                for t in tensors(arg.meta.get("val"))
            )
            for sid in own
        )

    def _is_inlined(self, node: fx.Node, own: dict[int, int], below: dict[int, int]) -> bool:
        if not self.rules.fuses(node) or not self.outputs.isdisjoint(own):
            return False
        readers = _readers(node)
        if not all(self._is_fused(reader) for reader in readers):
            return False
        reads = max(
            sum(reader in self.closure for reader in readers),
            sum(reader not in self.closure for reader in readers),
        )
        if reads > 1 and (
            _is_heavy(node) or any(arg in self.heavy for arg in node.all_input_nodes)
        ):
            return False
        if len(below) > (self.rules.most_reads_reused if reads > 1 else self.rules.most_reads):
            return False
        return sum(below.values()) <= self.rules.most_bytes * sum(own.values())

    def _is_fused(self, node: fx.Node) -> bool:
        return self.rules.fuses(node) or is_reduction(node)


def is_reduction(node: fx.Node) -> bool:
    """Return whether an op reduces: its kernel may inline its inputs, and stores its result."""
    return isinstance(node.target, OpOverload) and (node.target._opname in REDUCTIONS)


REDUCTIONS = frozenset(
    (
        "all",
        "amax",
        "amin",
        "any",
        "argmax",
        "argmin",
        "logsumexp",
        "max",
        "mean",
        "min",
        "prod",
        "std",
        "sum",
        "var",
        "var_mean",
        "xor_sum",
    )
)


def _is_heavy(node: fx.Node) -> bool:
    return isinstance(node.target, OpOverload) and node.target._opname in HEAVY


def _is_index(node: fx.Node) -> bool:
    dtypes = [t.dtype for t in tensors(node.meta.get("val"))]
    return bool(dtypes) and not any(dtype.is_floating_point or dtype.is_complex for dtype in dtypes)


def _readers(node: fx.Node) -> list[fx.Node]:
    """Return the readers of a value, directly or through views."""
    held = {storage_id(t) for t in tensors(node.meta.get("val"))}
    found: dict[fx.Node, None] = {}
    todo = [node]
    for each in todo:
        for user in each.users:
            if user.op == "call_function" and any(
                storage_id(t) in held for t in tensors(user.meta.get("val"))
            ):
                todo.append(user)
            else:
                found[user] = None
    return list(found)


def is_extern_kernel(node: fx.Node) -> bool:
    """Return whether Inductor calls a library for an op instead of generating a kernel."""
    return (
        node.op == "call_function"
        and not fuses(node)
        and not is_reduction(node)
        and node.target is not operator.getitem
    )
