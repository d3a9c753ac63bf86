"""Place: a joint graph that was traced on the CPU, as on another device.

Expects a joint graph of fake tensors. Leaves the ops, with every value on the device; ops that
stand in for those of a GPU are replaced.
"""

from __future__ import annotations

import torch
from torch import fx

from fxckpt.ops.properties import tensors
from fxckpt.torch_private import FakeTensor, move_fake, restore_ops


def place(graph: fx.Graph, device: torch.device) -> None:
    """Put the values of a graph, and the tensors that its ops make, on a device; in place."""
    if device.type == "cuda":
        restore_ops(graph)
    for node in graph.nodes:
        for tensor in tensors(node.meta.get("val")):
            if isinstance(tensor, FakeTensor):
                move_fake(tensor, device)
        if isinstance(node.kwargs.get("device"), torch.device):
            node.kwargs = {**node.kwargs, "device": device}
        if any(isinstance(arg, torch.device) for arg in node.args):
            node.args = tuple(device if isinstance(a, torch.device) else a for a in node.args)
