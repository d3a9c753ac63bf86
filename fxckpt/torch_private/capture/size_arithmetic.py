"""Arithmetic on sizes, fixed or symbolic, that adds no guards."""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Iterable
from functools import cache, reduce
from typing import Any

import sympy  # type: ignore[import-untyped]
import torch
from torch import fx
from torch._prims_common import make_contiguous_strides_for
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx.experimental.symbolic_shapes import statically_known_true
from torch.utils._sympy.functions import FloorDiv, Max, Min, Mod, PythonMod

from fxckpt.errors import PlanningFailed
from fxckpt.torch_private.capture.sizes import has_hint, is_surely_equal, size_key

Size = int | torch.SymInt

OPERATORS: dict[Any, Any] = {
    sympy.Add: operator.add,
    sympy.Mul: operator.mul,
    FloorDiv: operator.floordiv,
    Max: torch.sym_max,
    Min: torch.sym_min,
    Mod: operator.mod,
    PythonMod: operator.mod,
}
"""Operators of expressions of sizes."""


def is_computed(size: Any) -> bool:
    """Return whether a size is fixed, or an expression of sizes of a graph's inputs.

    Those that depend on data, and those of nested tensors, are not.
    """
    if isinstance(size, int):
        return True
    is_number = has_hint(size) and isinstance(size.node.hint, int)
    return is_number and _has_operators(size.node.expr)


def _has_operators(expr: Any) -> bool:
    if expr.is_Integer or expr.is_Symbol:
        return True
    if expr.is_Pow:
        return bool(expr.exp.is_Integer and expr.exp > 0) and _has_operators(expr.base)
    return expr.func in OPERATORS and all(map(_has_operators, expr.args))


def plain_size(size: Size) -> Size:
    """Return a size written as a sum of products, as an int if it is a constant."""
    return size if isinstance(size, int) else _written(size_key(size), size)


def exact_quotient(size: Size, divisor: Size) -> Size | None:
    """Return a size over another one that surely divides it, or None."""
    if isinstance(size, int) and isinstance(divisor, int):
        return size // divisor if divisor and size % divisor == 0 else None
    known = divisor if isinstance(size, int) else size
    assert not isinstance(known, int)
    quotient = _cancelled(sympy.sympify(size_key(size)), sympy.sympify(size_key(divisor)))
    return None if quotient is None else _written(quotient, known)


def is_surely_at_most(one: Size, other: Size) -> bool:
    """Return whether a size is at most another one, for all values of their symbols."""
    return bool(statically_known_true(one <= other))


def is_surely_contiguous(tensor: torch.Tensor) -> bool:
    """Return whether a tensor is contiguous at all values of its sizes."""
    expected: Size = 1
    for size, stride in zip(reversed(tensor.shape), reversed(tensor.stride()), strict=True):
        if not is_surely_equal(size, 1):
            if not is_surely_equal(stride, expected):
                return False
            expected = expected * size
    return True


def is_laid_out_whole(tensor: torch.Tensor) -> bool:
    """Return whether a tensor has the strides that torch gives to a contiguous one of its sizes.

    They are those of a contiguous tensor wherever it has elements: torch takes no size for less
    than one there.
    """
    strides = make_contiguous_strides_for(tensor.shape)
    return all(map(is_surely_equal, tensor.stride(), strides))


def _written(expr: Any, known: torch.SymInt) -> Size:
    """Return an expression of the sizes that ``known`` is one of, as a size."""
    if expr.is_Integer:
        return int(expr)
    made: Size = known.node.shape_env.create_symintnode(expr, hint=None)
    return made


@cache
def _cancelled(size: Any, divisor: Any) -> Any:
    if divisor.is_zero:
        return None
    over, under = sympy.fraction(sympy.cancel(size / divisor))
    return sympy.expand(over) if under == 1 else None


def without_guards(value: Any) -> contextlib.AbstractContextManager[None]:
    """Return a context in which what is asked of the sizes of a trace adds no guards.

    Answers are those at the sizes of the trace. ``value`` is a fake value of it.
    """
    mode = value.fake_mode if isinstance(value, FakeTensor) else None
    env = None if mode is None else mode.shape_env
    return contextlib.nullcontext() if env is None else env.suppress_guards()


def _linear(size: Any, symbol: Any) -> tuple[int, int] | None:
    """Return factor and offset of a size that is a multiple of a symbol and a number, or None."""
    factor = size.coeff(symbol)
    offset = sympy.expand(size - factor * symbol)
    is_linear = factor.is_Integer and offset.is_Integer and factor > 0
    return (int(factor), int(offset)) if is_linear else None


class SizeNodes:
    """Nodes of a graph that compute sizes from those of its inputs, in front of all other ops."""

    def __init__(self, graph: fx.Graph) -> None:
        self.graph = graph
        self._known: dict[Any, fx.Node] = {}
        inputs = graph.find_nodes(op="placeholder")
        self._last = inputs[-1] if inputs else None
        for node in inputs:
            value = node.meta.get("val")
            if isinstance(value, torch.SymInt):
                self._known.setdefault(value.node.expr, node)
        self._inputs = [n for n in inputs if isinstance(n.meta.get("val"), torch.Tensor)]

    def in_place_of(self, args: Any) -> Any:
        """Return arguments with a node in place of each symbolic size."""
        return fx.node.map_aggregate(
            args, lambda arg: self.node_of(arg) if isinstance(arg, torch.SymInt) else arg
        )

    def node_of(self, size: Size) -> fx.Node | int:
        """Return a node that computes a size, or the size if it is a constant."""
        return size if isinstance(size, int) else self._of(size_key(size))

    def _of(self, expr: Any) -> fx.Node | int:
        if expr.is_Integer:
            return int(expr)
        if (known := self._known.get(expr)) is None:
            known = self._known[expr] = self._made(expr)
        return known

    def _made(self, expr: Any) -> fx.Node:
        if expr.is_Symbol:
            return self._read(expr)
        target = OPERATORS[sympy.Mul if expr.is_Pow else expr.func]
        parts: Iterable[Any] = map(self._of, expr.args)
        if expr.is_Pow:
            parts = [self._of(expr.base)] * int(expr.exp)
        elif expr.is_Add:
            # Sums of ever more sizes are made from one another.
            rest = next((rest for term in expr.args if (rest := expr - term) in self._known), None)
            if rest is not None:
                parts = map(self._of, (rest, expr - rest))
        made = reduce(lambda one, other: self._call(target, (one, other)), parts)
        assert isinstance(made, fx.Node)
        return made

    def _read(self, symbol: Any) -> fx.Node:
        """Return a node that reads a symbol from the shape of an input, or of one linear in it.

        Raises :class:`PlanningFailed` where no input tells it.
        """
        linear = []
        for node in self._inputs:
            for dim, size in enumerate(node.meta["val"].shape):
                if not isinstance(size, torch.SymInt):
                    continue
                if size.node.expr == symbol:
                    return self._call(torch.ops.aten.sym_size.int, (node, dim), size)
                if (found := _linear(size_key(size), symbol)) is not None:
                    linear.append((node, dim, size, *found))
        if not linear:
            raise PlanningFailed(
                f"no input of the graph has the size {symbol}, or a multiple of it, which an op "
                "needs to be given. Pass a tensor of that size to the model, or leave tiles out."
            )
        node, dim, size, factor, offset = linear[0]
        read = self._call(torch.ops.aten.sym_size.int, (node, dim), size)
        rest = self._call(operator.sub, (read, offset)) if offset else read
        return self._call(operator.floordiv, (rest, factor)) if factor != 1 else rest

    def _call(self, target: Any, args: tuple[Any, ...], value: Size | None = None) -> fx.Node:
        assert self._last is not None
        with self.graph.inserting_after(self._last):
            node = self.graph.call_function(target, args)
        self._last = node
        values = [arg.meta["val"] if isinstance(arg, fx.Node) else arg for arg in args]
        node.meta["val"] = target(*values) if value is None else value
        return node
