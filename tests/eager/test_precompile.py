"""Artefacts of ``torch.compiler.precompile``, new in torch 2.15."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch._inductor.config
from torch import Tensor, nn

import fxckpt

LOAD = """
import sys
sys.modules["fxckpt"] = None  # Importing it is an error.
import torch
folder = sys.argv[1]
from torch.nn import Linear, Sequential, Tanh
model = Sequential(*(Sequential(Linear(8, 8), Tanh()) for _ in range(3)))
x, values, gradients = torch.load(f"{folder}/step.pt")
model.load_state_dict(values)
torch.compiler.precompile.load(f"{folder}/step.py", f"{folder}/step.cache")(model, x)
assert all(torch.equal(p.grad, g) for p, g in zip(model.parameters(), gradients, strict=True))
"""


@pytest.mark.skipif(not hasattr(torch.compiler, "precompile"), reason="new in torch 2.15")
def test_checkpointed_step_loads_without_fxckpt(tmp_path: Path) -> None:
    """A captured step keeps what its regions recompute, and asks no partitioner."""
    model = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(3)))
    x = torch.randn(4, 8)
    asked: list[int] = []

    class Asked(fxckpt.Partitioner):
        def split(self, *args: object, **given: object) -> object:  # type: ignore[override]
            asked.append(1)
            return super().split(*args, **given)  # type: ignore[arg-type]

    def step(model: nn.Sequential, x: Tensor) -> None:
        for block in model:
            x = fxckpt.checkpoint(block, x)
        x.square().mean().backward()

    where = {"artifact_path": tmp_path / "step.py", "cache_path": tmp_path / "step.cache"}
    with (
        torch._inductor.config.patch(custom_partitioner_fn=Asked(budget=0.9)),
        torch.compiler.precompile.capture(step, backend="eager", **where) as capture,
    ):
        capture(model, x)
    source = (tmp_path / "step.py").read_text()
    assert "fxckpt" not in source and not asked
    assert source.count("aten.tanh.default(") == 2 * 3
    gradients = [p.grad for p in model.parameters()]
    torch.save((x, model.state_dict(), gradients), tmp_path / "step.pt")
    subprocess.run([sys.executable, "-c", LOAD, str(tmp_path)], check=True, capture_output=True)
