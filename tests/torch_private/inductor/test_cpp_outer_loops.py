"""Loops by tiles of rows, in which Inductor keeps a value for one row."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch._inductor.utils import fresh_cache

import fxckpt


def image_norm_gradient(
    g: Tensor,
    x: Tensor,
    y: Tensor,
    gate: Tensor,
    mean: Tensor,
    rstd: Tensor,
    scale: Tensor,
    more: Tensor,
) -> tuple[Tensor, Tensor]:
    """What a LayerNorm's backward computes where the values lie with their rows innermost."""
    normal = (x.transpose(1, 2) + gate * y - mean) * rstd
    scaled = g * scale
    first, second = scaled.sum(-1, keepdim=True), (scaled * normal).sum(-1, keepdim=True)
    return normal * scale, more.transpose(1, 2) + rstd / 128 * (
        scaled * 128 - first - normal * second
    )


def test_tiles_of_rows_give_the_right_result() -> None:
    """Results are right where a loop over tiles of rows keeps one value per row."""
    shapes = (
        (4, 256, 128),
        (4, 128, 256),
        (4, 256, 128),
        (4, 1, 128),
        (4, 256, 1),
        (4, 256, 1),
        (4, 1, 128),
        (4, 128, 256),
    )
    inputs = [torch.randn(shape) for shape in shapes]
    torch._dynamo.reset()
    with fresh_cache():
        found: Any = torch.compile(image_norm_gradient, backend=fxckpt.Backend())(*inputs)
    torch.testing.assert_close(found, image_norm_gradient(*inputs), rtol=1e-4, atol=1e-2)
