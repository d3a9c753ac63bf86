"""Loops by tiles of rows, in which Inductor keeps a value for one row."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._inductor.utils import fresh_cache
from torch.nn import functional as F

import fxckpt


def image_norm_gradient(tangent: Tensor, image: Tensor, rows: Tensor, scale: Tensor, more: Tensor) -> tuple[Tensor, Tensor]:
    """What a LayerNorm's backward computes where the values lie with their rows innermost."""
    normal = image.transpose(1, 2) + rows
    scaled = tangent * scale
    first, second = scaled.sum(-1, keepdim=True), (scaled * normal).sum(-1, keepdim=True)
    return normal * scale, more.transpose(1, 2) + scaled * 128 - first - normal * second


class ScaledBlock(nn.Module):
    """A block of a diffusion transformer: LayerNorms scaled and shifted by a condition."""

    def __init__(self, dim: int = 128) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(dim, elementwise_affine=False)
        self.qkv, self.out, self.condition = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim), nn.Linear(dim, 6 * dim)
        self.mlp = nn.Sequential(nn.Linear(dim, 4 * dim), nn.GELU("tanh"), nn.Linear(4 * dim, dim))

    def forward(self, x: Tensor, condition: Tensor) -> Tensor:
        scale, shift, gate, scale_mlp, shift_mlp, gate_mlp = self.condition(F.silu(condition)).unsqueeze(1).chunk(6, -1)
        q, k, v = (t.unflatten(-1, (4, -1)).transpose(1, 2) for t in self.qkv(self.norm(x) * (1 + scale) + shift).chunk(3, -1))
        x = x + gate * self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        return x + gate_mlp * self.mlp(self.norm(x) * (1 + scale_mlp) + shift_mlp)


class DiffusionTransformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(4, 128, 2, 2)
        self.blocks = nn.ModuleList(ScaledBlock() for _ in range(4))

    def forward(self, image: Tensor, condition: Tensor) -> Tensor:
        x = self.patches(image).flatten(2).transpose(1, 2)
        for block in self.blocks:
            x = block(x, condition)
        return x


def test_each_row_of_a_tile_is_read_as_itself() -> None:
    shapes = ((4, 256, 128), (4, 128, 256), (4, 256, 128), (4, 1, 128), (4, 128, 256))
    inputs = [torch.randn(shape) for shape in shapes]
    inputs[2].requires_grad_()
    torch._dynamo.reset()
    with fresh_cache():
        found: Any = torch.compile(image_norm_gradient, backend=fxckpt.Backend())(*inputs)
    torch.testing.assert_close(found, image_norm_gradient(*inputs), rtol=1e-4, atol=1e-2)


@pytest.mark.parametrize("budget", [None, 0.7, 0.5])
def test_a_diffusion_transformer_has_its_gradients_at_every_budget(budget: float | None) -> None:
    torch.manual_seed(0)
    model, image, condition = DiffusionTransformer(), torch.randn(4, 4, 32, 32), torch.randn(4, 128)

    def gradients(run: Any) -> list[Tensor]:
        return list(torch.autograd.grad(run(image, condition).square().mean(), list(model.parameters())))

    expected = gradients(model)
    torch._dynamo.reset()
    with fresh_cache():
        found = gradients(torch.compile(model, backend=fxckpt.Backend(budget=budget)))
    for one, other in zip(found, expected, strict=True):
        assert (one - other).abs().max() <= 1e-4 * other.abs().max()
