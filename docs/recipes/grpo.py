"""TRL's GRPO, with the blocks of the policy checkpointed by fxckpt while it trains."""

import torch
from datasets import Dataset
from toy import QUIET, gpt2, tokenizer
from trl import GRPOConfig, GRPOTrainer

import fxckpt
from fxckpt.integrations.trainer import FxckptCallback


def short(completions: list[str], **_: object) -> list[float]:
    """Return a reward for each completion: few different words are better."""
    return [-float(len(set(text.split()))) for text in completions]


def losses(**options: object) -> tuple[list[float], list[torch.Tensor]]:
    """Return losses and weights after two steps; ``options`` are those of the callback, if any."""
    torch.manual_seed(0)
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
        callbacks=[FxckptCallback()] if options else [],
    )
    with fxckpt.record_regions() as regions:
        trainer.train()
    assert bool(regions) == bool(options), "regions only with the callback"
    seen = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    return seen, [p.detach() for p in model.parameters()]


plain, weights = losses()
found, same = losses(budget="80%")
assert found == plain, "the losses differ"
assert all(map(torch.equal, weights, same)), "the weights differ"
print("equal losses")
