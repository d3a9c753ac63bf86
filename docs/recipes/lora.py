"""TRL's SFT of a LoRA adapter, with the base model's blocks within a budget."""

import torch
from datasets import Dataset
from peft import LoraConfig
from toy import QUIET, gpt2, tokenizer
from trl import SFTConfig, SFTTrainer

from fxckpt.integrations.trainer import FxckptCallback


def losses(**options: object) -> list[float]:
    """Return the losses of four steps; ``options`` are those of the callback, if any."""
    torch.manual_seed(0)
    callback = FxckptCallback()
    arguments = SFTConfig(
        **QUIET,
        max_steps=4,
        bf16=False,
        gradient_checkpointing=bool(options),
        gradient_checkpointing_kwargs=dict(options) if options else None,
    )
    trainer = SFTTrainer(
        model=gpt2(),
        args=arguments,
        train_dataset=Dataset.from_dict({"text": ["the quick brown fox jumps over a dog"] * 16}),
        processing_class=tokenizer(),
        peft_config=LoraConfig(target_modules=["c_attn"], fan_in_fan_out=True),
        callbacks=[callback] if options else [],
    )
    trainer.train()
    if options:
        step = callback.report().step
        assert step is not None and step.measured_peak_bytes <= step.budget_bytes
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


assert losses(budget="90%") == losses(), "the losses differ"
print("equal losses")
