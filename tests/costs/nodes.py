"""Nodes of small traced functions."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx
from torch.fx.experimental.proxy_tensor import make_fx


def node_of(function: Any, *inputs: torch.Tensor, mode: str = "fake") -> fx.Node:
    """Return the last op of a traced function."""
    graph = make_fx(function, tracing_mode=mode)(*inputs).graph
    return next(n for n in reversed(graph.nodes) if n.op == "call_function")
