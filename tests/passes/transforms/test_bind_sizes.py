"""Bind sizes: the first op that finds a size binds it, and no other."""

from __future__ import annotations

from collections.abc import Callable

import torch
from expecttest import assert_expected_inline
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx

from fxckpt.passes.transforms.bind_sizes import bind_sizes
from fxckpt.torch_private import BINDINGS
from tests.passes.graphs import lines_of

aten = torch.ops.aten


def traced(function: Callable[..., tuple[Tensor, ...]], *inputs: Tensor) -> fx.Graph:
    """The graph of a function with sizes that are known only when it runs."""
    return make_fx(function, tracing_mode="symbolic")(*inputs).graph


def binders(graph: fx.Graph) -> list[str]:
    return [node.name for node in graph.nodes if node.meta.get(BINDINGS)]


def selected(x: Tensor, mask: Tensor) -> tuple[Tensor, ...]:
    return x[mask], x.sin()[mask]


INPUTS = torch.randn(6, 2), torch.tensor([True, False, True, True, False, True])


def test_trace_binds_once() -> None:
    """Two selections by one mask have one size, which the trace binds at the first."""
    graph = traced(selected, *INPUTS)
    bind_sizes(graph)
    lines = (f"{text} binds" if node.meta.get(BINDINGS) else text for node, text in lines_of(graph))
    assert_expected_inline(
        "\n".join(lines),
        """\
x_1: input
mask_1: input
index = index(x_1, [mask_1]) binds
sin = sin(x_1)
index_1 = index(sin, [mask_1])
return [index, index_1]""",
    )


def test_first_remaining_reader_binds() -> None:
    """Where the first reader of a mask is gone, the second binds the size."""
    graph = traced(selected, *INPUTS)
    first, second = graph.find_nodes(op="call_function", target=aten.index.Tensor)
    assert binders(graph) == [first.name]
    expected = first.meta[BINDINGS]
    graph.output_node().args = ((second,),)
    graph.erase_node(first)
    bind_sizes(graph)
    assert binders(graph) == [second.name]
    assert second.meta[BINDINGS] == expected


def test_recompute_does_not_bind() -> None:
    """A copy of a reader finds the size bound already."""
    graph = traced(selected, *INPUTS)
    first, second = graph.find_nodes(op="call_function", target=aten.index.Tensor)
    with graph.inserting_before(second):
        recompute = graph.node_copy(first)
    recompute.meta[BINDINGS] = dict(first.meta[BINDINGS])
    bind_sizes(graph)
    assert binders(graph) == [first.name]


def test_each_mask_has_its_own_size() -> None:
    """Ops that count different tensors bind a size each."""
    graph = traced(lambda x, mask: (x[mask], x[~mask], (x > 0).nonzero()), *INPUTS)
    expected = binders(graph)
    bind_sizes(graph)
    assert len(expected) == 3
    assert binders(graph) == expected


def test_size_of_a_tuple_is_bound() -> None:
    """``unique`` binds the size of one of its results."""
    graph = traced(lambda x: torch.unique(x, return_inverse=True), torch.tensor([3, 1, 3]))
    (unique,) = (node for node in graph.nodes if "unique" in str(node.target))
    expected = unique.meta.pop(BINDINGS)
    bind_sizes(graph)
    assert unique.meta[BINDINGS] == expected
