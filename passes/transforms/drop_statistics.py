"""Drop the running statistics that batch norm's backward is given in training and does not read.

A recompute of the norm then has no use for them (:mod:`fxckpt.ops.recompute_forms`), and the
forward does not save them.

Expects a joint graph. Leaves one that computes the same bits.
"""

from __future__ import annotations

import torch
from torch import fx

from fxckpt.ops.properties import argument

BACKWARD = torch.ops.aten.native_batch_norm_backward.default
STATISTICS = (3, 4)
"""Positions of the running mean and variance."""


def drop_statistics(graph: fx.Graph) -> None:
    """Give None to each backward of a batch norm in training in place of running statistics."""
    for node in graph.find_nodes(op="call_function", target=BACKWARD):
        if argument(node, "train") is True:
            for position in STATISTICS:
                node.update_arg(position, None)
