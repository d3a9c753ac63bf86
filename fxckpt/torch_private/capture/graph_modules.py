"""Attributes and generated code of graph modules."""

from __future__ import annotations

from typing import TypeVar

import torch.utils.checkpoint
from torch import fx

M = TypeVar("M", bound=torch.nn.Module)

MODULE_FIELDS = frozenset(vars(torch.nn.Module()))
"""Attributes in which every module keeps its state, hooks and mode."""

GRAPH_FIELDS = frozenset(vars(fx.GraphModule({}, fx.Graph()))) - MODULE_FIELDS
"""Attributes in which a graph module keeps its graph and code."""


def with_code(module: M) -> M:
    """Return ``module`` with the code of its ``forward`` generated.

    Dynamo's graph modules, and copies of them, are lazy: they generate code on first access.
    """
    if isinstance(module, fx.GraphModule):
        module.code  # noqa: B018
    return module
