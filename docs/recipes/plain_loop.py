"""A loop with gradient accumulation, clipping and a schedule, within 60 % of its memory."""

import torch
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel

import fxckpt

STEPS, MICRO_BATCHES = 3, 2


class Loss(nn.Module):
    """A language model with its loss, so that both are in the compiled graph."""

    def __init__(self) -> None:
        super().__init__()
        sizes = {"n_layer": 4, "n_embd": 64, "n_head": 2, "vocab_size": 256}
        config = GPT2Config(**sizes, bos_token_id=0, eos_token_id=0, use_cache=False)
        self.model = GPT2LMHeadModel(config)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.model(input_ids=tokens, labels=tokens).loss


def losses(backend: fxckpt.Backend | None) -> list[float]:
    """Return the losses of a few optimizer steps, with dropout."""
    torch.manual_seed(0)
    torch.compiler.reset()
    model = Loss()
    forward = torch.compile(model, backend=backend or "aot_eager_default_partitioner")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)
    seen = []
    for _ in range(STEPS):
        for _ in range(MICRO_BATCHES):
            loss = forward(torch.randint(256, (4, 128))) / MICRO_BATCHES
            loss.backward()
            seen.append(loss.item())
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    return seen


backend = fxckpt.Backend("60%", inner="aot_eager")
assert losses(backend) == losses(None), "the losses differ"
step = backend.report().step
assert step is not None and step.measured_peak_bytes <= step.budget_bytes, "over the budget"
print(f"equal losses, {step.measured_peak_bytes} of {step.budget_bytes} bytes")
