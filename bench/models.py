"""The models of the planner's benchmarks, on the meta device: shapes only."""

from __future__ import annotations

from typing import Any

import torch
import transformers as hf
from torch import Tensor, nn
from torch.nn import functional as F


class LlamaStyleBlock(nn.Module):
    """RMSNorm, fused qkv, scaled dot-product attention, SwiGLU; no biases."""

    def __init__(self, width: int, heads: int, inner: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm_attention = nn.RMSNorm(width)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.norm_mlp = nn.RMSNorm(width)
        self.gate = nn.Linear(width, inner, bias=False)
        self.up = nn.Linear(width, inner, bias=False)
        self.down = nn.Linear(inner, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        q, k, v = (
            self.qkv(self.norm_attention(x))
            .view(batch, length, 3, self.heads, -1)
            .permute(2, 0, 3, 1, 4)
        )
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(batch, length, width))
        h = self.norm_mlp(x)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))


class LlamaStyle(nn.Module):
    """A stack of blocks on hidden states, with a scalar output."""

    def __init__(self, layers: int, width: int = 256, heads: int = 4, inner: int = 1024) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(LlamaStyleBlock(width, heads, inner) for _ in range(layers))
        self.norm = nn.RMSNorm(width)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.norm(x).sum()


def llama_style(layers: int = 32, *, length: int = 2048) -> tuple[nn.Module, dict[str, Any]]:
    """Return a Llama-style stack (d 256, 4 heads, ff 1024) and its input, batch 1."""
    with torch.device("meta"):
        return LlamaStyle(layers), {"x": torch.empty(1, length, 256)}


class NextTokenLoss(nn.Module):
    """The next-token loss of a language model, its only output."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: Tensor) -> Tensor:
        logits = self.model(input_ids=tokens, use_cache=False).logits
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


def gpt2(
    layers: int = 12, width: int = 768, *, vocabulary: int = 50257
) -> tuple[nn.Module, dict[str, Any]]:
    """Return GPT-2 with its loss, and a batch of 4 x 256 tokens.

    Dropout is 0.1, and the attention is not fused.
    """
    config = hf.GPT2Config(
        n_layer=layers,
        n_embd=width,
        n_head=width // 64,
        vocab_size=vocabulary,
        n_positions=256,
        bos_token_id=0,
        eos_token_id=0,
        attn_implementation="eager",
    )
    with torch.device("meta"):
        return NextTokenLoss(hf.GPT2LMHeadModel(config).train()), {
            "tokens": torch.empty(4, 256, dtype=torch.long)
        }
