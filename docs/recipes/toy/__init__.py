"""A vocabulary, a small GPT-2 and quiet arguments for trainers: recipes download nothing."""

from typing import Any

from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast

WORDS = ["<pad>", "<eos>", "the", "quick", "brown", "fox", "jumps", "over", "a", "dog"]
QUIET: dict[str, Any] = {
    "output_dir": "build/recipes",
    "per_device_train_batch_size": 4,
    "logging_steps": 1,
    "report_to": [],
    "save_strategy": "no",
    "disable_tqdm": True,
    "use_cpu": True,
}
"""Arguments of transformers' and TRL's trainers."""


def tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer of whole words."""
    plain = Tokenizer(models.WordLevel({word: n for n, word in enumerate(WORDS)}, unk_token="a"))
    plain.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(
        tokenizer_object=plain, pad_token="<pad>", eos_token="<eos>", unk_token="a"
    )


def gpt2(**more: Any) -> GPT2LMHeadModel:
    """Return a GPT-2 of three layers over the vocabulary; ``more`` are options of its config."""
    sizes = {"n_layer": 3, "n_embd": 64, "n_head": 2, "vocab_size": len(WORDS)}
    return GPT2LMHeadModel(GPT2Config(**{**sizes, "bos_token_id": 1, "eos_token_id": 1, **more}))
