"""Row regions: heads with their losses and MLPs, and what is none."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx
from torch.nn import functional as F

from fxckpt.passes.tiles.row_regions import row_regions
from fxckpt.passes.tiles.unroll import unroll
from tests.passes.tiles.heads import (
    CLASSES,
    INNER,
    LOSSES,
    ROWS,
    TARGET,
    WIDTH,
    assert_near,
    divided,
    exact,
    joint_of,
    outputs,
    shifted,
    values,
    widest,
)


def swiglu(x: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
    return ((F.silu(x @ gate) * (x @ up)) @ down).pow(2).sum()


def gelu(x: Tensor, up: Tensor, bias: Tensor, down: Tensor) -> Tensor:
    return (F.gelu(F.linear(x, up, bias)) @ down).pow(2).sum()


def fused_swiglu(x: Tensor, both: Tensor, down: Tensor) -> Tensor:
    gate, up = (x @ both).chunk(2, -1)
    return ((F.silu(gate) * up) @ down).pow(2).sum()


def of_three_dims(x: Tensor, up: Tensor, down: Tensor) -> Tensor:
    return (F.gelu(x.view(2, 12, WIDTH) @ up) @ down).pow(2).sum()


MLPS: dict[str, tuple[Callable[..., Tensor], tuple[Tensor, ...]]] = {
    "SwiGLU": (
        swiglu,
        (values(ROWS, WIDTH), values(WIDTH, INNER), values(WIDTH, INNER), values(INNER, WIDTH)),
    ),
    "GELU": (
        gelu,
        (values(ROWS, WIDTH), values(INNER, WIDTH), values(INNER), values(INNER, WIDTH)),
    ),
    "fused SwiGLU": (
        fused_swiglu,
        (values(ROWS, WIDTH), values(WIDTH, 2 * INNER), values(INNER, WIDTH)),
    ),
    "batch and length": (
        of_three_dims,
        (values(ROWS, WIDTH), values(WIDTH, INNER), values(INNER, WIDTH)),
    ),
}


@pytest.mark.parametrize("name", LOSSES)
def test_heads_with_their_losses(name: str) -> None:
    """In 3 tiles, loss and gradients are those in float64."""
    function = LOSSES[name]
    given = values(ROWS, WIDTH), values(WIDTH, CLASSES), TARGET
    module = joint_of(function, *given)
    unroll(module.graph, [divided(module, 3)], 3)
    module.graph.lint()
    assert widest(module) <= ROWS * CLASSES // 2
    assert_near(outputs(module, given), exact(function, given), 2e-6)


def test_tiles_of_positions_where_batches_are_few() -> None:
    """More tiles than batches divide the positions, also where the last one has no target."""
    given = values(ROWS, WIDTH), values(WIDTH, CLASSES), TARGET
    module = joint_of(shifted, *given)
    region = divided(module, 5)
    assert region.length == ROWS // 4 and not region.divides(6)
    unroll(module.graph, [region], 5)
    assert_near(outputs(module, given), exact(shifted, given), 2e-6)


@pytest.mark.parametrize("count", [2, 5])
@pytest.mark.parametrize("name", MLPS)
def test_mlps(name: str, count: int) -> None:
    """Forward and backward are tiled alike, by a number that divides the rows or not."""
    function, given = MLPS[name]
    module = joint_of(function, *given)
    region = divided(module, count)
    assert region.forward and region.backward
    unroll(module.graph, [region], count)
    module.graph.lint()
    assert_near(outputs(module, given), exact(function, given), 2e-6)


def test_small_types_are_added_up_in_float32() -> None:
    """Many tiles in bfloat16 are no farther from float64 than the whole."""
    given = (
        values(512, WIDTH, dtype=torch.bfloat16),
        values(INNER, WIDTH, dtype=torch.bfloat16),
        values(INNER, dtype=torch.bfloat16),
        values(INNER, WIDTH, dtype=torch.bfloat16),
    )
    expected = exact(gelu, given)

    def error(module: fx.GraphModule) -> Tensor:
        found = outputs(module, given)
        return torch.stack(
            [(f - e).norm() / e.norm() for f, e in zip(found, expected, strict=True)]
        )

    whole = error(joint_of(gelu, *given))
    module = joint_of(gelu, *given)
    unroll(module.graph, [divided(module, 64)], 64)
    assert (error(module) <= 1.5 * whole + 1e-3).all()


NO_REGIONS: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "wide values are an output": lambda x, w: (x @ w).exp(),
    "attention": lambda x, w: ((q := x @ w) @ q.t()).softmax(-1).sum(),
    "dropout": lambda x, w: F.dropout((x @ w).exp(), 0.5).sum(),
    "rows are mixed": lambda x, w: (x @ w).cumsum(0).exp().sum(),
    "narrow": lambda x, w: (x @ w[:, :WIDTH]).exp().sum(),
    "sorted": lambda x, w: ((x @ w).sort(1)[0] ** 2).sum(),
    "normalized over rows": lambda x, w: ((y := (x @ w).exp()) / y.sum(0)).pow(2).sum(),
}


@pytest.mark.parametrize("name", NO_REGIONS)
def test_what_is_no_region(name: str) -> None:
    """A wide value that an op across rows, a random one or the user reads is left whole."""
    module = joint_of(NO_REGIONS[name], values(ROWS, WIDTH), values(WIDTH, INNER))
    assert row_regions(module.graph) == ()
