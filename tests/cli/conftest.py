"""A file with steps to be planned, in the folder that the command runs in."""

from __future__ import annotations

from pathlib import Path

import pytest

STEP = """
import torch
from fxckpt.policies import offload
from torch import nn

def make():
    print("the user's own print")
    blocks = (nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)) for _ in range(4))
    return nn.Sequential(*blocks), torch.randn(512, 64)

def keywords():
    model = nn.Linear(8, 8)
    return model, {"input": torch.randn(4, 8)}

def on_meta():
    with torch.device("meta"):
        return nn.Linear(8, 8), (torch.empty(4, 8),)

def raises():
    raise ValueError("no data here")

def needs(size):
    return size

def wrong():
    return 3

def nothing_to_learn():
    return torch.sin, torch.randn(3)

def mismatched():
    return lambda x: x @ torch.ones(8, 8), torch.randn(4, 7, requires_grad=True)

def reads_a_file():
    return Reads(), torch.randn(4, 8)

class Reads(nn.Linear):
    def __init__(self):
        super().__init__(8, 8)

    def forward(self, x):
        raise FileNotFoundError(2, "No such file or directory", "weights.bin")

def brackets():
    return Keyed(), torch.randn(4, 8)

class Keyed(nn.Module):
    def __init__(self):
        super().__init__()
        head = lambda: nn.Sequential(nn.Linear(8, 8), nn.Softmax(-1))
        self.heads = nn.ModuleDict({name: head() for name in ("a[0]", "a[1]")})

    def forward(self, x):
        return self.heads["a[0]"](x) + self.heads["a[1]"](x)

def checkpointed():
    return Dropped(True), torch.randn(64, 8)

def plain():
    return Dropped(False), torch.randn(64, 8)

class Dropped(nn.Sequential):
    def __init__(self, is_on):
        super().__init__(nn.Linear(8, 8), nn.Dropout(0.5))
        self.is_on = is_on

    def forward(self, x):
        from torch.utils.checkpoint import checkpoint
        forward = super().forward
        if not self.is_on:
            return forward(x)
        return checkpoint(forward, x, use_reentrant=False, preserve_rng_state=False)

def broken():
    return Broken(), torch.randn(64, 8)

class Broken(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))

    def forward(self, x):
        for layer in self.layers[:2]:
            x = layer(x).tanh().exp()
        torch._dynamo.graph_break()
        for layer in self.layers[2:]:
            x = layer(x).tanh().exp()
        return x.sum()

away = offload("layers")

def save_all(ctx, op, *args, **kwargs):
    from torch.utils.checkpoint import CheckpointPolicy
    return CheckpointPolicy.MUST_SAVE

number = 3
"""


@pytest.fixture
def step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "step_of_test.py").write_text(STEP)
    monkeypatch.chdir(tmp_path)
    return "step_of_test.py"
