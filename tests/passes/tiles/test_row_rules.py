"""Row rules: an op on the rows of a tile gives those rows of its result, or a part of its sum."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx

from fxckpt.ops.kernels import cross_entropy_backward
from fxckpt.passes.tiles.row_rules import SUMMED, RowCall, Rows, row_rule

aten = torch.ops.aten
R, D = 6, 5


def x(*shape: int) -> Tensor:
    """A tensor of distinct values."""
    return torch.linspace(-2, 3, torch.Size(shape).numel()).view(shape)


INDEX = torch.tensor([0, 3, 1, 4, 2, 0])
CASES: dict[str, tuple[Callable[..., Any], tuple[Tensor, ...], int, int]] = {
    # op, its operands, which of them has rows, and in which dimension
    "add": (lambda a, b: a + b, (x(R, D), x(D)), 0, 0),
    "add broadcast rows": (lambda a, b: a + b, (x(R, 1), x(R, D)), 1, 0),
    "where": (lambda m, a, b: torch.where(m, a, b), (x(R, D) > 0, x(R, D), x(1, D)), 0, 0),
    "gelu": (lambda a: aten.gelu(a), (x(2, R, D),), 0, 1),
    "to": (lambda a: a.to(torch.float64), (x(R, D),), 0, 0),
    "log_softmax": (lambda a: aten._log_softmax(a, -1, False), (x(R, D),), 0, 0),
    "softmax": (lambda a: aten._softmax(a, 2, False), (x(2, R, D),), 0, 1),
    "log_softmax_backward": (
        lambda g, o: aten._log_softmax_backward_data(g, o, 1, torch.float32),
        (x(R, D), x(R, D).cos()),
        1,
        0,
    ),
    "gather": (lambda a, i: a.gather(1, i), (x(R, D), INDEX[:, None]), 0, 0),
    "scatter": (lambda a, i: a.scatter(1, i, 1.0), (x(R, D), INDEX[:, None]), 1, 0),
    "scatter_add": (
        lambda a, i, s: a.scatter_add(1, i, s),
        (x(R, D), INDEX[:, None], x(R, 1)),
        2,
        0,
    ),
    "cumsum": (lambda a: a.cumsum(1), (x(R, D),), 0, 0),
    "sum of others": (lambda a: a.sum(2), (x(2, R, D),), 0, 1),
    "sum of others, first": (lambda a: a.sum(0), (x(2, R, D),), 0, 1),
    "sum keepdim": (lambda a: a.sum(0, keepdim=True), (x(2, R, D),), 0, 1),
    "mean of others": (lambda a: a.mean(-1), (x(R, D),), 0, 0),
    "amax": (lambda a: a.amax(1, keepdim=True), (x(R, D),), 0, 0),
    "logsumexp": (lambda a: a.logsumexp(1), (x(R, D),), 0, 0),
    "argmax": (lambda a: a.argmax(1), (x(R, D),), 0, 0),
    "sum over rows": (lambda a: a.sum(0), (x(R, D),), 0, 0),
    "sum over all": (lambda a: a.sum(), (x(R, D),), 0, 0),
    "mm": (lambda a, b: a @ b, (x(R, D), x(D, 3)), 0, 0),
    "mm, rows as columns": (lambda a, b: a @ b, (x(3, D), x(D, R)), 1, 1),
    "mm over rows": (lambda a, b: a @ b, (x(D, R), x(R, 3)), 0, 1),
    "mm over rows, second": (lambda a, b: a @ b, (x(D, R), x(R, 3)), 1, 0),
    "addmm": (lambda c, a, b: aten.addmm(c, a, b), (x(3), x(R, D), x(D, 3)), 1, 0),
    "view": (lambda a: a.view(R, 1, D), (x(R, D),), 0, 0),
    "view of more rows": (lambda a: a.view(R * 2, D), (x(R, 2, D),), 0, 0),
    "t": (lambda a: a.t(), (x(R, D),), 0, 0),
    "transpose": (lambda a: a.transpose(0, 2), (x(2, R, D),), 0, 1),
    "permute": (lambda a: a.permute(1, 2, 0), (x(2, R, D),), 0, 1),
    "unsqueeze": (lambda a: a.unsqueeze(0), (x(R, D),), 0, 0),
    "unsqueeze after": (lambda a: a.unsqueeze(-1), (x(R, D),), 0, 0),
    "squeeze": (lambda a: a.squeeze(1), (x(R, 1, D),), 0, 0),
    "expand": (lambda a: a.expand(2, R, D), (x(R, 1),), 0, 0),
    "slice of others": (lambda a: aten.slice(a, 1, 1, 3), (x(R, D),), 0, 0),
    "slice of rows": (lambda a: aten.slice(a, 0, 1, -1), (x(R, D),), 0, 0),
    "slice_backward": (lambda a: aten.slice_backward(a, [R, 8], 1, 1, 6, 1), (x(R, D),), 0, 0),
    "slice_scatter": (lambda a, b: aten.slice_scatter(a, b, 1, 1, 4), (x(R, D), x(R, 3)), 0, 0),
    "slice_scatter of rows": (
        lambda a, b: aten.slice_scatter(a, b, 0, 1, -1),
        (x(R, D), x(R - 2, D).cos()),
        0,
        0,
    ),
    "slice_scatter of a part": (
        lambda a, b: aten.slice_scatter(a, b, 1, 0, -1),
        (x(R, D), x(R, D - 1).cos()),
        1,
        0,
    ),
    "split": (lambda a: a.split(2, 1), (x(R, 4),), 0, 0),
    "cat": (lambda a, b: torch.cat([a, b], 1), (x(R, D), x(R, 2)), 0, 0),
    "nll_loss": (lambda a, i: aten.nll_loss_forward(a, i, None, 2, 3), (x(R, D), INDEX), 0, 0),
    "nll_loss of each": (
        lambda a, i: aten.nll_loss_forward(a, i, None, 0, -100)[0],
        (x(R, D), INDEX),
        1,
        0,
    ),
    "nll_loss_backward": (
        lambda g, a, i, w: aten.nll_loss_backward(g, a, i, None, 1, -100, w),
        (x(1)[0], x(R, D), INDEX, torch.tensor(6.0)),
        1,
        0,
    ),
    "cross_entropy_backward": (
        lambda g, a, i, w: cross_entropy_backward(g, a, i, None, 1, -100, w, torch.float32),
        (x(1)[0], x(R, D), INDEX, torch.tensor(6.0)),
        1,
        0,
    ),
    "convert": (
        lambda a: torch.ops.prims.convert_element_type(a, torch.float64),
        (x(R, D),),
        0,
        0,
    ),
}


def op_of(graph: fx.Graph) -> fx.Node:
    """The last op of a graph that is no item of a tuple."""
    return [n for n in graph.nodes if n.op == "call_function" and row_rule(n) is not None][-1]


def rows_of(value: Tensor, rows: Rows, first: int, last: int) -> Tensor:
    """The rows of a tile, of a value that has rows."""
    part = rows.part(first, last)
    return value.narrow(rows.dim, (part.start - rows.start) * rows.inner, part.size)


@pytest.mark.parametrize("name", CASES)
def test_tiles_compute_rows_of_the_whole(name: str) -> None:
    """Two tiles give the rows of the result, bit for bit where the kernel allows, or its sum."""
    function, values, position, dim = CASES[name]
    module = make_fx(function, tracing_mode="fake")(*values)
    inputs = module.graph.find_nodes(op="placeholder")
    node = op_of(module.graph)
    known = dict(zip(inputs, values, strict=True))
    whole = Rows(dim, 1, 0, values[position].shape[dim], 1)
    rule = row_rule(node)
    assert rule is not None
    found = rule.places(RowCall(node, {inputs[position]: whole}, None))
    assert found is not None
    results = []
    target: Any = node.target
    for first, last in ((0, 4), (4, R)):

        def piece(arg: fx.Node, first: int = first, last: int = last) -> Tensor:
            rows = found.operands.get(arg)
            value = known[arg]
            return value if rows is None else rows_of(value, rows, first, last)

        args = fx.map_arg(node.args, piece)
        place = found.result
        if rule.adapt is not None and isinstance(place, Rows):
            operand = found.operands.get(node.args[rule.position])  # type: ignore[arg-type]
            part = None if operand is None else operand.part(first, last)
            args = rule.adapt(node, part, place.part(first, last), tuple(args))
        results.append(target(*args, **node.kwargs))
    complete = target(*fx.map_arg(node.args, known.__getitem__), **node.kwargs)
    places = found.result if isinstance(found.result, tuple) else (found.result,)
    parts = [r if isinstance(r, (tuple, list)) else (r,) for r in results]
    wholes = complete if isinstance(complete, (tuple, list)) else (complete,)
    for place, of_whole, *of_tiles in zip(places, wholes, *parts, strict=True):
        joined = sum(of_tiles) if place is SUMMED else torch.cat(of_tiles, place.dim)  # type: ignore[union-attr]
        torch.testing.assert_close(joined, of_whole)


REFUSED: dict[str, tuple[Callable[..., Any], Tensor, int]] = {
    "softmax along rows": (lambda a: aten._softmax(a, 0, False), x(R, D), 0),
    "cumsum along rows": (lambda a: a.cumsum(0), x(R, D), 0),
    "amax over rows": (lambda a: a.amax(0), x(R, D), 0),
    "view across rows": (lambda a: a.view(4, -1), x(R, 2 * D), 0),
    "split of rows": (lambda a: a.split(2, 0), x(R, D), 0),
    "cat of rows": (lambda a: torch.cat([a, a], 0), x(R, D), 0),
    "strided slice_scatter of rows": (
        lambda a: aten.slice_scatter(a, x(3, D), 0, 0, 6, 2),
        x(R, D),
        0,
    ),
    "strided slice of rows": (lambda a: aten.slice(a, 0, 0, 6, 2), x(R, D), 0),
}


@pytest.mark.parametrize("name", REFUSED)
def test_ops_across_rows_are_refused(name: str) -> None:
    """An op that mixes rows, or puts them in another order, is not tiled."""
    function, value, dim = REFUSED[name]
    module = make_fx(function, tracing_mode="fake")(value)
    (given,) = module.graph.find_nodes(op="placeholder")
    node = op_of(module.graph)
    rule = row_rule(node)
    assert rule is not None
    assert rule.places(RowCall(node, {given: Rows(dim, 1, 0, value.shape[dim], 1)}, None)) is None


def test_random_and_unknown_ops_have_no_rule() -> None:
    """Tiles would draw other numbers; a sort, or an op of a user, is not known."""

    def f(a: Tensor) -> tuple[Tensor, ...]:
        return torch.bernoulli(a), aten.native_dropout(a, 0.5, True)[0], a.sort()[0], a @ a.t() @ a

    module = make_fx(f, tracing_mode="fake")(x(R, D).abs())
    named = {
        n.target._opname: row_rule(n) for n in module.graph.nodes if hasattr(n.target, "_opname")
    }
    without = [name for name, rule in named.items() if rule is None]
    assert without == ["bernoulli", "native_dropout", "sort"]
