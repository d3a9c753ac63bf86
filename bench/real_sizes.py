"""Models at the sizes they are trained at, on the meta device: shapes only, in bfloat16.

Llama, Qwen3, GPT-2 and ViT are transformers' own, from their published configurations; SDXL's U-Net
is ours (``unet.py``).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import transformers as hf
from models import NextTokenLoss
from torch import Tensor, nn
from torch.nn import functional as F
from unet import SdxlUNet

Made = tuple[nn.Module, dict[str, Any]]
"""A model with its loss, and its inputs."""


def _on_meta(make: Callable[[], nn.Module]) -> nn.Module:
    with torch.device("meta"):
        return make().to(torch.bfloat16).train()


def _tokens(batch: int, length: int) -> dict[str, Any]:
    return {"tokens": torch.empty(batch, length, dtype=torch.long, device="meta")}


def llama_8b_config(layers: int = 32, *, vocab: int = 128256) -> hf.LlamaConfig:
    """Return the configuration of Llama 3 8B."""
    return hf.LlamaConfig(
        vocab_size=vocab,
        hidden_size=4096,
        intermediate_size=14336,
        num_hidden_layers=layers,
        num_attention_heads=32,
        num_key_value_heads=8,
        max_position_embeddings=8192,
        attn_implementation="sdpa",
    )


def llama_8b(layers: int = 32, *, batch: int = 1, length: int = 8192) -> Made:
    """Return Llama 3 8B and a batch of tokens."""
    config = llama_8b_config(layers)
    return _on_meta(lambda: NextTokenLoss(hf.LlamaForCausalLM(config))), _tokens(batch, length)


def qwen3_8b(layers: int = 36, *, batch: int = 1, length: int = 8192) -> Made:
    """Return Qwen3 8B and a batch of tokens."""
    config = hf.Qwen3Config(
        vocab_size=151936,
        hidden_size=4096,
        intermediate_size=12288,
        num_hidden_layers=layers,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=128,
        max_position_embeddings=40960,
        attn_implementation="sdpa",
    )
    return _on_meta(lambda: NextTokenLoss(hf.Qwen3ForCausalLM(config))), _tokens(batch, length)


def gpt2_xl(layers: int = 48, *, batch: int = 8, length: int = 1024) -> Made:
    """Return GPT-2 XL, with its dropout of 0.1, and a batch of tokens."""
    config = hf.GPT2Config(
        n_layer=layers, n_embd=1600, n_head=25, n_positions=1024, attn_implementation="sdpa"
    )
    return _on_meta(lambda: NextTokenLoss(hf.GPT2LMHeadModel(config))), _tokens(batch, length)


def gpt2_124m(*, batch: int, length: int = 1024) -> Made:
    """Return GPT-2 (124M parameters), with its dropout of 0.1, and a batch of tokens."""
    config = hf.GPT2Config(attn_implementation="sdpa")
    return _on_meta(lambda: NextTokenLoss(hf.GPT2LMHeadModel(config))), _tokens(batch, length)


class LabelLoss(nn.Module):
    """The loss of a classifier of images, its only output."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(self.model(pixel_values=images).logits, labels)


def vit_large(layers: int = 24, *, batch: int = 64) -> Made:
    """Return ViT-L/16 for 1000 classes and a batch of images of 224 x 224."""
    config = hf.ViTConfig(
        hidden_size=1024,
        num_hidden_layers=layers,
        num_attention_heads=16,
        intermediate_size=4096,
        num_labels=1000,
        attn_implementation="sdpa",
    )
    images = torch.empty(batch, 3, 224, 224, dtype=torch.bfloat16, device="meta")
    labels = torch.empty(batch, dtype=torch.long, device="meta")
    model = _on_meta(lambda: LabelLoss(hf.ViTForImageClassification(config)))
    return model, {"images": images, "labels": labels}


def sdxl_unet(*, batch: int = 4, side: int = 128, **shape: Any) -> Made:
    """Return SDXL's U-Net and a batch of latents (128 is an image of 1024 x 1024)."""

    def empty(*size: int) -> Tensor:
        return torch.empty(*size, dtype=torch.bfloat16, device="meta")

    return _on_meta(lambda: SdxlUNet(**shape)), {
        "noisy": empty(batch, 4, side, side),
        "noise": empty(batch, 4, side, side),
        "step": torch.empty(batch, dtype=torch.long, device="meta"),
        "added": empty(batch, 2816),
        "prompt": empty(batch, 77, shape.get("context", 2048)),
    }
