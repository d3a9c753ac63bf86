"""Example inputs read from a graph's metadata."""

from __future__ import annotations

import torch
from torch import fx, nn
from torch.fx.experimental.proxy_tensor import make_fx

import fxckpt
from fxckpt import policies


def test_shapes_come_from_graph_metadata() -> None:
    """A graph with shapes in its metadata is planned at once, at upper bounds of symbolic sizes."""
    model, x = nn.Sequential(nn.Linear(8, 8), nn.GELU()), torch.randn(4, 8)
    assert fxckpt.rewrite(make_fx(model)(x), policies.recompute_all).plan.recomputed == ("addmm",)
    dims = {"input": {0: torch.export.Dim("n", max=64)}}
    exported = torch.export.export(model, (x,), dynamic_shapes=dims).module()
    assert fxckpt.rewrite(exported, policies.recompute_all).plan.rows[0].shape == (64, 8)
    assert fxckpt.rewrite(fx.symbolic_trace(model)).plans == ()
