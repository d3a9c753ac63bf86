"""DDP's Python reducer under compiled autograd, on two ranks that talk over gloo."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch._dynamo import compiled_autograd
from torch.nn.parallel import DistributedDataParallel

import fxckpt
from tests.promises.autograd.test_compiled_autograd import (
    break_backward,
    double_gradients,
    halve_accumulated,
)

HOOKS: dict[str, Callable[[nn.Module], None]] = {
    "no hook": lambda net: None,
    "tensor hooks": double_gradients,
    "AccumulateGrad hooks": halve_accumulated,
    "graph breaks": break_backward,
}


def check(hooks: Callable[[nn.Module], None], inner: str, rank: int) -> None:
    """Compare one step with stock's, whose reducer is C++, and its plan with the lone model's."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    net = nn.Sequential(*(nn.Sequential(nn.Linear(32, 32), nn.GELU()) for _ in range(3)))
    twin, alone = copy.deepcopy(net), copy.deepcopy(net)
    x = torch.randn(128, 32, generator=torch.Generator().manual_seed(rank))
    for each in (net, twin):
        hooks(each)
    # A temporary one would be gone, with its hooks, before the backward.
    reduced = DistributedDataParallel(twin)
    reduced(x).square().mean().backward()
    plain = fxckpt.Backend(inner=inner, budget=0.8, scope="graph")
    torch.compile(alone, backend=plain)(x).square().mean().backward()
    torch._dynamo.reset()
    backend = fxckpt.Backend(inner=inner, budget=0.8, scope="graph")
    passed: list[Any] = []

    def compile_backward(gm: torch.fx.GraphModule) -> Any:
        passed.append(gm)
        return torch.compile(gm, backend=backend)

    with torch._dynamo.config.patch(optimize_ddp="python_reducer"):
        reduced = DistributedDataParallel(net)
        loss = torch.compile(reduced, backend=backend)(x).square().mean()
        with compiled_autograd._enable(compile_backward):
            loss.backward()
    assert len(passed) == 1
    found, expected = ([p.grad for p in each.parameters()] for each in (net, twin))
    if inner == "aot_eager":
        torch.testing.assert_close(found, expected, rtol=0, atol=0)
    torch.testing.assert_close(found, expected)
    (plan,) = backend.plans
    peak = plan.peak_bytes if inner == "aot_eager" else plan.compiled_peak_bytes
    assert peak and plan.budget_bytes and peak <= plan.budget_bytes
    assert [plan.digest] == [other.digest for other in plain.plans]


def train(rank: int, folder: str, cases: tuple[tuple[str, str], ...]) -> None:
    """Run the steps of one rank."""
    torch.set_num_threads(1)
    method = f"file://{folder}/group"
    dist.init_process_group("gloo", init_method=method, world_size=2, rank=rank)
    try:
        for inner, name in cases:
            check(HOOKS[name], inner, rank)
    finally:
        dist.destroy_process_group()


FAST = (("aot_eager", "no hook"), ("aot_eager", "graph breaks"), ("inductor", "graph breaks"))
SLOW = (("aot_eager", "tensor hooks"), ("aot_eager", "AccumulateGrad hooks"))


# Processes cost more than steps: one pair of them runs several.
@pytest.mark.parametrize("cases", [FAST, pytest.param(SLOW, marks=pytest.mark.sweep)])
def test_python_reducer_of_ddp(tmp_path: Path, cases: tuple[tuple[str, str], ...]) -> None:
    """Gradients are stock's, all-reduced, and the plan and its peak are those without DDP."""
    mp.spawn(train, (str(tmp_path), cases), nprocs=2)
