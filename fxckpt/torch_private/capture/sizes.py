"""Symbolic and unbacked sizes."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cache
from typing import Any
from weakref import WeakKeyDictionary

import sympy  # type: ignore[import-untyped]
import torch.utils.checkpoint
from torch import fx
from torch.fx.experimental.proxy_tensor import is_sym_node
from torch.fx.experimental.symbolic_shapes import statically_known_true
from torch.utils import _pytree as pytree
from torch.utils._sympy.value_ranges import bound_sympy


def size_hint(value: Any) -> int:
    """Return an int for an int or SymInt: its upper bound if it has one, else its hint.

    No guard is added. A bound comes from the user (``mark_dynamic(x, 0, max=512)``) or from torch
    (``nonzero`` finds at most all elements). An unbacked size without a bound counts as 1.
    """
    if isinstance(value, int):
        return value
    bound = upper_bound(value)
    if bound is not None:
        return bound
    node = value.node
    if sizes := _assumed.get():
        grown = node.expr.xreplace(sizes)
        return int(grown) if grown.is_Integer else MOST
    hint = node.hint if node.has_hint() else None
    return int(hint) if isinstance(hint, int) else 1


def traced_size(value: Any) -> int:
    """Return what a size was when it was traced; 0 if that is not known."""
    if isinstance(value, int):
        return value
    hint = value.node.hint if value.node.has_hint() else None
    return hint if isinstance(hint, int) else 0


def has_hint(size: torch.SymInt) -> bool:
    """Return whether a size was known when it was traced: it does not depend on data."""
    return bool(size.node.has_hint())


@dataclass(frozen=True)
class SymbolicSize:
    """A size as an expression of symbols."""

    expr: Any
    planned: int
    """Its value in plans."""

    def at(self, sizes: Mapping[str, int]) -> int:
        """Return its value at values of the symbols; the planned one where a symbol has none."""
        symbols = self.expr.free_symbols
        if not all(str(s) in sizes for s in symbols):
            return self.planned
        return int(self.expr.xreplace({s: sympy.Integer(sizes[str(s)]) for s in symbols}))


def symbolic_size(value: Any) -> SymbolicSize | None:
    """Return a size as an expression of symbols, None for a constant."""
    if not isinstance(value, torch.SymInt) or not value.node.expr.free_symbols:
        return None
    return SymbolicSize(value.node.expr, size_hint(value))


def symbols_of(inputs: Sequence[Any]) -> tuple[tuple[int, str], ...]:
    """Return the positions of the inputs that are sizes, each with its symbol."""
    return tuple(
        (i, str(value.node.expr))
        for i, value in enumerate(inputs)
        if isinstance(value, torch.SymInt)
        and value.node.expr.is_Symbol
        and not _is_of_nested(value)
    )


def _is_of_nested(value: torch.SymInt) -> bool:
    """Return whether a size is the ragged one of a nested tensor, a name rather than a number."""
    hint = value.node.hint
    return isinstance(hint, torch.SymInt) and hint.node.is_nested_int()


_assumed: ContextVar[dict[Any, int]] = ContextVar("assumed", default={})  # noqa: B039
"""Values of symbols in place of their hints."""


@contextlib.contextmanager
def assuming(sizes: Sequence[torch.SymInt], factor: int) -> Iterator[None]:
    """Take symbols among ``sizes`` as ``factor`` times as large as their hints.

    A size without an upper bound that has other symbols too counts as :data:`MOST`.
    """
    grown = {
        s.node.expr: sympy.Integer(factor * int(s.node.hint))
        for s in sizes
        if s.node.expr.is_Symbol
    }
    token = _assumed.set(grown)
    try:
        yield
    finally:
        _assumed.reset(token)


MOST = 2**40
"""Limit at and above which an upper bound of a size counts as none."""


def upper_bound(value: torch.SymInt) -> int | None:
    """Return the greatest value that a size can take, or None if it is unbounded."""
    return greatest(value.node.expr, value.node.shape_env)


def greatest(expr: Any, shape_env: Any) -> int | None:
    """Return the greatest value of a sympy expression of sizes, or None if it is unbounded."""
    planned, now = _as_planned.get(shape_env, {}), shape_env.var_to_range
    ranges = {}
    for symbol in _symbols_in(expr):
        known = planned.get(symbol) or now.get(symbol)
        if known is None or not known.upper.is_Integer or known.upper >= MOST:
            return None
        ranges[symbol] = known
    return _greatest_within(expr, frozenset(ranges.items()))


@cache
def _symbols_in(expr: Any) -> frozenset[Any]:
    return frozenset(expr.free_symbols)


@cache
def _greatest_within(expr: Any, ranges: frozenset[tuple[Any, Any]]) -> int | None:
    """Return the greatest value of an expression whose symbols have bounds, below the limit."""
    upper = bound_sympy(expr, dict(ranges)).upper
    return int(upper) if upper.is_Integer and upper < MOST else None


_as_planned: WeakKeyDictionary[Any, dict[Any, Any]] = WeakKeyDictionary()
"""Ranges of the symbols of a shape environment when a graph of it was first planned."""


def keep_ranges(joint: fx.GraphModule) -> None:
    """Keep the ranges of a joint graph's sizes as they are when it is first planned.

    Lowering narrows them by guards of its own, and a graph is planned, and lowered, many times.
    """
    for node in joint.graph.find_nodes(op="placeholder"):
        value = node.meta.get("val")
        for size in value.shape if isinstance(value, torch.Tensor) else (value,):
            if isinstance(size, torch.SymInt) and size.node.shape_env not in _as_planned:
                _as_planned[size.node.shape_env] = dict(size.node.shape_env.var_to_range)


def size_key(value: Any) -> Any:
    """Return an int, or the expression of a SymInt: equal keys are equal sizes at all symbols.

    Torch writes the bytes of a storage in more than one way, as ``s * t`` and ``s * (t - 1) + s``.
    """
    return _expanded(value.node.expr) if isinstance(value, torch.SymInt) else value


@cache
def _expanded(expression: sympy.Expr) -> sympy.Expr:
    return sympy.expand(expression)


def is_surely_equal(one: Any, other: Any) -> bool:
    """Return whether two sizes are equal for all values of their symbols; no guard is added."""
    if isinstance(one, int) and isinstance(other, int):
        return one == other
    return size_key(one) == size_key(other) or bool(statically_known_true(one == other))


def unbounded_sizes(graph: fx.Graph) -> list[str]:
    """Return the unbacked sizes in a graph's tensors that have no upper bound."""
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
"""Metadata key of an op with data-dependent sizes: the position of each size in its value."""


def bindings_of(node: fx.Node) -> dict[Any, Any]:
    """Return the bindings of the unbacked sizes that a node's value introduces.

    Unbacked sizes of the node's inputs are not among them. A binding maps a symbol to its position
    in the value.
    """
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
    """Return whether ``node`` is a size or a scalar, which AOTAutograd saves separately."""
    return bool(is_sym_node(node)) or isinstance(node.meta.get("val"), (bool, int, float))


def growing_sizes(joint: fx.GraphModule) -> list[torch.SymInt]:
    """Return the sizes of a joint graph's inputs that have no upper bound.

    Those of tensors without elements, in which nested tensors keep their bounds, take no memory.
    """
    found: list[torch.SymInt] = []
    for node in joint.graph.find_nodes(op="placeholder"):
        value = node.meta.get("val")
        sizes = list(value.shape) if isinstance(value, torch.Tensor) else [value]
        if any(isinstance(size, int) and size == 0 for size in sizes):
            continue
        found += [
            size
            for size in sizes
            if isinstance(size, torch.SymInt)
            and size.node.hint is not None
            and not _is_of_nested(size)
            and upper_bound(size) is None
        ]
    return found


def guard_sizes(sizes: Sequence[torch.SymInt], factor: int = 1, *, spare: int = 0) -> None:
    """Guard sizes so that Dynamo recompiles for more than ``factor`` times their hints.

    A size at its lower bound may be greater by ``spare``: one that was marked as dynamic must not
    become a constant.
    """
    for size in sizes:
        node = size.node
        lower = node.shape_env.bound_sympy(node.expr).lower
        least = int(lower) + spare if lower.is_Integer else 0
        # Evaluating a symbolic comparison records it as a guard.
        bool(size <= max(factor * node.hint, least))


def guard_equal(one: Any, other: Any) -> None:
    """Guard two sizes, which were equal when they were traced, so that Dynamo recompiles if not."""
    bool(one == other)
