"""Twenty families of transformers' models with checkpointing, small and with random weights."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import transformers as hf
from torch import Tensor, nn

VOCABULARY = 97
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
}
DECODER = SIZES | {"num_key_value_heads": 2, "bos_token_id": 0, "eos_token_id": 0}
DECODER |= {"pad_token_id": 0, "head_dim": 8}


@dataclass(frozen=True)
class Family:
    """A named function that makes a model, and one that makes the arguments of its step."""

    name: str
    model: Callable[[], nn.Module]
    inputs: Callable[[], dict[str, Tensor]]

    def make(self) -> tuple[nn.Module, dict[str, Tensor]]:
        """Return the model in train mode with checkpointing on, and its arguments."""
        torch.manual_seed(0)
        model = self.model()
        model.train()
        model.gradient_checkpointing_enable()  # type: ignore[operator]
        return model, self.inputs()


def ids(*shape: int) -> Tensor:
    return torch.randint(3, VOCABULARY, shape)


def language() -> dict[str, Tensor]:
    tokens = ids(2, 24)
    return {"input_ids": tokens, "labels": tokens}


def pair() -> dict[str, Tensor]:
    return {"input_ids": ids(2, 24), "labels": ids(2, 16)}


def image() -> dict[str, Tensor]:
    return {"pixel_values": torch.randn(2, 3, 32, 32), "labels": torch.tensor([0, 1])}


def sound() -> dict[str, Tensor]:
    return {"input_features": torch.randn(2, 80, 64), "labels": ids(2, 16)}


def wave() -> dict[str, Tensor]:
    return {"input_values": torch.randn(2, 2000), "labels": torch.tensor([0, 1])}


def causal(name: str, **sizes: Any) -> Family:
    """Return the family of a decoder."""

    def model() -> nn.Module:
        config = hf.AutoConfig.for_model(name, **(DECODER | sizes))
        return hf.AutoModelForCausalLM.from_config(config)

    return Family(name, model, language)


def masked(name: str, **sizes: Any) -> Family:
    """Return the family of an encoder of text."""

    def model() -> nn.Module:
        config = hf.AutoConfig.for_model(name, **(SIZES | sizes))
        return hf.AutoModelForMaskedLM.from_config(config)

    return Family(name, model, language)


def other(name: str, auto: Any, inputs: Callable[[], dict[str, Tensor]], **sizes: Any) -> Family:
    """Return the family of another kind of model."""
    return Family(name, lambda: auto.from_config(hf.AutoConfig.for_model(name, **sizes)), inputs)


T5 = {
    "num_layers": 2,
    "num_decoder_layers": 2,
    "d_model": 32,
    "d_kv": 8,
    "d_ff": 64,
    "num_heads": 4,
    "vocab_size": VOCABULARY,
    "decoder_start_token_id": 0,
}
BART = {
    "vocab_size": VOCABULARY,
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 64,
    "decoder_ffn_dim": 64,
    "max_position_embeddings": 64,
    "pad_token_id": 1,
    "bos_token_id": 0,
    "eos_token_id": 2,
    "decoder_start_token_id": 2,
}
WHISPER = BART | {"max_source_positions": 32, "max_target_positions": 32}
VISION = SIZES | {"image_size": 32, "patch_size": 8, "num_labels": 2}
WAVE = SIZES | {
    "num_labels": 2,
    "conv_dim": (16, 16),
    "conv_stride": (5, 4),
    "conv_kernel": (10, 3),
}
WAVE |= {"num_feat_extract_layers": 2, "num_conv_pos_embeddings": 8, "classifier_proj_size": 16}
WAVE |= {"num_conv_pos_embedding_groups": 4, "mask_time_prob": 0.0}
EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}

FAMILIES = (
    causal("gpt2", n_layer=2, n_embd=32, n_head=4, n_positions=64),
    causal("llama"),
    causal("mistral"),
    causal("qwen2"),
    causal("qwen3"),
    causal("gemma2"),
    causal("phi3"),
    causal("opt", ffn_dim=64, word_embed_proj_dim=32),
    causal("gpt_neox"),
    causal("bloom", n_layer=2, n_head=4, hidden_dropout=0.1),
    causal("mixtral", **EXPERTS),
    causal(
        "qwen3_moe",
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=32,
    ),
    masked("bert"),
    masked("roberta", pad_token_id=1, max_position_embeddings=66),
    masked("distilbert", dim=32, hidden_dim=64, n_layers=2, n_heads=4),
    masked("electra", embedding_size=32),
    other("t5", hf.AutoModelForSeq2SeqLM, pair, **T5),
    other("bart", hf.AutoModelForSeq2SeqLM, pair, **BART),
    other("vit", hf.AutoModelForImageClassification, image, **VISION),
    other("whisper", hf.AutoModelForSpeechSeq2Seq, sound, **WHISPER),
    other("wav2vec2", hf.AutoModelForAudioClassification, wave, **WAVE),
)
