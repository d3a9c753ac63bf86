"""Models to rewrite, and the routes that capture them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional as F

from tests.models.zoo import ResNet

WIDTH = 32


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).view(4, 24, 3, 4, WIDTH // 4).permute(2, 0, 3, 1, 4).unbind(0)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).reshape(4, 24, WIDTH))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attn, self.drop = Attention(), nn.Dropout(0.1)
        self.mlp = nn.Sequential(
            nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)
        )

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.drop(self.attn(self.norm1(x)))
        return x + self.drop(self.mlp(self.norm2(x)))


class GPT(nn.Module):
    """A tiny GPT-2 that returns its loss; the head is tied to the embedding."""

    def __init__(self, layers: int = 2) -> None:
        super().__init__()
        self.wte = nn.Embedding(50, WIDTH)
        self.layers = nn.Sequential(*(Block() for _ in range(layers)))
        self.head = nn.Linear(WIDTH, 50, bias=False)
        self.head.weight = self.wte.weight

    def forward(self, ids: Tensor) -> Tensor:
        return F.cross_entropy(self.head(self.layers(self.wte(ids))).flatten(0, 1), ids.flatten())


def gpt() -> tuple[nn.Module, tuple[Tensor, ...]]:
    return GPT(), (torch.randint(0, 50, (4, 24)),)


def resnet() -> tuple[nn.Module, tuple[Tensor, ...]]:
    return ResNet(8, 2), (torch.randn(4, 3, 16, 16), torch.randint(0, 10, (4,)))


def by_dynamo(
    model: nn.Module, inputs: tuple[Tensor, ...]
) -> tuple[fx.GraphModule, tuple[Tensor, ...]]:
    """Return the graph and inputs of a Dynamo backend; parameters and buffers are inputs."""
    found: list[Any] = []

    def backend(gm: fx.GraphModule, example_inputs: list[Tensor]) -> Callable[..., Any]:
        found.append((gm, tuple(example_inputs)))
        return gm.forward

    torch.compile(model, backend=backend, fullgraph=True)(*inputs)
    return found[0]


ROUTES: dict[
    str, Callable[[nn.Module, tuple[Tensor, ...]], tuple[nn.Module, tuple[Tensor, ...]]]
] = {
    "module": lambda model, inputs: (model, inputs),
    "symbolic_trace": lambda model, inputs: (fx.symbolic_trace(model), inputs),
    "make_fx": lambda model, inputs: (make_fx(model)(*inputs), inputs),
    "export": lambda model, inputs: (torch.export.export(model, inputs).module(), inputs),
    "dynamo": by_dynamo,
}


def stack() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        *(nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Dropout(0.5)) for _ in range(2))
    )


SOURCES: dict[str, Callable[[nn.Module], nn.Module]] = {
    "module": lambda model: model,
    "graph": fx.symbolic_trace,
}


either = pytest.mark.parametrize("of", SOURCES.values(), ids=SOURCES)
