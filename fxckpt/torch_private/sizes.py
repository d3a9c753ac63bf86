"""Symbolic and unbacked sizes."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch.utils.checkpoint
from torch import fx
from torch.fx.experimental.proxy_tensor import is_sym_node
from torch.fx.experimental.symbolic_shapes import statically_known_true
from torch.utils import _pytree as pytree


def size_hint(value: Any) -> int:
    """Return an int for an int or SymInt: its upper bound if it has one, else the hint of the compile; no guard is added.

    A bound is what the user marked (``mark_dynamic(x, 0, max=512)``) or what torch knows (``nonzero`` finds at most
    all). A size that is known only when the step runs, and has no bound, counts as 1.
    """
    if isinstance(value, int):
        return value
    bound = upper_bound(value)
    if bound is not None:
        return bound
    node = value.node
    hint = node.hint if node.has_hint() else None
    return int(hint) if isinstance(hint, int) else 1


MOST = 2**40
"""A greater bound of a size is none."""


def upper_bound(value: torch.SymInt) -> int | None:
    """Return the greatest value that a size can take, or None."""
    return greatest(value.node.expr, value.node.shape_env)


def greatest(expr: Any, shape_env: Any) -> int | None:
    """Return the greatest value that a sympy expression of sizes can take, or None."""
    ranges = shape_env.var_to_range
    if not all(
        s in ranges and ranges[s].upper.is_Integer and ranges[s].upper < MOST
        for s in expr.free_symbols
    ):
        return None
    upper = shape_env.bound_sympy(expr).upper
    return int(upper) if upper.is_Integer and upper < MOST else None


def is_surely_equal(one: Any, other: Any) -> bool:
    """Return whether two sizes are equal whatever values their symbols take; no guard is added."""
    return bool(statically_known_true(one == other))


def unbounded_sizes(graph: fx.Graph) -> list[str]:
    """Return the sizes in a graph's tensors that are known only when it runs, and have no upper bound."""
    found: dict[str, None] = {}
    for node in graph.nodes:
        value = node.meta.get("val")
        for size in value.shape if isinstance(value, torch.Tensor) else ():
            if (
                isinstance(size, torch.SymInt)
                and not size.node.has_hint()
                and upper_bound(size) is None
            ):
                found[str(size)] = None
    return list(found)


BINDINGS = "unbacked_bindings"
"""Metadata of an op that finds sizes by looking at numbers: where in its value each is."""


def bindings_of(node: fx.Node) -> dict[Any, Any]:
    """Return the bindings of the sizes in a node's value that are in none of those it reads, and are known only when it runs."""
    from torch.fx.experimental.symbolic_shapes import CallMethodKey, free_unbacked_symbols

    known = {s for arg in node.all_input_nodes for s in free_unbacked_symbols(arg.meta.get("val"))}
    found: dict[Any, Any] = {}
    for path, value in pytree.tree_flatten_with_path(node.meta.get("val"))[0]:
        for dim, size in enumerate(value.shape if isinstance(value, torch.Tensor) else ()):
            symbol = size.node._expr if isinstance(size, torch.SymInt) else None
            if (
                symbol is not None
                and symbol.is_Symbol
                and symbol not in known
                and free_unbacked_symbols(symbol)
            ):
                found.setdefault(symbol, (*path, CallMethodKey("size"), pytree.SequenceKey(dim)))
    return found


def is_symbolic(node: fx.Node) -> bool:
    """Return whether ``node`` is a size or a scalar, which AOTAutograd saves apart from tensors."""
    return bool(is_sym_node(node)) or isinstance(node.meta.get("val"), (bool, int, float))


def guard_sizes(joint: fx.GraphModule) -> None:
    """Let Dynamo compile again for sizes greater than those of this trace: a plan keeps its budget up to its own sizes only."""
    for node in joint.graph.find_nodes(op="placeholder"):
        value = node.meta.get("val")
        sizes = list(value.shape) if isinstance(value, torch.Tensor) else [value]
        for size in sizes:
            if (
                isinstance(size, torch.SymInt)
                and size.node.hint is not None
                and upper_bound(size) is None
            ):
                bool(
                    size <= size.node.hint
                )  # evaluating a symbolic comparison records it as a guard


@contextlib.contextmanager
def _forgetting_sizes() -> Iterator[None]:
    """Put Dynamo's memory of seen sizes back: what was captured here must not make a later compile dynamic."""
    import copy

    from torch._dynamo import pgo

    state = pgo.get_code_state()
    before = copy.deepcopy(dict(state))
    try:
        yield
    finally:
        state.clear()
        state.update(before)
