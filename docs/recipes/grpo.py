"""TRL's GRPO, with the blocks of the policy checkpointed by fxckpt while it trains."""

import torch
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast
from trl import GRPOConfig, GRPOTrainer

import fxckpt
from fxckpt.integrations.trainer import FxckptCallback

WORDS = ["<pad>", "<eos>", "the", "quick", "brown", "fox", "jumps", "over", "a", "dog"]


def short(completions: list[str], **_: object) -> list[float]:
    """Return a reward for each completion: few different words are better."""
    return [-float(len(set(text.split()))) for text in completions]


def losses(**options: object) -> tuple[list[float], list[torch.Tensor]]:
    """Return losses and weights after two steps; ``options`` are those of the callback, if any."""
    torch.manual_seed(0)
    plain = Tokenizer(models.WordLevel({word: n for n, word in enumerate(WORDS)}, unk_token="a"))
    plain.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=plain, pad_token="<pad>", eos_token="<eos>", unk_token="a"
    )
    sizes = {"n_layer": 3, "n_embd": 64, "n_head": 2, "vocab_size": len(WORDS)}
    # Trainers of policies draw no dropout masks.
    drops = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    model = GPT2LMHeadModel(GPT2Config(**sizes, **drops, bos_token_id=1, eos_token_id=1))
    arguments = GRPOConfig(
        "build/recipes",
        max_steps=2,
        learning_rate=1e-3,
        per_device_train_batch_size=4,
        num_generations=4,
        max_completion_length=8,
        logging_steps=1,
        report_to=[],
        save_strategy="no",
        disable_tqdm=True,
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=bool(options),
        gradient_checkpointing_kwargs=dict(options) if options else None,
    )
    trainer = GRPOTrainer(
        model=model,
        reward_funcs=short,
        args=arguments,
        train_dataset=Dataset.from_dict({"prompt": ["the quick brown fox"] * 16}),
        processing_class=tokenizer,
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
