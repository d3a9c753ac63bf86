"""The backend with Inductor inside: values, caches, a missing compiler."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

import fxckpt
from fxckpt.backend.api import _InductorPartitioner
from fxckpt.torch_private.inductor.lowering import Lowerings
from tests.models.blocks import Net, gradients


def test_uuid_changes_with_options() -> None:
    def uuid(**options: Any) -> str:
        backend = fxckpt.Backend(**options)
        return _InductorPartitioner(backend, Lowerings(None), backend.partitioner.partition).uuid()

    assert uuid(budget=0.5) == uuid(budget=0.5)
    assert len({uuid(), uuid(budget=0.5), uuid(budget=0.6), uuid(cost="flops")}) == 4


def test_inductor_inside() -> None:
    model, x = Net(2), torch.randn(512, 32)
    model.eval()  # Inductor draws other random numbers than eager
    expected = gradients(model, model, x)
    backend = fxckpt.Backend(budget=0.7)
    got = gradients(model, torch.compile(model, backend=backend), x)
    assert all(torch.allclose(a, b, atol=1e-6) for a, b in zip(expected, got, strict=True))
    assert backend.plans[0].schedule


INDUCTOR_STEP = """
import sys, torch, fxckpt
from torch._dynamo.utils import counters
from torch import nn
for budget in sys.argv[1:]:
    torch._dynamo.reset(), counters.clear(), torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 64), nn.GELU(), nn.Linear(64, 64), nn.GELU())
    backend = fxckpt.Backend(budget=float(budget))
    torch.compile(model, backend=backend)(torch.randn(64, 8)).sum().backward()
    print(len(backend.plans), counters["inductor"]["fxgraph_cache_hit"])
"""


def run_inductor(
    folder: str, *budgets: str, **environment: str
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", INDUCTOR_STEP, *budgets],
        capture_output=True,
        text=True,
        env={
            **os.environ,
            "TORCHINDUCTOR_CACHE_DIR": folder,
            **environment,
        },
        timeout=300,
    )


def test_inductor_cache_across_processes(tmp_path: Path) -> None:
    """Inductor's cache serves a second process with the same budget, and no other."""
    first, second = (run_inductor(str(tmp_path), *each) for each in (["1.0"], ["1.0", "0.9"]))
    assert first.stdout.splitlines() == ["1 0"]
    assert second.stdout.splitlines() == ["1 2", "1 0"]


def test_no_compiler_names_two_ways_out(tmp_path: Path) -> None:
    failed = run_inductor(str(tmp_path), "1.0", CXX="/nonexistent")
    assert "InnerCompilerMissing" in failed.stderr
    assert "install a compiler" in failed.stderr and "aot_eager" in failed.stderr
