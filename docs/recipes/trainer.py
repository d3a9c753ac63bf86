"""transformers' Trainer within a budget a block: the same losses as without fxckpt."""

import torch
from datasets import Dataset
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

import fxckpt
from fxckpt.integrations.trainer import FxckptCallback

SIZES = {"n_layer": 3, "n_embd": 64, "n_head": 2, "vocab_size": 100, "n_positions": 64}


def losses(**options: object) -> list[float]:
    """Return the losses of four steps; ``options`` are those of the callback, if any."""
    torch.manual_seed(0)
    model = GPT2LMHeadModel(GPT2Config(**SIZES, bos_token_id=0, eos_token_id=0, use_cache=False))
    tokens = torch.randint(0, 100, (16, 32)).tolist()
    arguments = TrainingArguments(
        "build/recipes",
        max_steps=4,
        per_device_train_batch_size=4,
        logging_steps=1,
        report_to=[],
        save_strategy="no",
        disable_tqdm=True,
        use_cpu=True,
    )
    trainer = Trainer(
        model=model,
        args=arguments,
        train_dataset=Dataset.from_dict({"input_ids": tokens, "labels": tokens}),
        callbacks=[FxckptCallback(**options)] if options else [],
    )
    with fxckpt.record_regions() as regions:
        trainer.train()
    assert len(regions) == (4 * 3 if options else 0), "a region for each block of each step"
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


assert losses(budget="70%") == losses(), "the losses differ"
print("equal losses")
