"""Eager regions beside ``torch.utils.checkpoint`` in one run.

    python bench/checkpoint.py

The first table has the overhead of a call, in CPU time of one thread; the second the wall time and
the peak of a stack of transformer blocks. All times are medians of interleaved rounds.
"""

from __future__ import annotations

import functools
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.utils.checkpoint as torchs
from tabulate import tabulate
from torch import Tensor, nn
from torch.nn import functional as F

import fxckpt

Checkpoint = Callable[..., Any]
ROUNDS = 9
CALLS = 300


def plain(function: Callable[..., Any], *args: Any) -> Any:
    """Return ``function(*args)``: the baseline without a checkpoint."""
    return function(*args)


SAVE_PRODUCTS = functools.partial(
    fxckpt.create_selective_checkpoint_contexts, [torch.ops.aten.mm.default]
)
TORCH = functools.partial(torchs.checkpoint, use_reentrant=False)


def overheads() -> str:
    """Return a table of the time of a region of one op: its call, and its call and backward."""
    x, grad = torch.randn(8, 8, requires_grad=True), torch.randn(8, 8)
    ways: dict[str, Checkpoint] = {
        "none": plain,
        "torch": TORCH,
        "fxckpt": fxckpt.checkpoint,
        "torch, selective": functools.partial(TORCH, context_fn=SAVE_PRODUCTS),
        "fxckpt, selective": functools.partial(fxckpt.checkpoint, context_fn=SAVE_PRODUCTS),
    }
    forward: dict[str, list[float]] = {name: [] for name in ways}
    both: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(ROUNDS):
        for name, way in ways.items():
            forward[name].append(_each(lambda way=way: way(torch.sin, x)))  # type: ignore[misc]
            both[name].append(_each(lambda way=way: way(torch.sin, x).backward(grad)))  # type: ignore[misc]
    rows = []
    for name in ways:
        peer = "torch, selective" if "selective" in name else "torch"
        cells = [name]
        for times in (forward, both):
            mine, its, none = (statistics.median(times[n]) for n in (name, peer, "none"))
            cells += [f"{mine:.0f}", f"{mine - none:.0f}", f"{(mine - none) / (its - none):.2f}"]
        rows.append(cells)
    headers = (
        "region of one op",
        "call us",
        "overhead",
        "x torch's",
        "and backward us",
        "overhead",
        "x torch's",
    )
    return tabulate(rows, headers=headers, disable_numparse=True, stralign="right")


def _each(run: Callable[[], Any]) -> float:
    start = time.process_time()
    for _ in range(CALLS):
        run()
    return (time.process_time() - start) / CALLS * 1e6


class Block(nn.Module):
    """Attention and MLP with dropout; the attention is not fused."""

    def __init__(self, width: int = 256, heads: int = 4, dropout: float = 0.1) -> None:
        super().__init__()
        self.heads, self.dropout = heads, dropout
        self.norm, self.norm_mlp = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            t.unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for t in self.qkv(self.norm(x)).chunk(3, -1)
        )
        weights = F.dropout(
            (q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5).softmax(-1), self.dropout
        )
        x = x + F.dropout(self.out((weights @ v).transpose(1, 2).flatten(2)), self.dropout)
        return x + F.dropout(self.down(F.gelu(self.up(self.norm_mlp(x)))), self.dropout)


AT_TORCHS_PEAK = "at torch's peak"
VARIABLES = 0.02
"""Share of the peak that the region's Python variables hold beside the plan."""


def stack(budgets: tuple[str | float, ...] = (AT_TORCHS_PEAK, 0.5, 0.7)) -> str:
    """Return a table of the time and peak of 12 blocks: a region each, and one planned region."""
    torch.manual_seed(0)
    blocks = nn.Sequential(*(Block() for _ in range(12)))
    x = torch.randn(8, 128, 256)

    def each(checkpoint: Checkpoint) -> Callable[[], None]:
        def run() -> None:
            y = x
            for block in blocks:
                y = checkpoint(block, y)
            y.square().mean().backward()

        return run

    def whole(budget: Any) -> Callable[[], None]:
        return lambda: fxckpt.checkpoint(blocks, x, budget=budget).square().mean().backward()

    ways: dict[str, Callable[[], None]] = {
        "none": each(plain),
        "torch, a block": each(TORCH),
        "fxckpt, a block": each(fxckpt.checkpoint),
    }
    peaks = {name: _peak(run, blocks) for name, run in ways.items()}
    for budget in budgets:
        limit = (
            round(peaks["torch, a block"] * (1 - VARIABLES)) if budget == AT_TORCHS_PEAK else budget
        )
        ways[f"fxckpt, whole, {budget}"] = whole(limit)
        peaks[f"fxckpt, whole, {budget}"] = _peak(whole(limit), blocks)
    times: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(ROUNDS):
        for name, run in ways.items():
            blocks.zero_grad()
            start = time.perf_counter()
            run()
            times[name].append(time.perf_counter() - start)
    its, its_peak = statistics.median(times["torch, a block"]), peaks["torch, a block"]
    rows = [
        (
            name,
            f"{statistics.median(t) * 1e3:.0f}",
            f"{statistics.median(t) / its:.3f}",
            f"{peaks[name] / 1e6:.2f}",
            f"{peaks[name] / its_peak:.3f}",
        )
        for name, t in times.items()
    ]
    headers = ("12 blocks, d 256, 8 x 128", "step ms", "x torch's", "peak MB", "x torch's")
    return tabulate(rows, headers=headers, disable_numparse=True, stralign="right")


def _peak(run: Callable[[], None], module: nn.Module) -> int:
    """Return the peak of the second step."""
    peak = 0
    for _ in range(2):
        module.zero_grad()
        peak = fxckpt.measure_peak(run)
    return peak


def main() -> None:
    """Print both tables."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    print(overheads(), flush=True)
    torch.set_num_threads(threads)
    print()
    print(stack())


if __name__ == "__main__":
    main()
