"""Row rules: how ops act on the rows of a value, as a table over ops.

The rows of a value are a part of one of its dimensions (:class:`Rows`). A rule is given what is
known of an op's operands and result, and says where the rows of all of them lie: an op is row-wise
if each row of its result is computed from the rows of its operands at the same place and from
values without rows (broadcast), and a reduction over rows if its result is a sum over them
(:data:`SUMMED`). An op without a rule, or with arguments that its rule does not cover, is not
tiled.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from fxckpt.ops.in_place import ELEMENTWISE
from fxckpt.ops.kernels import cross_entropy_backward
from fxckpt.ops.properties import is_mutating, is_random
from fxckpt.torch_private import (
    OpOverload,
    Size,
    exact_quotient,
    is_surely_at_most,
    is_surely_equal,
    plain_size,
    size_hint,
)

aten = torch.ops.aten


MEAN, SUM = 1, 2
"""Reductions of a loss, as torch numbers them."""


class Summed(enum.Enum):
    """The result of a reduction over rows."""

    SUMMED = "summed"


SUMMED = Summed.SUMMED


@dataclass(frozen=True, eq=False)
class Rows:
    """Where the rows of a region lie in a value.

    The dimension ``dim`` has ``outer * length * inner`` elements; of the three factors, the middle
    one is that of the rows ``start``, ``start + 1``, ... of the region. Two are equal if they are
    for all sizes that vary.
    """

    dim: int
    outer: Size
    start: Size
    length: Size
    inner: Size

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, Rows)
            and self.dim == other.dim
            and all(map(is_surely_equal, self._sizes, other._sizes))
        )

    def __hash__(self) -> int:
        return hash(self.dim)

    @property
    def _sizes(self) -> tuple[Size, ...]:
        return self.outer, self.start, self.length, self.inner

    @property
    def is_fixed(self) -> bool:
        """Whether all its sizes are numbers."""
        return all(isinstance(size, int) for size in self._sizes)

    @property
    def size(self) -> Size:
        """Elements of the dimension."""
        return plain_size(self.outer * self.length * self.inner)

    def at_planned_sizes(self) -> Rows:
        """Return the same rows with numbers for sizes, those that they are planned for."""
        return Rows(self.dim, *map(size_hint, self._sizes))

    def part(self, first: Size, last: Size) -> Rows:
        """Return the rows of a tile, those from ``first`` to before ``last`` of the region.

        All of them must be rows of the value, unless they are numbers.
        """
        begin, end = self.start, plain_size(self.start + self.length)
        if all(isinstance(size, int) for size in (first, last, begin, end)):
            first, last = max(first, begin), min(last, end)
            last = max(first, last)
        return replace(self, start=first, length=plain_size(last - first))


Place = Rows | Summed | None
"""Where the rows of a value lie; None for a value without rows."""


@dataclass(frozen=True)
class Places:
    """Where the rows of an op's operands and of its result lie."""

    operands: Mapping[fx.Node, Rows | None]
    result: Place | tuple[Place, ...]


@dataclass(frozen=True)
class RowCall:
    """An op, with what is known of the rows of its operands and of its result."""

    node: fx.Node
    operands: Mapping[fx.Node, Rows]
    """Operands that have rows."""
    result: Rows | None
    """Rows of the result; None if they are not known."""


Rule = Callable[[RowCall], Places | None]
"""Returns None where the op does not act row by row, or where too little is known."""
Args = tuple[Any, ...]
Adapt = Callable[[fx.Node, "Rows | None", Rows, Args], Args]
"""Returns the arguments of an op for a tile, given the tile's rows of an operand and the result."""


@dataclass(frozen=True)
class RowRule:
    """The rule of an op, and what of its arguments depends on the number of rows."""

    places: Rule
    adapt: Adapt | None = None
    position: int = 0
    """Argument that is the operand whose rows ``adapt`` is given."""


def _shape(node: fx.Node) -> tuple[Size, ...]:
    return tuple(node.meta["val"].shape)


def _args(node: fx.Node) -> tuple[Any, ...]:
    return node.args


def _kwargs(node: fx.Node) -> dict[str, Any]:
    return node.kwargs


def _first(node: fx.Node) -> fx.Node:
    """Return the first argument of an op, a value."""
    operand = node.args[0]
    assert isinstance(operand, fx.Node)
    return operand


def _tensor_operands(node: fx.Node) -> list[fx.Node]:
    return [n for n in node.all_input_nodes if isinstance(n.meta.get("val"), torch.Tensor)]


def _from_right(shape: Sequence[Size], rows: Rows, right: int) -> Rows | None:
    """Return the rows of a value that is broadcast with others, by the distance from the right."""
    dim = len(shape) - right
    is_whole = dim >= 0 and is_surely_equal(shape[dim], rows.size)
    return replace(rows, dim=dim) if is_whole else None


def _known(call: RowCall) -> tuple[tuple[Size, ...], Rows] | None:
    """Return the shape and the rows of a value of the call that has rows."""
    if call.result is not None:
        return _shape(call.node), call.result
    for node, rows in call.operands.items():
        return _shape(node), rows
    return None


def _elementwise(call: RowCall) -> Places | None:
    """Rule of element-wise ops, whose operands are broadcast."""
    if (known := _known(call)) is None:
        return None
    shape, rows = known
    right = len(shape) - rows.dim
    result = _from_right(_shape(call.node), rows, right)
    if result is None:
        return None
    return Places(
        {n: _from_right(_shape(n), rows, right) for n in _tensor_operands(call.node)}, result
    )


def _along(position: int, *, count: int) -> Rule:
    """Rule of ops along one dimension, whose first ``count`` operands have the result's dims."""

    def places(call: RowCall) -> Places | None:
        found = _elementwise(call)
        if found is None or not isinstance(found.result, Rows):
            return None
        operands = [n for n in _args(call.node)[:position] if isinstance(n, fx.Node)]
        ndim = len(_shape(call.node))
        if len(operands) < count or any(found.operands[n] is None for n in operands):
            return None
        dim = _args(call.node)[position]
        if dim % ndim == found.result.dim or any(len(_shape(n)) != ndim for n in operands):
            return None
        return found

    return places


def _gather(call: RowCall) -> Places | None:
    """Rule of ``gather(self, dim, index)`` and ``scatter(self, dim, index, source)``."""
    ndim = len(_shape(call.node))
    dim = _args(call.node)[1]
    known = _known(call)
    operands = _tensor_operands(call.node)
    if known is None or not ndim or any(len(_shape(n)) != ndim for n in operands):
        return None
    _, rows = known
    are_whole = all(is_surely_equal(_shape(n)[rows.dim], rows.size) for n in operands)
    if rows.dim == dim % ndim or not are_whole:
        return None
    return Places(dict.fromkeys(operands, rows), rows)


def _reduced(call: RowCall) -> Places | None:
    """Rule of reductions over dimensions given as the second argument."""
    node = call.node
    (operand,) = _tensor_operands(node)
    shape = _shape(operand)
    given = _args(node)[1] if len(node.args) > 1 else _kwargs(node).get("dim")
    keeps = _args(node)[2] if len(node.args) > 2 else _kwargs(node).get("keepdim", False)
    listed = [given] if isinstance(given, int) else list(given or range(len(shape)))
    dims = {d % max(1, len(shape)) for d in listed}
    rows = call.operands.get(operand)
    left = [d for d in range(len(shape)) if keeps or d not in dims]
    if rows is None and call.result is not None:
        rows = replace(call.result, dim=left[call.result.dim])
    if rows is None:
        return None
    if rows.dim in dims:
        is_sum = node.target is aten.sum.dim_IntList
        return Places({operand: rows}, SUMMED) if is_sum else None
    return Places({operand: rows}, replace(rows, dim=left.index(rows.dim)))


def _total(call: RowCall) -> Places | None:
    """Rule of the sum over all elements."""
    rows = next(iter(call.operands.items()), None)
    return None if rows is None else Places({rows[0]: rows[1]}, SUMMED)


def _matmul(call: RowCall) -> Places | None:
    """Rule of ``mm(a, b)``."""
    a, b = _args(call.node)[-2:]
    return _matmul_of(call, a, b)


def _matmul_of(call: RowCall, a: fx.Node, b: fx.Node) -> Places | None:
    left, right = call.operands.get(a), call.operands.get(b)
    if a is b:
        return None
    if call.result is not None:
        if call.result.dim == 0:
            return None if right else Places({a: call.result, b: None}, call.result)
        return None if left else Places({a: None, b: call.result}, call.result)
    if (left and left.dim == 1) or (right and right.dim == 0):
        inner = left or right
        assert inner is not None
        return Places({a: replace(inner, dim=1), b: replace(inner, dim=0)}, SUMMED)
    if left:
        return Places({a: left, b: None}, left)
    return Places({a: None, b: right}, right) if right else None


def _addmm(call: RowCall) -> Places | None:
    """Rule of ``addmm(bias, a, b)``: a bias is added to each row."""
    bias, a, b = _args(call.node)
    found = _matmul_of(call, a, b)
    if found is None or not isinstance(found.result, Rows):
        return None
    added = _from_right(_shape(bias), found.result, 2 - found.result.dim)
    return Places({**found.operands, bias: added}, found.result)


def regrouped(rows: Rows, shape: Sequence[Size], other: Sequence[Size]) -> Rows | None:
    """Return the rows of a value of one shape when it is viewed in another one.

    >>> regrouped(Rows(0, 4, 0, 256, 1), (1024, 8), (4, 256, 8))
    Rows(dim=1, outer=1, start=0, length=256, inner=1)
    """
    before = math.prod(shape[: rows.dim]) * rows.outer
    after = rows.inner * math.prod(shape[rows.dim + 1 :])
    for dim, size in enumerate(other):
        ahead, behind = math.prod(other[:dim]), math.prod(other[dim + 1 :])
        outer, inner = exact_quotient(before, ahead), exact_quotient(after, behind)
        if outer is None or inner is None:
            continue
        if is_surely_equal(plain_size(outer * rows.length * inner), size):
            return replace(rows, dim=dim, outer=outer, inner=inner)
    return None


def _mapped(
    call: RowCall, there: Callable[[Rows], Rows | None], back: Callable[[Rows], Rows | None]
) -> Places | None:
    """Return the places of an op with one operand, by two maps between operand and result."""
    operand = _first(call.node)
    rows = call.operands.get(operand)
    if rows is None:
        rows = None if call.result is None else back(call.result)
    result = None if rows is None else there(rows)
    return None if rows is None or result is None else Places({operand: rows}, result)


def _view(call: RowCall) -> Places | None:
    """Rule of views of another shape."""
    operand = _first(call.node)
    old, new = _shape(operand), _shape(call.node)
    return _mapped(call, lambda r: regrouped(r, old, new), lambda r: regrouped(r, new, old))


def _permuted(order: Callable[[fx.Node], Sequence[int]]) -> Rule:
    """Rule of permutations; ``order`` gives the operand's dimension for each of the result's."""

    def places(call: RowCall) -> Places | None:
        dims = order(call.node)
        return _mapped(
            call,
            lambda r: replace(r, dim=dims.index(r.dim)),
            lambda r: replace(r, dim=dims[r.dim]),
        )

    return places


def _turned(node: fx.Node) -> Sequence[int]:
    """Return the order of dimensions of ``t``, ``transpose`` and ``permute``."""
    operand = _first(node)
    ndim = len(_shape(operand))
    dims = list(range(ndim))
    if node.target is aten.permute.default:
        order = _args(node)[1]
        return [int(d) % ndim for d in order]
    if node.target is aten.t.default:
        return dims[::-1]
    first, second = (int(d) % ndim for d in _args(node)[1:3])
    dims[first], dims[second] = dims[second], dims[first]
    return dims


def _unsqueezed(call: RowCall) -> Places | None:
    at = _args(call.node)[1] % len(_shape(call.node))
    return _mapped(
        call,
        lambda r: replace(r, dim=r.dim + (r.dim >= at)),
        lambda r: None if r.dim == at else replace(r, dim=r.dim - (r.dim > at)),
    )


def _squeezed(call: RowCall) -> Places | None:
    operand = _first(call.node)
    given = _args(call.node)[1]
    ndim = len(_shape(operand))
    gone = {d % ndim for d in ([given] if isinstance(given, int) else given)}
    left = [d for d in range(ndim) if d not in gone or not is_surely_equal(_shape(operand)[d], 1)]
    return _mapped(
        call,
        lambda r: replace(r, dim=left.index(r.dim)) if r.dim in left else None,
        lambda r: replace(r, dim=left[r.dim]),
    )


def _slice_of(node: fx.Node) -> tuple[int, Size | None, Size | None, int]:
    """Return dimension, begin, end and step of ``slice``, ``slice_backward``, ``slice_scatter``.

    Begin and end are None where sizes that vary leave it open what they are.
    """
    is_back = node.target is aten.slice_backward.default
    is_written = node.target is aten.slice_scatter.default
    whole, part = (node, _args(node)[0]) if is_back else (_args(node)[0], node)
    part = _args(node)[1] if is_written else part
    given = [*_args(node)[2 if is_back or is_written else 1 :], *[None] * 4]
    values = [v.meta["val"] if isinstance(v, fx.Node) else v for v in given[:4]]
    dim, begin, end, step = values
    dim, step = (dim or 0) % len(_shape(whole)), 1 if step is None else step
    size, left = _shape(whole)[dim], _shape(part)[dim]
    begin, end = 0 if begin is None else begin, size if end is None else end
    if all(isinstance(v, int) for v in (begin, end, size)):
        begin, end = (min(max(v + size if v < 0 else v, 0), size) for v in (begin, end))
        return dim, begin, max(begin, end), step
    begin, end = (plain_size(v + size) if is_surely_at_most(v, -1) else v for v in (begin, end))
    end = size if is_surely_at_most(size, end) else end
    # That many elements are left by a slice of which neither end was moved.
    is_known = step == 1 and is_surely_equal(plain_size(end - begin), left)
    return (dim, begin, end, step) if is_known else (dim, None, None, step)


def _narrowed(rows: Rows, node: fx.Node) -> Rows | None:
    """Return the rows that a slice leaves, or None where it cuts through a row's place."""
    dim, begin, end, step = _slice_of(node)
    if rows.dim != dim:
        return rows
    if begin is None or end is None or not _is_sliced_alone(rows, step):
        return None
    return replace(rows, start=plain_size(rows.start + begin), length=plain_size(end - begin))


def _widened(rows: Rows, node: fx.Node, size: Size) -> Rows | None:
    """Return the rows of a value, of this size, of which a slice leaves the given ones."""
    dim, begin, _, step = _slice_of(node)
    if rows.dim != dim:
        return rows
    if begin is None or not _is_sliced_alone(rows, step):
        return None
    return replace(rows, start=plain_size(rows.start - begin), length=size)


def _is_sliced_alone(rows: Rows, step: int) -> bool:
    """Return whether a slice of the rows' dimension leaves out rows, each as a whole."""
    return is_surely_equal(rows.outer, 1) and is_surely_equal(rows.inner, 1) and step == 1


def _sliced(call: RowCall) -> Places | None:
    """Rule of ``slice``: of the rows themselves some may be left out."""
    node, operand = call.node, _args(call.node)[0]
    assert isinstance(operand, fx.Node)
    size = _shape(operand)[_slice_of(node)[0]]
    return _mapped(call, lambda r: _narrowed(r, node), lambda r: _widened(r, node, size))


def _padded(call: RowCall) -> Places | None:
    """Rule of ``slice_backward``: rows that were left out get zeros."""
    node = call.node
    size = _shape(node)[_slice_of(node)[0]]
    return _mapped(call, lambda r: _widened(r, node, size), lambda r: _narrowed(r, node))


def _written(call: RowCall) -> Places | None:
    """Rule of ``slice_scatter(whole, part)``: of the rows themselves some may be the part's."""
    node = call.node
    whole, part = _args(node)[:2]
    rows = call.result or call.operands.get(whole)
    if rows is None and (given := call.operands.get(part)) is not None:
        rows = _widened(given, node, _shape(node)[_slice_of(node)[0]])
    left = None if rows is None else _narrowed(rows, node)
    return None if left is None else Places({whole: rows, part: left}, rows)


def _split(call: RowCall) -> Places | None:
    """Rule of ``split`` along another dimension."""
    operand = _first(call.node)
    rows = call.operands.get(operand) or call.result
    dim = _args(call.node)[2] if len(call.node.args) > 2 else 0
    if rows is None or dim % len(_shape(operand)) == rows.dim:
        return None
    return Places({operand: rows}, (rows,) * len(call.node.meta["val"]))


def _joined(call: RowCall) -> Places | None:
    """Rule of ``cat`` along another dimension."""
    known = _known(call)
    dim = _args(call.node)[1] if len(call.node.args) > 1 else 0
    if known is None or dim % len(_shape(call.node)) == known[1].dim:
        return None
    return Places(dict.fromkeys(_tensor_operands(call.node), known[1]), known[1])


def _made(call: RowCall) -> Places | None:
    """Rule of ops that make a value of a given size from nothing."""
    return None if call.result is None else Places({}, call.result)


def _loss(call: RowCall) -> Places | None:
    """Rule of ``nll_loss_forward(log_probabilities, target, weight, reduction, ignore)``."""
    scores, target, weight, reduction = _args(call.node)[:4]
    if len(_shape(scores)) != 2:
        return None
    rows = call.operands.get(scores) or call.operands.get(target)
    if rows is None or rows.dim != 0:
        return None
    operands: dict[fx.Node, Rows | None] = {scores: rows, target: rows}
    if isinstance(weight, fx.Node):
        operands[weight] = None
    return Places(operands, (SUMMED if reduction else rows, SUMMED))


def _loss_backward(call: RowCall) -> Places | None:
    """Rule of ``nll_loss_backward(tangent, scores, target, weight, reduction, ignore, total)``.

    That of cross entropy has these arguments too, and one more.
    """
    tangent, scores, target, weight, reduction, _, total = _args(call.node)[:7]
    rows = call.result or call.operands.get(scores) or call.operands.get(target)
    if len(_shape(scores)) != 2 or rows is None or rows.dim != 0:
        return None
    operands: dict[fx.Node, Rows | None] = {
        tangent: None if reduction else rows,
        scores: rows,
        target: rows,
        total: None,
    }
    if isinstance(weight, fx.Node):
        operands[weight] = None
    return Places(operands, rows)


def _resize(position: int) -> Adapt:
    """Return the adaptation of ops that are given the size of their result."""

    def adapt(node: fx.Node, operand: Rows | None, result: Rows, args: Args) -> Args:
        shape = list(_shape(node))
        shape[result.dim] = result.size
        return (*args[:position], shape, *args[position + 1 :])

    return adapt


def _span(part: Rows, whole: Rows) -> tuple[Size, Size]:
    """Return where rows begin and end within those that they are a part of."""
    begin = plain_size(part.start - whole.start)
    return begin, plain_size(begin + part.length)


def _slice_tile(node: fx.Node, operand: Rows | None, result: Rows, args: Args) -> Args:
    """Adapt ``slice``: a tile leaves out those of its rows that are left out of all."""
    dim, begin, end, step = _slice_of(node)
    assert operand is not None
    if dim == result.dim:
        begin, end = _span(result, operand)
    return args if begin is None else (args[0], dim, begin, end, step)


def _pad_tile(node: fx.Node, operand: Rows | None, result: Rows, args: Args) -> Args:
    """Adapt ``slice_backward``."""
    dim, begin, end, step = _slice_of(node)
    assert operand is not None
    shape = list(_shape(node))
    shape[result.dim] = result.size
    if dim == result.dim:
        begin, end = _span(operand, result)
    rest = args[2:] if begin is None else (dim, begin, end, step)
    return args[0], shape, *rest


def _write_tile(node: fx.Node, operand: Rows | None, result: Rows, args: Args) -> Args:
    """Adapt ``slice_scatter``; the operand is what is written."""
    dim, begin, end, step = _slice_of(node)
    assert operand is not None
    if dim == result.dim:
        begin, end = _span(operand, result)
    return args if begin is None else (*args[:2], dim, begin, end, step)


AT_ONE = {
    aten._log_softmax.default: 1,
    aten._softmax.default: 1,
    aten.cumsum.default: 1,
    aten.log_softmax.int: 1,
    aten.softmax.int: 1,
}
"""Ops along the dimension that is their second argument."""

RULES: dict[OpOverload, RowRule] = {
    **{op: RowRule(_along(at, count=1)) for op, at in AT_ONE.items()},
    aten._log_softmax_backward_data.default: RowRule(_along(2, count=2)),
    aten._softmax_backward_data.default: RowRule(_along(2, count=2)),
    aten.gather.default: RowRule(_gather),
    aten.scatter.value: RowRule(_gather),
    aten.scatter.src: RowRule(_gather),
    aten.scatter_add.default: RowRule(_gather),
    **{
        op: RowRule(_reduced)
        for op in (
            aten.sum.dim_IntList,
            aten.mean.dim,
            aten.amax.default,
            aten.amin.default,
            aten.logsumexp.default,
            aten.argmax.default,
            aten.any.dim,
        )
    },
    aten.sum.default: RowRule(_total),
    aten.mm.default: RowRule(_matmul),
    aten.addmm.default: RowRule(_addmm),
    **{
        op: RowRule(_view, _resize(1))
        for op in (aten.view.default, aten._unsafe_view.default, aten.reshape.default)
    },
    **{
        op: RowRule(_permuted(_turned))
        for op in (aten.t.default, aten.transpose.int, aten.permute.default)
    },
    aten.unsqueeze.default: RowRule(_unsqueezed),
    aten.squeeze.dim: RowRule(_squeezed),
    aten.squeeze.dims: RowRule(_squeezed),
    aten.expand.default: RowRule(_elementwise, _resize(1)),
    aten.slice.Tensor: RowRule(_sliced, _slice_tile),
    aten.slice_backward.default: RowRule(_padded, _pad_tile),
    aten.slice_scatter.default: RowRule(_written, _write_tile, position=1),
    aten.split.Tensor: RowRule(_split),
    aten.split_with_sizes.default: RowRule(_split),
    aten.cat.default: RowRule(_joined),
    aten.full.default: RowRule(_made, _resize(0)),
    aten.zeros.default: RowRule(_made, _resize(0)),
    aten.ones.default: RowRule(_made, _resize(0)),
    aten.new_zeros.default: RowRule(_made, _resize(1)),
    aten.new_full.default: RowRule(_made, _resize(1)),
    aten.new_ones.default: RowRule(_made, _resize(1)),
    aten.nll_loss_forward.default: RowRule(_loss),
    aten.nll_loss_backward.default: RowRule(_loss_backward),
    cross_entropy_backward: RowRule(_loss_backward),
    torch.ops.prims.convert_element_type.default: RowRule(_elementwise),
}
"""Rules by op; :func:`row_rule` adds element-wise ops."""

LIKE = frozenset(
    ("alias", "detach", "clone", "_to_copy", "lift_fresh_copy", "zeros_like", "ones_like")
)
"""Element-wise ops that torch does not tag so: copies, and values of the size of another."""


def row_rule(node: fx.Node) -> RowRule | None:
    """Return the rule of an op, or None if it has none.

    Ops that draw random numbers have none: tiles would draw others.
    """
    if not isinstance(node.target, OpOverload) or is_random(node) or is_mutating(node):
        return None
    if node.target in RULES:
        return RULES[node.target]
    name = node.target._opname
    if node.target.namespace != "aten" or len(node.target._schema.returns) != 1:
        return None
    is_elementwise = torch.Tag.pointwise in node.target.tags or name in (ELEMENTWISE | LIKE)
    return RowRule(_elementwise) if is_elementwise else None
