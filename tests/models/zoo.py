"""Small real models with random weights; each returns its loss."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import transformers as hf
from torch import Tensor, nn
from torch.nn import functional as F


@dataclass(frozen=True)
class Entry:
    """A named function that makes a model with a scalar loss, and its inputs."""

    name: str
    make: Callable[[], tuple[nn.Module, tuple[Tensor, ...]]]


class LanguageLoss(nn.Module):
    """Next-token loss of a model that returns ``logits``."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, ids: Tensor) -> Tensor:
        logits = self.model(input_ids=ids, use_cache=False).logits
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


class HiddenLoss(nn.Module):
    """Mean square of a model's last hidden state."""

    def __init__(self, model: nn.Module, key: str) -> None:
        super().__init__()
        self.model = model
        self.key = key

    def forward(self, *inputs: Tensor) -> Tensor:
        out = self.model(**dict(zip(self.key.split(), inputs, strict=True)))
        return out.last_hidden_state.square().mean()


def ids(vocabulary: int, *shape: int) -> Tensor:
    return torch.randint(0, vocabulary, shape)


def gpt2(layers: int = 3, attention: str = "eager") -> tuple[nn.Module, tuple[Tensor, ...]]:
    config = hf.GPT2Config(
        n_layer=layers,
        n_embd=64,
        n_head=4,
        vocab_size=97,
        n_positions=64,
        bos_token_id=0,
        eos_token_id=0,
        attn_implementation=attention,
    )
    return LanguageLoss(hf.GPT2LMHeadModel(config)), (ids(97, 4, 48),)


def bert() -> tuple[nn.Module, tuple[Tensor, ...]]:
    config = hf.BertConfig(
        num_hidden_layers=2,
        hidden_size=64,
        num_attention_heads=4,
        intermediate_size=128,
        vocab_size=97,
        max_position_embeddings=64,
        attn_implementation="eager",
    )
    return HiddenLoss(hf.BertModel(config, add_pooling_layer=False), "input_ids"), (ids(97, 4, 48),)


def llama() -> tuple[nn.Module, tuple[Tensor, ...]]:
    config = hf.LlamaConfig(
        num_hidden_layers=3,
        hidden_size=64,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=128,
        vocab_size=97,
        max_position_embeddings=64,
        bos_token_id=0,
        eos_token_id=0,
        attn_implementation="sdpa",
    )
    return LanguageLoss(hf.LlamaForCausalLM(config)), (ids(97, 2, 64),)


def vit() -> tuple[nn.Module, tuple[Tensor, ...]]:
    config = hf.ViTConfig(
        num_hidden_layers=2,
        hidden_size=64,
        num_attention_heads=4,
        intermediate_size=128,
        image_size=32,
        patch_size=8,
        hidden_dropout_prob=0.1,
        attn_implementation="eager",
    )
    return HiddenLoss(hf.ViTModel(config, add_pooling_layer=False), "pixel_values"), (
        torch.randn(8, 3, 32, 32),
    )


def convnext() -> tuple[nn.Module, tuple[Tensor, ...]]:
    config = hf.ConvNextConfig(hidden_sizes=[16, 32], depths=[2, 2], num_stages=2, image_size=32)
    return HiddenLoss(hf.ConvNextModel(config), "pixel_values"), (torch.randn(8, 3, 32, 32),)


def t5() -> tuple[nn.Module, tuple[Tensor, ...]]:
    config = hf.T5Config(
        num_layers=2,
        num_decoder_layers=2,
        d_model=64,
        d_kv=16,
        d_ff=128,
        num_heads=4,
        vocab_size=97,
        use_cache=False,
    )
    return HiddenLoss(hf.T5Model(config), "input_ids decoder_input_ids"), (
        ids(97, 4, 32),
        ids(97, 4, 32),
    )


class Residual(nn.Module):
    """Two 3x3 convolutions with batch norm and a skip, with in-place activations as torchvision."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv1, self.norm1 = (
            nn.Conv2d(width, width, 3, padding=1, bias=False),
            nn.BatchNorm2d(width),
        )
        self.conv2, self.norm2 = (
            nn.Conv2d(width, width, 3, padding=1, bias=False),
            nn.BatchNorm2d(width),
        )
        self.act = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm2(self.conv2(self.act(self.norm1(self.conv1(x)))))
        y += x
        return self.act(y)


class ResNet(nn.Module):
    """A stem, residual blocks and a classifier, with its loss."""

    def __init__(self, width: int = 16, blocks: int = 4) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(3, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU(inplace=True)
        )
        self.blocks = nn.Sequential(*(Residual(width) for _ in range(blocks)))
        self.head = nn.Linear(width, 10)

    def forward(self, image: Tensor, label: Tensor) -> Tensor:
        features = self.blocks(self.stem(image)).mean((2, 3))
        return F.cross_entropy(self.head(features), label)


class UNet(nn.Module):
    """A U-Net of two levels with concatenated skips, group norm and dropout."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.inc = self.double(3, width)
        self.down1, self.down2 = self.double(width, 2 * width), self.double(2 * width, 4 * width)
        self.up1, self.up2 = self.double(6 * width, 2 * width), self.double(3 * width, width)
        self.out = nn.Conv2d(width, 1, 1)
        self.drop = nn.Dropout2d(0.1)

    @staticmethod
    def double(before: int, after: int) -> nn.Sequential:
        return nn.Sequential(
            nn.Conv2d(before, after, 3, padding=1),
            nn.GroupNorm(4, after),
            nn.SiLU(),
            nn.Conv2d(after, after, 3, padding=1),
            nn.SiLU(),
        )

    def forward(self, image: Tensor, mask: Tensor) -> Tensor:
        a = self.inc(image)
        b = self.down1(F.max_pool2d(a, 2))
        c = self.drop(self.down2(F.max_pool2d(b, 2)))
        d = self.up1(torch.cat([F.interpolate(c, scale_factor=2.0), b], 1))
        e = self.up2(torch.cat([F.interpolate(d, scale_factor=2.0), a], 1))
        return F.binary_cross_entropy_with_logits(self.out(e), mask)


ENTRIES = (
    Entry("gpt2", gpt2),
    Entry("gpt2-sdpa", lambda: gpt2(attention="sdpa")),
    Entry("bert", bert),
    Entry("llama", llama),
    Entry("vit", vit),
    Entry("convnext", convnext),
    Entry("t5", t5),
    Entry("resnet", lambda: (ResNet(), (torch.randn(8, 3, 32, 32), torch.randint(0, 10, (8,))))),
    Entry("unet", lambda: (UNet(), (torch.randn(4, 3, 32, 32), torch.rand(4, 1, 32, 32)))),
)
