"""TRL's DPO, with the blocks of the trained model checkpointed by fxckpt."""

import copy

import torch
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast
from trl import DPOConfig, DPOTrainer

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
    sizes = {"n_layer": 3, "n_embd": 64, "n_head": 2, "vocab_size": len(WORDS)}
    model = GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=1, eos_token_id=1))
    arguments = DPOConfig(
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
    pairs = {
        "prompt": ["the quick brown"] * 16,
        "chosen": [" fox jumps over a dog"] * 16,
        "rejected": [" dog over the fox"] * 16,
    }
    trainer = DPOTrainer(
        model=model,
        ref_model=copy.deepcopy(model),
        args=arguments,
        train_dataset=Dataset.from_dict(pairs),
        processing_class=tokenizer,
        callbacks=[FxckptCallback()] if options else [],
    )
    with fxckpt.record_regions() as regions:
        trainer.train()
    assert len(regions) == (4 * 3 if options else 0), "a region for each block of each step"
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


assert losses(budget="80%") == losses(), "the losses differ"
print("equal losses")
