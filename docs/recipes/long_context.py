"""Sequences of many lengths under one budget: long ones recompute, short ones do not."""

import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

import fxckpt

LENGTHS = (1024, 192, 704, 448, 960, 256)


class Loss(nn.Module):
    """A language model with its loss, so that both are in the compiled graph."""

    def __init__(self) -> None:
        super().__init__()
        config = LlamaConfig(
            hidden_size=64,
            intermediate_size=172,
            num_hidden_layers=4,
            num_attention_heads=4,
            vocab_size=256,
            use_cache=False,
        )
        self.model = LlamaForCausalLM(config)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.model(input_ids=tokens, labels=tokens).loss


def losses(backend: fxckpt.Backend | None) -> list[float]:
    """Return the losses of steps of several lengths; print what each took."""
    torch.manual_seed(0)
    torch.compiler.reset()
    model, seen = Loss(), []
    forward = torch.compile(model, backend=backend or "aot_eager_default_partitioner")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for length in LENGTHS:
        tokens = torch.randint(256, (1, length))
        torch._dynamo.mark_dynamic(tokens, 1, min=16, max=1024)  # noqa: TID251 (torch's public name)
        loss = forward(tokens)
        loss.backward()
        seen.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
        if backend is not None and (step := backend.report().step) is not None:
            assert step.measured_peak_bytes <= step.budget_bytes, "over the budget"
            print(f"{length} tokens: {step.measured_peak_bytes} bytes, {step.extra_seconds} s more")
    return seen


backend = fxckpt.Backend("20MiB", inner="aot_eager")
assert losses(backend) == losses(None), "the losses differ"
print("equal losses,", len(backend.plans), "plans")
