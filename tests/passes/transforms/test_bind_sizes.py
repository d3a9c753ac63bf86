"""Bind sizes: whoever looks first binds a size that is found, and no other."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx

from fxckpt.passes.transforms.bind_sizes import bind_sizes
from fxckpt.torch_private import BINDINGS

aten = torch.ops.aten


def traced(function: Callable[..., tuple[Tensor, ...]], *inputs: Tensor) -> fx.Graph:
    return make_fx(function, tracing_mode="symbolic")(*inputs).graph


def binders(graph: fx.Graph) -> list[str]:
    return [node.name for node in graph.nodes if node.meta.get(BINDINGS)]


def halves(x: Tensor, mask: Tensor) -> tuple[Tensor, ...]:
    return x[mask], x.sin()[mask]


INPUTS = torch.randn(6, 2), torch.tensor([True, False, True, True, False, True])


def test_the_first_that_is_left_binds() -> None:
    graph = traced(halves, *INPUTS)
    first, second = graph.find_nodes(op="call_function", target=aten.index.Tensor)
    assert binders(graph) == [first.name]
    expected = first.meta[BINDINGS]
    graph.output_node().args = ((second,),)
    graph.erase_node(first)
    bind_sizes(graph)
    assert binders(graph) == [second.name]
    assert second.meta[BINDINGS] == expected


def test_what_runs_again_on_the_same_mask_does_not_bind_again() -> None:
    graph = traced(halves, *INPUTS)
    first, second = graph.find_nodes(op="call_function", target=aten.index.Tensor)
    with graph.inserting_before(second):
        again = graph.node_copy(first)
    again.meta[BINDINGS] = dict(first.meta[BINDINGS])
    bind_sizes(graph)
    assert binders(graph) == [first.name]


def test_what_counts_another_mask_binds_its_own() -> None:
    graph = traced(lambda x, mask: (x[mask], x[~mask], (x > 0).nonzero()), *INPUTS)
    expected = binders(graph)
    bind_sizes(graph)
    assert len(expected) == 3
    assert binders(graph) == expected


def test_the_size_of_one_of_several_results_is_found() -> None:
    graph = traced(lambda x: torch.unique(x, return_inverse=True), torch.tensor([3, 1, 3]))
    (unique,) = (node for node in graph.nodes if "unique" in str(node.target))
    expected = unique.meta.pop(BINDINGS)
    bind_sizes(graph)
    assert unique.meta[BINDINGS] == expected
