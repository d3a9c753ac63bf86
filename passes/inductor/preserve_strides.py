"""Preserve strides: keep the traced layout of values that ``as_strided`` reads in a backward.

``as_strided`` reads memory, not values. In the forward, Inductor lays its operand out as it was
traced. Recomputed from values of another layout, the operand would take that layout, and
``as_strided`` would read other numbers.

Expects an emitted backward. Leaves one that computes the same.
"""

from __future__ import annotations

import torch
from torch import fx

from fxckpt.passes.inductor.channels_last import forced_like
from fxckpt.torch_private.inductor.default_partitioner import is_view


def preserve_strides(backward: fx.Graph) -> None:
    """Force the traced strides on values of the backward that ``as_strided`` reads.

    Reads through views count. Inputs of the backward and values of dynamic sizes are left alone.
    """
    forced: dict[fx.Node, fx.Node] = {}
    for reader in [node for node in backward.nodes if "as_strided" in str(node.target)]:
        value = reader.args[0]
        while is_view(value) and isinstance(value.args[0], fx.Node):
            reader, value = value, value.args[0]
        traced = value.meta["val"]
        if value.op == "placeholder" or not all(isinstance(n, int) for n in traced.shape):
            continue
        with_layouts = torch.empty_like(traced)
        # Inductor makes no value with holes or overlaps.
        if with_layouts.stride() == traced.stride():
            if value not in forced:
                forced[value] = forced_like(value, with_layouts)
            reader.replace_input_with(value, forced[value])
