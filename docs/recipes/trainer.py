"""transformers' Trainer within a budget of the step: the same losses as without fxckpt."""

import torch
from datasets import Dataset
from toy import QUIET, gpt2
from transformers import Trainer, TrainingArguments

from fxckpt.integrations.trainer import FxckptCallback


def losses(callback: FxckptCallback | None = None) -> list[float]:
    """Return the losses of four steps, with the callback or without."""
    torch.manual_seed(0)
    model = gpt2(use_cache=False)
    tokens = torch.randint(0, 10, (16, 32)).tolist()
    arguments = TrainingArguments(**QUIET, max_steps=4)
    trainer = Trainer(
        model=model,
        args=arguments,
        train_dataset=Dataset.from_dict({"input_ids": tokens, "labels": tokens}),
        callbacks=[] if callback is None else [callback],
    )
    trainer.train()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


callback = FxckptCallback(budget="70%")
assert losses(callback) == losses(), "the losses differ"
step = callback.report().step
assert step is not None and step.measured_peak_bytes <= step.budget_bytes
print("equal losses")
