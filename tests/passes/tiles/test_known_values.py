"""Values of tiles of sizes that vary: those that are built are the ones that torch computes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import (
    DimDynamic,
    ShapeEnv,
    StatelessSymbolicContext,
)

from fxckpt.passes.tiles.unroll import _known_value, value_of
from fxckpt.torch_private import SizeNodes, size_key, storage_id, without_guards

aten = torch.ops.aten


def graph_of(*shape: int) -> tuple[fx.Graph, fx.Node]:
    """A graph with one input, of which all sizes but the last one vary."""
    mode = FakeTensorMode(shape_env=ShapeEnv())
    dims = [DimDynamic.DYNAMIC] * (len(shape) - 1) + [DimDynamic.STATIC]
    graph = fx.Graph()
    given = graph.placeholder("given")
    value = torch.empty(shape)
    given.meta["val"] = mode.from_tensor(
        value, symbolic_context=StatelessSymbolicContext(dynamic_sizes=dims)
    )
    return graph, given


def facts(value: torch.Tensor) -> tuple[Any, ...]:
    """What passes ask of a value."""
    sizes = (value.shape, value.stride(), (value.storage_offset(),))
    return tuple(tuple(map(size_key, s)) for s in sizes), value.dtype, value.device


def assert_known(node: fx.Node, is_view: bool) -> None:
    """Compare the value that is built with torch's."""
    given = node.args[0].meta["val"]  # type: ignore[union-attr]
    node.meta["val"] = given
    with without_guards(given):
        known = _known_value(node)
    assert known is not None
    expected = value_of(node)
    assert facts(known) == facts(expected)
    for value in (known, expected):
        assert (storage_id(value) == storage_id(given)) == is_view


@pytest.mark.parametrize("target", [aten.view.default, aten._unsafe_view.default])
@pytest.mark.parametrize("tiles", [1, 3])
def test_views(target: Any, tiles: int) -> None:
    """A view in fewer or more dimensions, of whole rows or of a part of them."""
    graph, given = graph_of(5, 12, 8)
    sizes = SizeNodes(graph)
    value = given.meta["val"]
    rows, length, width = value.shape
    length = (length + 1) // tiles
    part = graph.placeholder("part")
    with without_guards(value):
        part.meta["val"] = value.new_empty(rows * length, width)
    for shape in ([rows, length, width], [rows, length, 2, 4]):
        node = graph.call_function(target, (part, sizes.in_place_of(shape)))
        assert_known(node, is_view=True)
    node = graph.call_function(target, (given, sizes.in_place_of([rows * value.shape[1], width])))
    assert_known(node, is_view=True)


def test_transposed_and_copied() -> None:
    """Dimensions in another order, and a copy that is contiguous."""
    graph, given = graph_of(5, 12, 8)
    for dims in ((0, 1), (-1, 1)):
        node = graph.call_function(aten.transpose.int, (given, *dims))
        assert_known(node, is_view=True)
    whole = {"memory_format": torch.contiguous_format}
    assert_known(graph.call_function(aten.clone.default, (node,), whole), is_view=False)
    graph, given = graph_of(5, 8)
    assert_known(graph.call_function(aten.t.default, (given,)), is_view=True)


def test_what_torch_decides() -> None:
    """Views of what is not contiguous, with sizes of one, and of fixed sizes are left to torch."""
    graph, given = graph_of(5, 12, 8)
    rows, length, width = SizeNodes(graph).in_place_of(list(given.meta["val"].shape))
    nodes = [graph.call_function(aten.view.default, (given, [rows, 1, length, width]))]
    nodes.append(graph.call_function(aten.view.default, (given, [-1, width])))
    turned = graph.call_function(aten.transpose.int, (given, 0, 1))
    turned.meta["val"] = given.meta["val"].transpose(0, 1)
    nodes.append(graph.call_function(aten.view.default, (turned, [length, rows, 2, 4])))
    fixed = graph.placeholder("fixed")
    fixed.meta["val"] = given.meta["val"].new_empty(4, 8)
    nodes.append(graph.call_function(aten.t.default, (fixed,)))
    for node in nodes:
        node.meta["val"] = given.meta["val"]
        assert _known_value(node) is None
