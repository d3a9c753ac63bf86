"""A pipeline of two stages. torchrun --nproc-per-node 2 docs/distributed/pipeline.py"""

import torch
from network import BATCH, Network, batch, begin, end
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.nn import functional as F

import fxckpt

MICRO_BATCHES = 4


class Stage(nn.Module):
    """The blocks of one rank, with the embedding before or the head after them."""

    def __init__(self, whole: Network, rank: int) -> None:
        super().__init__()
        half = len(whole.blocks) // 2
        first = (whole.words, *whole.blocks[:half])
        last = (*whole.blocks[half:], whole.norm, whole.head)
        self.layers = nn.Sequential(*(last if rank else first))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)


def loss(logits: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """Return the loss of one micro-batch."""
    return F.cross_entropy(logits.flatten(0, 1), tokens.flatten())


def losses(rank: int, backend: fxckpt.Backend | None) -> list[float]:
    """Return the losses of some steps, on the last rank, and the weights' sum at the end."""
    torch.manual_seed(0)
    module = Stage(Network(), rank)
    called = module if backend is None else torch.compile(module, backend=backend)
    stage = PipelineStage(called, rank, 2, torch.device("cpu"))
    schedule = Schedule1F1B(stage, MICRO_BATCHES, loss_fn=loss)
    if backend is not None:
        backend.follow(schedule)  # Before the first step.
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-3)
    seen: list[float] = []
    for i in range(4):
        tokens = torch.cat([batch(BATCH * i + j) for j in range(MICRO_BATCHES)])
        parts: list[torch.Tensor] = []
        if rank == 0:
            schedule.step(tokens)
        else:
            schedule.step(target=tokens, losses=parts)
        optimizer.step()
        optimizer.zero_grad()
        seen += [part.item() for part in parts]
    return [*seen, sum(p.sum().item() for p in module.parameters())]


rank = begin()
# Strict: a step over the budget is an error, the first one too.
# What is sent is held until the other rank has taken it: the budget leaves room for that.
backend = fxckpt.Backend("7.2MB", inner="aot_eager", strict=True)
assert losses(rank, backend) == losses(rank, None), "the losses differ"
end(rank, backend)
