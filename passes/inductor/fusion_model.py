"""Kernels: which values a fusing compiler never stores.

A compiler that fuses (Inductor) takes an element-wise op into the loops of those who read it: its value has no memory of its own, is made again
in every loop at next to no cost, and what it is made from lives until the last of them has run. To planning it is what a view is. A value is
stored all the same where somebody needs it in memory: a kernel that is no loop, the caller, the compiler's own thresholds on how much one loop
may read and how often heavy work is done again. And one that is much smaller than what it is made from (the sum of two, a mask) is better
treated as stored, so that a plan may save it in their place.

Reads the graph, leaves it alone. Judging what a compiler really makes of a plan is :mod:`fxckpt.inductor.memory`'s job; this is the model that plans
are searched with.
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
"""Ops worth storing where they are read more than once."""


@dataclass(frozen=True)
class KernelGraph:
    """Finds the values of a joint graph that are never stored."""

    fuses: Callable[[fx.Node], bool]
    """Whether the compiler lowers an op to a loop that others may take in."""
    most_reads: int = 8
    """A loop that reads more is stored (Inductor: ``realize_acc_reads_threshold``)."""
    most_reads_reused: int = 4
    """The same for one that is read more than once (``realize_reads_threshold``)."""
    most_bytes: float = 1.5
    """A value that is made from more bytes than this many times its own is planned as stored."""

    def __call__(self, graph: fx.Graph, stored: Collection[str] = ()) -> frozenset[fx.Node]:
        """Return the values that are never stored.

        Those in ``stored`` are stored whatever the rules say, but for masks and indices that loops make from nothing but their own counters: to make
        them again takes less than to read them, and loops that read one mask would be fused for it, however far apart they are.
        """
        reader = _Reader(self, graph)
        return frozenset(
            node
            for node in graph.nodes
            if node.op == "call_function" and reader.read(node, node.name in stored)
        )


class _Reader:
    """Follows one graph in order."""

    def __init__(self, rules: KernelGraph, graph: fx.Graph) -> None:
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
        """Per node: the stored memory that reading it reads, with its bytes; inputs of the graph count none."""
        self.heavy: set[fx.Node] = set()

    def read(self, node: fx.Node, is_stored: bool) -> bool:
        """Take the next node in; return whether it is never stored."""
        below: dict[int, int] = {}
        for arg in node.all_input_nodes:
            below.update(
                self.sources[arg]
                if arg in self.sources
                else {storage_id(t): 0 for t in tensors(arg.meta.get("val"))}
            )
        own = {storage_id(t): storage_bytes(t) for t in tensors(node.meta.get("val"))}
        is_stored = is_stored and not (
            _is_index(node) and not below and self._is_taken_in(node, own, below)
        )
        if not is_stored and own and not is_symbolic(node) and self._is_view(node, own):
            self.sources[node] = below
            if any(arg in self.heavy for arg in node.all_input_nodes):
                self.heavy.add(node)
            return False
        if is_stored or not own or not self._is_taken_in(node, own, below):
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

    def _is_taken_in(self, node: fx.Node, own: dict[int, int], below: dict[int, int]) -> bool:
        if not self.rules.fuses(node) or not self.outputs.isdisjoint(own):
            return False
        readers = _readers(node)
        if not all(self._is_loop(reader) for reader in readers):
            return False
        times = max(
            sum(reader in self.closure for reader in readers),
            sum(reader not in self.closure for reader in readers),
        )
        if times > 1 and (
            _is_heavy(node) or any(arg in self.heavy for arg in node.all_input_nodes)
        ):
            return False
        if len(below) > (self.rules.most_reads_reused if times > 1 else self.rules.most_reads):
            return False
        return sum(below.values()) <= self.rules.most_bytes * sum(own.values())

    def _is_loop(self, node: fx.Node) -> bool:
        return self.rules.fuses(node) or is_reduction(node)


def is_reduction(node: fx.Node) -> bool:
    """Return whether an op reduces: a loop that may take in what it reads, and stores what it makes."""
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
    """Return who reads a value, be it through views."""
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
    """Return whether Inductor calls a kernel of a library for an op, rather than write a loop."""
    return (
        node.op == "call_function"
        and not fuses(node)
        and not is_reduction(node)
        and node.target is not operator.getitem
    )
