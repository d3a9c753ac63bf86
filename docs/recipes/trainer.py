"""transformers' Trainer within a budget a block: the same losses as without fxckpt."""

import torch
from datasets import Dataset
from toy import QUIET, gpt2
from transformers import Trainer, TrainingArguments

import fxckpt
from fxckpt.integrations.trainer import FxckptCallback


def losses(**options: object) -> list[float]:
    """Return the losses of four steps; ``options`` are those of the callback, if any."""
    torch.manual_seed(0)
    model = gpt2(use_cache=False)
    tokens = torch.randint(0, 10, (16, 32)).tolist()
    arguments = TrainingArguments(**QUIET, max_steps=4)
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
