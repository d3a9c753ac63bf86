"""TRL's SFT of a LoRA adapter, with the base model's blocks checkpointed by fxckpt."""

import torch
from datasets import Dataset
from peft import LoraConfig
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast
from trl import SFTConfig, SFTTrainer

import fxckpt
from fxckpt.integrations.trainer import FxckptCallback

WORDS = ["<pad>", "<eos>", "the", "quick", "brown", "fox", "jumps", "over", "a", "dog"]


def losses(**options: object) -> list[float]:
    """Return the losses of four steps; ``options`` are those of the callback, if any."""
    torch.manual_seed(0)
    plain = Tokenizer(models.WordLevel({word: n for n, word in enumerate(WORDS)}, unk_token="a"))
    plain.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=plain, pad_token="<pad>", eos_token="<eos>", unk_token="a"
    )
    config = GPT2Config(
        n_layer=3, n_embd=64, n_head=2, vocab_size=len(WORDS), bos_token_id=1, eos_token_id=1
    )
    arguments = SFTConfig(
        "build/recipes",
        max_steps=4,
        per_device_train_batch_size=4,
        logging_steps=1,
        report_to=[],
        save_strategy="no",
        disable_tqdm=True,
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=bool(options),
        gradient_checkpointing_kwargs=dict(options) if options else None,
    )
    trainer = SFTTrainer(
        model=GPT2LMHeadModel(config),
        args=arguments,
        train_dataset=Dataset.from_dict({"text": ["the quick brown fox jumps over a dog"] * 16}),
        processing_class=tokenizer,
        peft_config=LoraConfig(target_modules=["c_attn"], fan_in_fan_out=True),
        callbacks=[FxckptCallback()] if options else [],
    )
    with fxckpt.record_regions() as regions:
        trainer.train()
    assert len(regions) == (4 * 3 if options else 0), "a region for each block of each step"
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


assert losses(budget="90%") == losses(), "the losses differ"
print("equal losses")
