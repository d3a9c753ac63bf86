"""Used rows: positions that a loss leaves out are not computed."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, fx
from torch.nn import functional as F

from fxckpt.passes.tiles.gradient_ahead import run_ahead
from fxckpt.passes.tiles.row_regions import RowRegion, row_regions
from fxckpt.passes.tiles.unroll import unroll
from tests.joints import inductor_joint, normalize
from tests.passes.tiles.heads import (
    CLASSES,
    ROWS,
    TARGET,
    WIDTH,
    assert_near,
    exact,
    joint_of,
    outputs,
    shifted,
    values,
)

LENGTH = ROWS // 4
aten = torch.ops.aten


def copied(x: Tensor, w: Tensor, target: Tensor) -> Tensor:
    """The shift of many trainers: logits are sliced, and copied."""
    logits = (x.view(4, -1, WIDTH) @ w).float()
    rows = logits[..., :-1, :].contiguous().view(-1, CLASSES)
    return F.cross_entropy(rows, target.view(4, -1)[..., 1:].contiguous().view(-1))


def capped(x: Tensor, w: Tensor, target: Tensor) -> Tensor:
    """The gradient of what is sliced goes through another op before the head."""
    logits = 30 * torch.tanh(x.view(4, -1, WIDTH) @ w / 30)
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), target.view(4, -1)[:, 1:].flatten())


def from_the_second(x: Tensor, w: Tensor, target: Tensor) -> Tensor:
    """The first position is left out."""
    logits = x.view(4, -1, WIDTH) @ w
    return F.cross_entropy(logits[:, 1:].flatten(0, 1), target.view(4, -1)[:, 1:].flatten())


def with_z_loss(x: Tensor, w: Tensor, target: Tensor) -> Tensor:
    """Another loss reads all positions."""
    logits = x.view(4, -1, WIDTH) @ w
    loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), target.view(4, -1)[:, 1:].flatten())
    return loss + logits.logsumexp(-1).pow(2).mean()


def with_bias(x: Tensor, w: Tensor, target: Tensor) -> Tensor:
    """All rows of a value that is not sliced are added up in the backward."""
    return shifted(x, w + x.mean(), target)


def in_two_parts(x: Tensor, w: Tensor, target: Tensor) -> Tensor:
    """Two slices leave out nothing together."""
    logits = x.view(4, -1, WIDTH) @ w
    return logits[:, :-1].exp().sum() + logits[:, 1:].exp().sum()


GIVEN = values(ROWS, WIDTH), values(WIDTH, CLASSES), TARGET


def region_of(graph: fx.Graph) -> RowRegion:
    """The one region of a graph."""
    ((first, *_),) = row_regions(graph)
    return first


def most_elements(graph: fx.Graph) -> int:
    """Elements of the largest value of a graph."""
    return max(n.meta["val"].numel() for n in graph.nodes if isinstance(n.meta.get("val"), Tensor))


@pytest.mark.parametrize("count", [1, 2, 5])
@pytest.mark.parametrize("function", [shifted, copied, capped, from_the_second, with_bias])
def test_unused_rows_are_not_computed(function: Callable[..., Tensor], count: int) -> None:
    """Loss and gradients are those of all rows; no value has them all, and none is sliced."""
    module = joint_of(function, *GIVEN)
    region = region_of(module.graph)
    assert region.has_unused and region.used[1] - region.used[0] == LENGTH - 1
    unroll(module.graph, [region], count)
    module.graph.lint()
    rows = 4 * -(-(LENGTH - 1) // count)
    assert most_elements(module.graph) == max(rows, WIDTH) * CLASSES
    assert_near(outputs(module, GIVEN), exact(function, GIVEN), 2e-6)


@pytest.mark.parametrize("function", [shifted, copied, from_the_second])
def test_unused_rows_are_left_out_ahead(function: Callable[..., Tensor]) -> None:
    """So it is where gradients are computed with the forward."""
    module = joint_of(function, *GIVEN)
    assert run_ahead(module.graph, region_of(module.graph))
    region = region_of(module.graph).grown_again()
    assert region is not None and region.has_unused and not region.backward
    unroll(module.graph, [region], 1)
    assert most_elements(module.graph) == 4 * (LENGTH - 1) * CLASSES
    assert_near(outputs(module, GIVEN), exact(function, GIVEN), 2e-6)


@pytest.mark.parametrize("function", [with_z_loss, in_two_parts])
def test_used_rows_are_all_computed(function: Callable[..., Tensor]) -> None:
    """A region of which something reads each row is left whole by one tile."""
    module = joint_of(function, *GIVEN)
    for ways in row_regions(module.graph):
        for region in ways:
            assert not region.has_unused and not region.divides(1)


def test_one_tile_copies_nothing() -> None:
    """What sliced and copied the logits is gone, and the gradient is not padded."""
    module = joint_of(copied, *GIVEN)
    unroll(module.graph, [region_of(module.graph)], 1)
    wide = [
        n.target
        for n in module.graph.nodes
        if isinstance(n.meta.get("val"), Tensor) and n.meta["val"].numel() > ROWS * WIDTH
    ]
    removed = {aten.slice.Tensor, aten.clone.default, aten.slice_backward.default}
    assert removed.isdisjoint(wide)


def inductors_joint(function: Callable[..., Tensor]) -> fx.GraphModule:
    """The joint graph as Inductor decomposes it, which writes a gradient into zeros."""
    module, _ = inductor_joint(function, *GIVEN)
    normalize(module, for_inductor=True)
    assert module.graph.find_nodes(op="call_function", target=aten.slice_scatter.default)
    return module


@pytest.mark.parametrize("count", [1, 2, 5])
@pytest.mark.parametrize("function", [shifted, copied, capped, from_the_second])
def test_gradients_written_into_zeros_are_not_padded(
    function: Callable[..., Tensor], count: int
) -> None:
    """Rows that Inductor's decomposition fills with zeros are unused too."""
    module = inductors_joint(function)
    region = region_of(module.graph)
    assert region.has_unused and region.used[1] - region.used[0] == LENGTH - 1
    unroll(module.graph, [region], count)
    module.graph.lint()
    rows = 4 * -(-(LENGTH - 1) // count)
    assert most_elements(module.graph) == max(rows, WIDTH) * CLASSES
    assert not module.graph.find_nodes(op="call_function", target=aten.slice_scatter.default)
    assert_near(outputs(module, GIVEN), exact(function, GIVEN), 2e-6)


def test_zeros_are_not_written_into_ahead() -> None:
    """Writing a gradient into zeros is linear in it."""
    module = inductors_joint(shifted)
    assert run_ahead(module.graph, region_of(module.graph))
    region = region_of(module.graph).grown_again()
    assert region is not None and region.has_unused and not region.backward
    unroll(module.graph, [region], 2)
    assert_near(outputs(module, GIVEN), exact(shifted, GIVEN), 2e-6)


@pytest.mark.parametrize("count", [2, 3])
@pytest.mark.parametrize("function", [with_z_loss, in_two_parts])
def test_rows_are_written_in_tiles(function: Callable[..., Tensor], count: int) -> None:
    """Where each row is used, a tile writes those of its rows that the gradient has."""
    module = inductors_joint(function)
    region = next(way for (way, *_) in row_regions(module.graph) if way.divides(count))
    assert not region.has_unused
    unroll(module.graph, [region], count)
    module.graph.lint()
    given = GIVEN[: len(module.graph.find_nodes(op="placeholder")) - 1]
    assert_near(outputs(module, given), exact(function, GIVEN), 2e-6)
