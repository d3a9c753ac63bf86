"""A small transformer for the scripts beside this file."""

import os
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

import fxckpt

WIDTH, HEADS, WORDS, BATCH, LENGTH = 64, 4, 128, 4, 128


class Block(nn.Module):
    """Attention over the heads that this rank has, and an MLP."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)
        self.q, self.k = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.v, self.out = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.norm1(x)
        q, k, v = (
            each.unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2)
            for each in (self.q(h), self.k(h), self.v(h))
        )
        x = x + self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Network(nn.Module):
    """Blocks between an embedding and a head."""

    def __init__(self, depth: int = 4) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(depth))
        self.norm, self.head = nn.RMSNorm(WIDTH), nn.Linear(WIDTH, WORDS)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.words(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def begin() -> int:
    """Join the other ranks, on a CPU; return the number of this one."""
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torch.set_num_threads(1)
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    return dist.get_rank()


def batch(seed: int) -> torch.Tensor:
    """Return tokens."""
    return torch.randint(WORDS, (BATCH, LENGTH), generator=torch.Generator().manual_seed(seed))


def train(
    model: Callable[[torch.Tensor], torch.Tensor],
    optimizer: torch.optim.Optimizer,
    batches: list[torch.Tensor],
) -> list[float]:
    """Take a step for each batch and return the losses."""
    seen = []
    for tokens in batches:
        loss = F.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        seen.append(loss.item())
    return seen


def end(rank: int, backend: fxckpt.Backend) -> None:
    """Print the peak of the latest step, which must be within the budget, and leave the group."""
    step = backend.report().step
    assert step is not None and step.measured_peak_bytes <= step.budget_bytes, "over the budget"
    print(f"rank {rank}: equal losses, {step.measured_peak_bytes} of {step.budget_bytes} bytes")
    torch.distributed.destroy_process_group()
