"""TRL's DPO, with the blocks of the trained model within a budget."""

import copy

import torch
from datasets import Dataset
from toy import QUIET, gpt2, tokenizer
from trl import DPOConfig, DPOTrainer

from fxckpt.integrations.trainer import FxckptCallback


def losses(**options: object) -> list[float]:
    """Return the losses of four steps; ``options`` are those of the callback, if any."""
    torch.manual_seed(0)
    callback = FxckptCallback()
    model = gpt2()
    arguments = DPOConfig(
        **QUIET,
        max_steps=4,
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
        processing_class=tokenizer(),
        callbacks=[callback] if options else [],
    )
    trainer.train()
    if options:
        step = callback.report().step
        assert step is not None and step.measured_peak_bytes <= step.budget_bytes
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


assert losses(budget="90%") == losses(), "the losses differ"
print("equal losses")
