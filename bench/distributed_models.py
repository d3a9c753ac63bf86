"""Small Llama of two ranks, and parts that talk: ring attention, experts, stages of a pipeline."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._functional_collectives import all_to_all_single_autograd
from torch.nn import functional as F

BLOCKS, WIDTH, HEADS, WORDS, BATCH, LENGTH = 4, 128, 4, 512, 2, 256
WIDTH_OF_HEAD, EXPERTS_PER_RANK = WIDTH // HEADS, 2


class Attention(nn.Module):
    """Causal attention of as many heads as the projections have."""

    def __init__(self) -> None:
        super().__init__()
        for name in ("wq", "wk", "wv", "wo"):
            setattr(self, name, nn.Linear(WIDTH, WIDTH, bias=False))

    def heads(self, x: Tensor) -> tuple[Tensor, ...]:
        """Return queries, keys and values."""
        return tuple(
            each.unflatten(-1, (-1, WIDTH_OF_HEAD)).transpose(1, 2)
            for each in (self.wq(x), self.wk(x), self.wv(x))
        )

    def forward(self, x: Tensor) -> Tensor:
        out = F.scaled_dot_product_attention(*self.heads(x), is_causal=True)
        return self.wo(out.transpose(1, 2).flatten(2))


class RingAttention(Attention):
    """Causal attention over sequences of which each rank has a slice.

    Keys and values go round the ranks; parts of the softmax are merged by their logarithmic sums
    (Liu et al., Ring Attention, arXiv:2310.01889).
    """

    def forward(self, x: Tensor) -> Tensor:
        rank, ranks = dist.get_rank(), dist.get_world_size()
        q, k, v = self.heads(x)
        total = torch.zeros_like(q)
        weight = torch.full_like(q[..., :1], -1e30)
        for i in range(ranks):
            if i:
                k, v = rotated(torch.stack((k, v))).unbind(0)
            source = (rank - i) % ranks
            if source > rank:
                # A later slice is exchanged alone, in the backward too.
                total = total + 0 * (k + v)
                continue
            scores = q @ k.transpose(-1, -2) * WIDTH_OF_HEAD**-0.5
            if source == rank:
                later = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
                scores = scores.masked_fill(later, float("-inf"))
            logarithm = scores.logsumexp(-1, keepdim=True)
            part = (scores - logarithm).exp() @ v
            both = torch.logaddexp(weight, logarithm)
            total = total * (weight - both).exp() + part * (logarithm - both).exp()
            weight = both
        return self.wo(total.transpose(1, 2).flatten(2))


def rotated(x: Tensor) -> Tensor:
    """Return the tensor of the rank before, which the rank after gets from this one."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    sent, got = [0] * ranks, [0] * ranks
    sent[(rank + 1) % ranks] = got[(rank - 1) % ranks] = x.numel()
    flat = all_to_all_single_autograd(x.reshape(-1), got, sent, dist.group.WORLD)
    return flat.view(x.shape)


class FeedForward(nn.Module):
    """Gated linear unit."""

    def __init__(self) -> None:
        super().__init__()
        self.w1 = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.w2 = nn.Linear(3 * WIDTH, WIDTH, bias=False)
        self.w3 = nn.Linear(WIDTH, 3 * WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class Experts(nn.Module):
    """Mixture of experts, some on each rank: two all-to-alls take tokens there and back.

    Each expert takes as many tokens as come in on average, those of its greatest scores.
    """

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, EXPERTS_PER_RANK * dist.get_world_size(), bias=False)
        self.experts = nn.ModuleList(FeedForward() for _ in range(EXPERTS_PER_RANK))

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.flatten(0, 1)
        weights = self.router(tokens).softmax(-1)
        ranks = dist.get_world_size()
        count = tokens.shape[0] // weights.shape[1]
        best, chosen = weights.t().topk(count, dim=-1)
        taken = tokens[chosen.flatten()]
        there = all_to_all_single_autograd(taken, None, None, dist.group.WORLD)
        by_expert = there.unflatten(0, (ranks, EXPERTS_PER_RANK, count)).transpose(0, 1)
        done = torch.stack([e(t) for e, t in zip(self.experts, by_expert, strict=True)], dim=1)
        back = all_to_all_single_autograd(done.flatten(0, 2), None, None, dist.group.WORLD)
        out = torch.zeros_like(tokens).index_add(
            0, chosen.flatten(), back * best.flatten()[:, None]
        )
        return out.view_as(x)


class Block(nn.Module):
    """Layer of a Llama."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)
        self.attention: nn.Module = Attention()
        self.mlp: nn.Module = FeedForward()

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class Llama(nn.Module):
    """Small Llama without rotary embeddings; ``around`` calls each block."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(BLOCKS))
        self.norm, self.head = nn.RMSNorm(WIDTH), nn.Linear(WIDTH, WORDS, bias=False)
        self.around: Callable[..., Any] | None = None

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.words(tokens)
        for block in self.blocks:
            x = block(x) if self.around is None else self.around(block, x)
        return self.head(self.norm(x))


class Stage(nn.Module):
    """Blocks of a Llama that are one stage of a pipeline, with what comes before or after them."""

    def __init__(self, whole: Llama, number: int, stages: int) -> None:
        super().__init__()
        each = len(whole.blocks) // stages
        self.first = whole.words if number == 0 else nn.Identity()
        self.blocks = whole.blocks[number * each : (number + 1) * each]
        is_last = number == stages - 1
        self.last = nn.Sequential(whole.norm, whole.head) if is_last else nn.Identity()
        self.around = whole.around

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x) if self.around is None else self.around(block, x)
        return self.last(x)


def loss_of(logits: Tensor, labels: Tensor) -> Tensor:
    """Return the mean cross-entropy of all tokens."""
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten())
