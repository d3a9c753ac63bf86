"""Fields and code of graph modules."""

from __future__ import annotations

from typing import TypeVar

import torch.utils.checkpoint
from torch import fx

M = TypeVar("M", bound=torch.nn.Module)

MODULE_FIELDS = frozenset(vars(torch.nn.Module()))
"""What every module keeps its state, hooks and mode in."""

GRAPH_FIELDS = frozenset(vars(fx.GraphModule({}, fx.Graph()))) - MODULE_FIELDS
"""What a graph module keeps its graph and code in."""


def with_code(module: M) -> M:
    """Return a module whose ``forward`` is its own: Dynamo's graphs, and copies of them, make their code when it is asked for."""
    if isinstance(module, fx.GraphModule):
        module.code  # noqa: B018
    return module
