"""TRL's GRPO, with the policy trained within a budget."""

import torch
from datasets import Dataset
from toy import QUIET, gpt2, tokenizer
from trl import GRPOConfig, GRPOTrainer

from fxckpt.integrations.trainer import FxckptCallback


def short(completions: list[str], **_: object) -> list[float]:
    """Return a reward for each completion: few different words are better."""
    return [-float(len(set(text.split()))) for text in completions]


def losses(**options: object) -> tuple[list[float], list[torch.Tensor]]:
    """Return losses and weights after two steps; ``options`` are those of the callback, if any."""
    torch.manual_seed(0)
    callback = FxckptCallback()
    model = gpt2()
    arguments = GRPOConfig(
        **QUIET,
        max_steps=2,
        learning_rate=1e-3,
        num_generations=4,
        max_completion_length=8,
        bf16=False,
        gradient_checkpointing=bool(options),
        gradient_checkpointing_kwargs=dict(options) if options else None,
    )
    trainer = GRPOTrainer(
        model=model,
        reward_funcs=short,
        args=arguments,
        train_dataset=Dataset.from_dict({"prompt": ["the quick brown fox"] * 16}),
        processing_class=tokenizer(),
        callbacks=[callback] if options else [],
    )
    trainer.train()
    if options:
        step = callback.report().step
        assert step is not None and step.measured_peak_bytes <= step.budget_bytes
    seen = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    return seen, [p.detach() for p in model.parameters()]


plain, weights = losses()
found, same = losses(budget="90%")
assert found == plain, "the losses differ"
assert all(map(torch.equal, weights, same)), "the weights differ"
print("equal losses")
