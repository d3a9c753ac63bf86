"""Models of the tests of Inductor's planner, and makers of a model with its input."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class Images(nn.Module):
    """Convolutions of several kinds, normalized, with a residual and an in-place activation.

    The forward peaks above the backward.
    """

    def __init__(self) -> None:
        super().__init__()
        self.first, self.grouped = (
            nn.Conv2d(8, 16, 3, padding=1),
            nn.Conv2d(16, 16, 3, padding=1, groups=4, padding_mode="reflect"),
        )
        self.depthwise, self.up = (
            nn.Conv2d(16, 16, 3, padding=1, groups=16),
            nn.ConvTranspose2d(16, 8, 2, stride=2),
        )
        self.norm, self.other, self.instance = (
            nn.BatchNorm2d(16),
            nn.BatchNorm2d(16),
            nn.InstanceNorm2d(8, affine=True),
        )

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.norm(self.first(x)), inplace=True)
        x = F.silu(self.other(self.grouped(x))) + x
        return F.gelu(self.instance(self.up(self.depthwise(x)))).square().mean()


def images() -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    return Images(), torch.randn(8, 8, 24, 24)


class Constants(nn.Module):
    """Tensors made in the forward: constants of the graph."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(48, 48)

    def forward(self, x: Tensor) -> Tensor:
        h = self.layer(x).tanh() * torch.tensor([1.0, 2.0]).repeat(24)
        return self.layer(h)[:, torch.tensor([1, 2, 5])].square().mean()


class Next(nn.Module):
    """A language model's loss on all but the last tokens; its embedding is its head."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(1000, 32)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(32), nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32))
            for _ in range(6)
        )

    def forward(self, x: Tensor) -> Tensor:
        tokens = (1000 * x).long()
        h = self.table(tokens)
        for layer in self.layers:
            h = h + layer(h)
        logits = h @ self.table.weight.t()
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


class Grouped(nn.Module):
    """Depthwise convolutions, as in ConvNeXt: the backward runs in another layout."""

    def __init__(self, groups: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 48, 4, 4)
        self.layers = nn.ModuleList(
            nn.Conv2d(48, 48, 7, padding=3, groups=groups) for _ in range(2)
        )
        self.norms = nn.ModuleList(nn.LayerNorm(48) for _ in range(2))
        self.wide = nn.ModuleList(
            nn.Sequential(nn.Linear(48, 96), nn.GELU(), nn.Linear(96, 48)) for _ in range(2)
        )

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for layer, norm, wide in zip(self.layers, self.norms, self.wide, strict=True):
            x = x + wide(norm(layer(x).permute(0, 2, 3, 1))).permute(0, 3, 1, 2)
        return x.square().mean()


class Skips(nn.Module):
    """Two levels down and up, with a skip connection around the lower one."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.down, self.up = self.block(8, 16), self.block(16, 32), self.block(48, 16)

    @staticmethod
    def block(before: int, after: int) -> nn.Module:
        return nn.Sequential(
            nn.Conv2d(before, after, 3, padding=1), nn.GroupNorm(4, after), nn.SiLU()
        )

    def forward(self, x: Tensor) -> Tensor:
        around = self.first(x)
        below = self.down(F.max_pool2d(around, 2))
        return (
            self.up(torch.cat([F.interpolate(below, scale_factor=2.0), around], 1)).square().mean()
        )


def skips() -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    return Skips(), torch.randn(4, 8, 32, 32)


def next_tokens() -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    return Next(), torch.rand(8, 64)
