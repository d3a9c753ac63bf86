"""The models of the GPU benchmark, in plain torch: each returns its loss.

On the CPU they have the same parts at tiny sizes, so that every line runs without a GPU.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from unet import SdxlUNet


class Block(nn.Module):
    """LayerNorm, attention with dropout, and an MLP, as in GPT-2 and ViT."""

    def __init__(self, width: int, heads: int, dropout: float, is_causal: bool) -> None:
        super().__init__()
        self.heads, self.dropout, self.is_causal = heads, dropout, is_causal
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            t.unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for t in self.qkv(self.norms[0](x)).chunk(3, dim=-1)
        )
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=self.is_causal)
        x = x + F.dropout(self.out(attended.transpose(1, 2).flatten(2)), self.dropout)
        return x + F.dropout(self.down(F.gelu(self.up(self.norms[1](x)))), self.dropout)


class LlamaBlock(nn.Module):
    """RMSNorm, grouped attention, and a gated MLP; no biases, no dropout."""

    def __init__(self, width: int, heads: int, shared: int, inner: int) -> None:
        super().__init__()
        self.heads, self.shared, self.head = heads, shared, width // heads
        self.norms = nn.ModuleList(nn.RMSNorm(width) for _ in range(2))
        self.qkv = nn.Linear(width, width + 2 * shared * self.head, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.up, self.down = (
            nn.Linear(width, 2 * inner, bias=False),
            nn.Linear(inner, width, bias=False),
        )

    def forward(self, x: Tensor) -> Tensor:
        sizes = [n * self.head for n in (self.heads, self.shared, self.shared)]
        q, k, v = (
            t.unflatten(-1, (-1, self.head)).transpose(1, 2)
            for t in self.qkv(self.norms[0](x)).split(sizes, dim=-1)
        )
        k, v = (t.repeat_interleave(self.heads // self.shared, dim=1) for t in (k, v))
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        gate, up = self.up(self.norms[1](x)).chunk(2, dim=-1)
        return x + self.down(F.silu(gate) * up)


class Stack(nn.Module):
    """Blocks one after another; with ``by_block`` each in torch's checkpoint."""

    def __init__(self, blocks: list[nn.Module]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(blocks)
        self.by_block = False

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.by_block else block(x)
        return x


class Language(nn.Module):
    """Tokens in, the loss of the next token out; the head is tied to the embedding."""

    def __init__(self, vocabulary: int, length: int, width: int, stack: Stack, norm: nn.Module):
        super().__init__()
        self.tokens, self.stack, self.norm = nn.Embedding(vocabulary, width), stack, norm
        self.places = nn.Parameter(torch.zeros(length, width))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.norm(self.stack(self.tokens(tokens) + self.places))
        logits = F.linear(x[:, :-1], self.tokens.weight).float()
        return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


class Vision(nn.Module):
    """Images in patches, and the loss of their labels."""

    def __init__(self, patch: int, width: int, labels: int, stack: Stack) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, patch, stride=patch)
        self.stack, self.norm, self.head = stack, nn.LayerNorm(width), nn.Linear(width, labels)

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        x = self.norm(self.stack(self.patches(images).flatten(2).transpose(1, 2)))
        return F.cross_entropy(self.head(x.mean(1)).float(), labels)


class Diffusion(nn.Module):
    """A U-Net of SDXL's parts with its loss; with ``by_block`` each stage in a checkpoint."""

    def __init__(self, unet: SdxlUNet) -> None:
        super().__init__()
        self.unet = unet

    def forward(self, noisy: Tensor, noise: Tensor, added: Tensor, prompt: Tensor) -> Tensor:
        step = torch.ones(noisy.shape[0], dtype=torch.long, device=noisy.device)
        return self.unet(noisy, noise, step, added, prompt)


@dataclass(frozen=True)
class Made:
    """A model on its device, its inputs, and the modules whose calls a user would checkpoint."""

    model: nn.Module
    inputs: tuple[Tensor, ...]
    switch: Callable[[bool], None]
    """Turns the checkpoint of every block on or off."""


def gpt2(dtype: torch.dtype, device: str, *, is_tiny: bool) -> Made:
    """Return GPT-2 of 12 layers, with dropout."""
    layers, width, vocabulary, batch, length = (
        (2, 64, 97, 2, 32) if is_tiny else (12, 768, 50257, 16, 1024)
    )
    with torch.device(device):
        stack = Stack([Block(width, width // 32, 0.1, True) for _ in range(layers)])
        model = Language(vocabulary, length, width, stack, nn.LayerNorm(width))
        tokens = torch.randint(0, vocabulary, (batch, length))
    return _made(model.to(dtype), (tokens,), stack)


def llama(dtype: torch.dtype, device: str, *, is_tiny: bool) -> Made:
    """Return 8 layers of the width of Llama 3.2 1B."""
    layers, width, heads, shared, inner, vocabulary, batch, length = (
        (2, 64, 4, 2, 128, 97, 2, 32) if is_tiny else (8, 2048, 32, 8, 8192, 32000, 4, 2048)
    )
    with torch.device(device):
        stack = Stack([LlamaBlock(width, heads, shared, inner) for _ in range(layers)])
        model = Language(vocabulary, length, width, stack, nn.RMSNorm(width))
        tokens = torch.randint(0, vocabulary, (batch, length))
    return _made(model.to(dtype), (tokens,), stack)


def vit(dtype: torch.dtype, device: str, *, is_tiny: bool) -> Made:
    """Return ViT-B/16 of 12 layers."""
    layers, width, batch, side = (2, 64, 2, 64) if is_tiny else (12, 768, 128, 224)
    with torch.device(device):
        stack = Stack([Block(width, width // 32, 0.0, False) for _ in range(layers)])
        model = Vision(16, width, 10 if is_tiny else 1000, stack)
        images, labels = torch.randn(batch, 3, side, side), torch.randint(0, 10, (batch,))
    return _made(model.to(dtype), (images.to(dtype), labels), stack)


def unet(dtype: torch.dtype, device: str, *, is_tiny: bool) -> Made:
    """Return a U-Net of SDXL's parts, a tenth of its size."""
    widths, depths, context, batch, side = (
        ((32, 64), (0, 1), 64, 1, 8) if is_tiny else ((192, 384, 768), (0, 1, 2), 1024, 8, 64)
    )
    with torch.device(device):
        model = Diffusion(SdxlUNet(widths, depths, context))
        shape = (batch, 4, side, side)
        inputs = (
            torch.randn(shape),
            torch.randn(shape),
            torch.randn(batch, 2816),
            torch.randn(batch, 77, context),
        )
    return _made(model.to(dtype), tuple(t.to(dtype) for t in inputs), model.unet)


def _made(model: nn.Module, inputs: tuple[Tensor, ...], stack: Any) -> Made:
    def switch(is_on: bool) -> None:
        stack.by_block = is_on

    return Made(model.train(), inputs, switch)


MODELS = {"gpt2": gpt2, "llama": llama, "vit": vit, "unet": unet}
