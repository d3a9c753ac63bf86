"""Unrolling: tile after tile in ordinary nodes, in each half."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from expecttest import assert_expected_inline
from torch import Tensor, fx
from torch._subclasses import FakeTensor, FakeTensorMode

import fxckpt
from fxckpt.passes.tiles.gradient_ahead import run_ahead
from fxckpt.passes.tiles.row_regions import row_regions
from fxckpt.passes.tiles.row_rules import Rows
from fxckpt.passes.tiles.unroll import emit_call, unroll
from fxckpt.torch_private import storage_id
from tests.passes.graphs import text_of, traced

aten = torch.ops.aten


def head(
    primals_hidden: Tensor, primals_weight: Tensor, primals_target: Tensor, tangents: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """A head with its loss, and the gradients of hidden states and weight."""
    scores = aten._log_softmax(primals_hidden @ primals_weight, 1, False)
    loss, total = aten.nll_loss_forward(scores, primals_target, None, 1, -100)
    back = aten.nll_loss_backward(tangents, scores, primals_target, None, 1, -100, total)
    back = aten._log_softmax_backward_data(back, scores, 1, torch.float32)
    return loss, back @ primals_weight.t(), primals_hidden.t() @ back


def inputs(rows: int = 6, width: int = 2, classes: int = 9) -> tuple[Tensor, ...]:
    """Hidden states, a weight, targets and a gradient of the loss."""
    generator = torch.Generator().manual_seed(0)
    return (
        torch.randn(rows, width, generator=generator),
        torch.randn(width, classes, generator=generator),
        torch.randint(classes, (rows,), generator=generator),
        torch.tensor(0.7),
    )


def tiled_head(count: int) -> fx.GraphModule:
    """The joint graph of the head, unrolled."""
    module = traced(head, *inputs())
    ((region,),) = row_regions(module.graph)
    unroll(module.graph, [region], count)
    module.graph.lint()
    module.recompile()
    return module


def small(primals_x: Tensor, primals_w: Tensor, tangents: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """A wide hidden layer whose values are added up, and the gradients of both inputs."""
    hidden = (primals_x @ primals_w).tanh()
    back = aten.tanh_backward(tangents.expand(6, 9), hidden)
    return hidden.sum(), back @ primals_w.t(), primals_x.t() @ back


def tiled_small() -> fx.GraphModule:
    """The joint graph of the layer, in two tiles."""
    module = traced(small, torch.ones(6, 2), torch.ones(2, 9), torch.tensor(0.5))
    ((region,),) = row_regions(module.graph)
    unroll(module.graph, [region], 2)
    module.graph.lint()
    return module


def test_tiles_follow_one_another_in_each_half() -> None:
    """Sums are accumulated from tile to tile, and the gradients of rows are joined."""
    assert_expected_inline(
        text_of(tiled_small().graph),
        """\
primals_x_1: input
primals_w_1: input
tangents_1: input
primals_x_1_tile_0 = slice(primals_x_1, 0, 0, 3)
mm_tile_0 = mm(primals_x_1_tile_0, primals_w_1)
tanh_tile_0 = tanh(mm_tile_0)
sum_1_tile_0 = sum(tanh_tile_0)
primals_x_1_tile_1 = slice(primals_x_1, 0, 3, 6)
mm_tile_1 = mm(primals_x_1_tile_1, primals_w_1)
tanh_tile_1 = tanh(mm_tile_1)
sum_1_tile_1 = sum(tanh_tile_1)
add_tensor = add(sum_1_tile_0, sum_1_tile_1)
t = t(primals_w_1)
t_1 = t(primals_x_1)
expand_tile_0 = expand(tangents_1, [3, 9])
tanh_backward_tile_0 = tanh_backward(expand_tile_0, tanh_tile_0)
mm_1_tile_0 = mm(tanh_backward_tile_0, t)
t_1_tile_0 = slice(t_1, 1, 0, 3)
mm_2_tile_0 = mm(t_1_tile_0, tanh_backward_tile_0)
expand_tile_1 = expand(tangents_1, [3, 9])
tanh_backward_tile_1 = tanh_backward(expand_tile_1, tanh_tile_1)
mm_1_tile_1 = mm(tanh_backward_tile_1, t)
t_1_tile_1 = slice(t_1, 1, 3, 6)
mm_2_tile_1 = addmm(mm_2_tile_0, t_1_tile_1, tanh_backward_tile_1)
mm_1_whole = cat([mm_1_tile_0, mm_1_tile_1], 0)
return [add_tensor, mm_1_whole, mm_2_tile_1]""",
    )


def test_products_in_half_precision_are_added_in_float32() -> None:
    """The sum begins with zeros, so that no product is stored beside it."""
    half = [torch.ones(6, 2, dtype=torch.bfloat16), torch.ones(2, 9, dtype=torch.bfloat16)]
    module = traced(small, *half, torch.tensor(0.5, dtype=torch.bfloat16))
    ((region,),) = row_regions(module.graph)
    unroll(module.graph, [region], 2)
    lines = text_of(module.graph).splitlines()
    assert_expected_inline(
        "\n".join(line for line in lines if "mm_2" in line or "full" in line),
        """\
full_default = full([2, 9], 0, dtype=torch.float32, device=device(type='cpu'))
mm_2_tile_0 = accumulate_mm(full_default, t_1_tile_0, tanh_backward_tile_0)
mm_2_tile_1 = accumulate_mm(mm_2_tile_0, t_1_tile_1, tanh_backward_tile_1)
_to_copy_default_2 = _to_copy(mm_2_tile_1, dtype=torch.bfloat16)""",
    )


def test_gradients_are_those_of_the_whole() -> None:
    """Gradients are as near to those in float64 as untiled ones."""
    exact = head(*(t.double() if t.is_floating_point() else t for t in inputs()))
    for found, expected in zip(tiled_head(3)(*inputs()), exact, strict=True):
        torch.testing.assert_close(found, expected.float())


def test_losses_of_rows_keep_their_bits() -> None:
    """What is computed of one row does not depend on the other rows."""

    def f(primals_x: Tensor, primals_w: Tensor, tangents: Tensor) -> tuple[Tensor, Tensor]:
        scores = (primals_x @ primals_w).log_softmax(1)
        return scores.exp().cumsum(1).sum(1), primals_x.t() @ (scores * tangents[:, None])

    # Matmuls of small whole numbers are exact, in any order of their terms.
    given = inputs()[0].round(), inputs()[1].round(), torch.ones(6)
    module = traced(f, *given)
    whole = module(*given)[0]
    ((region,),) = row_regions(module.graph)
    unroll(module.graph, [region], 3)
    module.recompile()
    assert torch.equal(module(*given)[0], whole)


def test_last_tile_may_be_smaller() -> None:
    """Rows that no number of tiles divides are all computed."""
    module = tiled_head(4)
    shapes = [
        tuple(n.meta["val"].shape) for n in module.graph.nodes if n.name.startswith("mm_tile")
    ]
    assert shapes == [(2, 9), (2, 9), (2, 9)]
    loss, *_ = module(*inputs())
    torch.testing.assert_close(loss, head(*inputs())[0])


@pytest.mark.parametrize("is_ahead", [False, True])
def test_views_of_what_leaves_share_its_storage(is_ahead: bool) -> None:
    """Neither of joined rows nor of sums is there a copy, and views of views are views too."""

    def viewed(primals_x: Tensor, primals_w: Tensor, tangents: Tensor) -> tuple[Tensor, ...]:
        loss, rows, gradient = small(primals_x, primals_w, tangents)
        columns = gradient.t()
        return loss, rows.view(3, 4), rows.sin(), columns, columns[1:], columns.cos()

    module = traced(viewed, torch.ones(6, 2), torch.ones(2, 9), torch.tensor(0.5))
    ((region,),) = row_regions(module.graph)
    if is_ahead:
        assert run_ahead(module.graph, region)
        ((region,),) = row_regions(module.graph)
    unroll(module.graph, [region], 2)
    views = [n for n in module.graph.nodes if n.target in (aten.view.default, aten.slice.Tensor)]
    views += module.graph.find_nodes(op="call_function", target=aten.t.default)
    assert len(views) > 4
    for view in views:
        assert storage_id(view.meta["val"]) == storage_id(view.args[0].meta["val"])


def lying(last: Callable[[Tensor], Tensor]) -> tuple[fx.GraphModule, tuple[Tensor, ...], Tensor]:
    """A tiled layer of which some columns leave transposed, its inputs, and what is read of them.

    ``last`` reads them.
    """

    def f(primals_x: Tensor, primals_w: Tensor, tangents: Tensor) -> tuple[Tensor, ...]:
        hidden = (primals_x @ primals_w).tanh()
        back = aten.tanh_backward(tangents.expand(6, 40), hidden)
        columns = hidden.t() * 3
        return last(columns[:3]), columns.sum(0), back @ primals_w.t(), primals_x.t() @ back

    given = (*inputs(classes=40)[:2], torch.tensor(0.5))
    module = traced(f, *given)
    ((region,),) = row_regions(module.graph)
    unroll(module.graph, [region], 2)
    module.graph.lint()
    module.recompile()
    assert any(node.name == "slice_1_whole" for node in module.graph.nodes)
    return module, given, f(*given)[0]


@pytest.mark.parametrize(
    "last",
    [
        lambda columns: columns.exp().as_strided((2, 3), (1, 3)),
        lambda columns: columns.exp().t().view(-1),
        lambda columns: columns.t().exp().view(-1),
    ],
)
def test_readers_of_joined_rows_lie_as_before(last: Callable[[Tensor], Tensor]) -> None:
    """What is computed of rows that were transposed is as in the whole, also by place in memory."""
    module, given, expected = lying(last)
    torch.testing.assert_close(module(*given)[0], expected)


def test_readers_of_memory_refuse_tiles() -> None:
    """Rows that were a part of a storage are read by their place in it."""
    with pytest.raises(fxckpt.InvalidOption, match="as_strided reads how slice_1 lies in memory"):
        lying(lambda columns: columns.as_strided((2, 3), (1, 40)).cos())


def test_rows_that_do_not_add_up_are_refused() -> None:
    """Tiles of a value with more rows than its place says are joined to no value."""
    module = traced(small, torch.ones(6, 2), torch.ones(2, 9), torch.tensor(0.5))
    ((region,),) = row_regions(module.graph)
    places = {
        node: replace(place, length=5) if isinstance(place, Rows) and node.name == "mm_1" else place
        for node, place in region.places.items()
    }
    with pytest.raises(AssertionError, match="6 rows in place of 5"):
        unroll(module.graph, [replace(region, places=places)], 2)


def test_values_of_a_size_are_fake() -> None:
    """A tile of zeros takes no memory while the graph is made."""
    with FakeTensorMode() as mode:
        like = torch.empty(8, 4)
    graph = fx.Graph()
    operand = graph.placeholder("x")
    operand.meta["val"] = like
    zeros = emit_call(graph, aten.zeros.default, ([2, 4],), {}, operand)
    value = zeros.meta["val"]
    assert isinstance(value, FakeTensor) and value.fake_mode is mode and value.shape == (2, 4)
