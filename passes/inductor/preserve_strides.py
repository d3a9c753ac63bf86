"""Preserve the strides of what a backward returns."""

from __future__ import annotations

import torch
from torch import fx

from fxckpt.passes.inductor.channels_last import _forced
from fxckpt.torch_private.inductor.default_partitioner import is_view


def preserve_strides(backward: fx.GraphModule) -> None:
    """Force the strides that it was traced with on what is made in the backward and read by ``as_strided``, be it through views."""
    forced: dict[fx.Node, fx.Node] = {}
    for reader in [node for node in backward.graph.nodes if "as_strided" in str(node.target)]:
        value = reader.args[0]
        while is_view(value) and isinstance(value.args[0], fx.Node):
            reader, value = value, value.args[0]
        traced = value.meta["val"]
        if value.op == "placeholder" or not all(isinstance(n, int) for n in traced.shape):
            continue
        laid_out = torch.empty_like(traced)
        # What has holes, or lies over itself, is no value that Inductor makes.
        if laid_out.stride() == traced.stride():
            if value not in forced:
                forced[value] = _forced(value, laid_out)
            reader.replace_input_with(value, forced[value])
