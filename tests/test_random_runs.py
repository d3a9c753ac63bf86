"""Random set-ups of two ranks, which differ in what they may: none hangs, all raise or none."""

from __future__ import annotations

import os
import random
import time
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import fxckpt
from tests.ranks import RANKS, on_ranks

WIDTH = 128
PLAIN = {"aot_eager": "aot_eager_default_partitioner", "inductor": "inductor"}
CACHES = ("FXCKPT_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR")


class Block(nn.Module):
    """A residual MLP with dropout."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.dropout(self.down(nn.functional.gelu(self.up(x))))


@dataclass(frozen=True)
class SetUp:
    """One way to train on two ranks."""

    wrap: str
    inner: str
    scope: str
    budget: float | int | str
    slow: int | None
    """Rank that sleeps."""
    cold: int | None
    """Rank whose caches are empty."""
    dropout: float
    sizes: list[list[int]]
    """Rows of each rank at each step; those of the last are uneven."""
    accumulates: bool
    bucket_mb: int

    @classmethod
    def drawn(cls, seed: int) -> SetUp:
        """Return the set-up of a seed."""
        draw = random.Random(seed)
        rows = [256, 256, 192, 320]
        varying = [
            [draw.choice(rows) for _ in range(RANKS)] if draw.random() < 0.5 else [256, 256]
            for _ in range(4)
        ]
        return cls(
            wrap=draw.choice(["ddp", "ddp split", "fsdp blocks", "fsdp whole"]),
            inner=draw.choice(["aot_eager", "aot_eager", "aot_eager", "inductor"]),
            scope=draw.choice(["step", "step", "graph"]),
            budget=draw.choice([0.5, 0.7, 0.9, "min", 1_200_000, 3_000_000]),
            slow=draw.choice([None, 0, 1]),
            cold=draw.choice([None, 0, 1]),
            dropout=draw.choice([0.0, 0.1]),
            sizes=[*varying, [draw.choice([256, 64, 17]), draw.choice([256, 40, 1])]],
            accumulates=draw.random() < 0.3,
            bucket_mb=draw.choice([1, 25]),
        )


def wrapped(setup: SetUp, backend: Any) -> tuple[nn.Module, Any]:
    """Return a parallel model and the same as it is compiled."""
    torch._dynamo.reset()
    torch._dynamo.config.optimize_ddp = setup.wrap == "ddp split"
    torch.manual_seed(0)
    net = nn.Sequential(*(Block(setup.dropout) for _ in range(4)))
    if setup.wrap.startswith("ddp"):
        model = DistributedDataParallel(net, bucket_cap_mb=setup.bucket_mb)
        return model, torch.compile(model, backend=backend)
    for block in net:
        fully_shard(block)
        if setup.wrap == "fsdp blocks":
            block.compile(backend=backend)
    sharded: Any = fully_shard(net)
    if setup.wrap == "fsdp whole":
        return sharded, torch.compile(sharded, backend=backend)
    return sharded, sharded


def false_alarms(told: list[warnings.WarningMessage], backend: Any) -> list[str]:
    """Return the warnings of a step that was over its budget, if its report says it was not."""
    if not isinstance(backend, fxckpt.Backend) or (step := backend.report().step) is None:
        return []
    over = step.measured_peak_bytes > step.budget_bytes
    return [str(each.message) for each in told if "over the budget" in str(each.message)] * (
        not over
    )


def trained(setup: SetUp, backend: Any) -> dict[str, Any]:
    """Return the gradients of the last step, and the error that ended it."""
    rank, found = dist.get_rank(), {"gradients": [], "error": None, "false alarms": []}
    model, call = wrapped(setup, backend)
    for number, rows in enumerate(setup.sizes):
        if not setup.accumulates or number % 2 == 0:
            model.zero_grad()
        torch.manual_seed(1000 * number + rank)
        x = torch.randn(rows[rank], WIDTH)
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            try:
                if setup.slow == rank:
                    time.sleep(random.random() * 0.3)
                loss = call(x).square().mean()
                if setup.slow == rank:
                    time.sleep(random.random() * 0.1)
                loss.backward()
                del loss
            except fxckpt.BudgetInfeasible as error:
                return found | {"error": f"step {number}: {error}"}
        if setup.scope == "step":
            found["false alarms"] += false_alarms(told, backend)
    gradients: list[Any] = [p.grad for p in model.parameters()]
    found["gradients"] = [
        (each.to_local() if hasattr(each, "to_local") else each).clone() for each in gradients
    ]
    return found


def run_seeds(seeds: list[int], folder: str) -> dict[int, dict[str, Any]]:
    """Train each set-up with fxckpt and without; return what differs."""
    rank, found = dist.get_rank(), {}
    for seed in seeds:
        setup = SetUp.drawn(seed)
        for name in CACHES:
            mine = f"cold-{seed}" if setup.cold == rank else "warm"
            os.environ[name] = f"{folder}/{mine}-{name}"
        plain = trained(setup, PLAIN[setup.inner])
        backend = fxckpt.Backend(setup.budget, inner=setup.inner, scope=setup.scope, group="world")
        planned = trained(setup, backend)
        found[seed] = {
            "error": planned["error"],
            "false alarms": planned["false alarms"],
            "bitwise": planned["error"] is not None
            or all(map(torch.equal, plain["gradients"], planned["gradients"])),
        }
        dist.barrier()
    return found


@pytest.mark.parametrize(
    "seeds",
    [
        pytest.param(range(1, 3), id="few"),
        *(
            pytest.param(range(first, first + 6), marks=pytest.mark.sweep, id=f"from {first}")
            for first in range(3, 51, 6)
        ),
    ],
)
def test_random_set_ups_never_hang(seeds: range, tmp_path: Path) -> None:
    """Ranks end with equal gradients or the same error, whatever differs between them."""
    first, second = on_ranks(run_seeds, list(seeds), str(tmp_path), seconds=900)
    assert isinstance(first, dict) and isinstance(second, dict), (first, second)
    for seed in seeds:
        for found in (first[seed], second[seed]):
            assert found == {"error": first[seed]["error"], "false alarms": [], "bitwise": True}, (
                SetUp.drawn(seed)
            )
