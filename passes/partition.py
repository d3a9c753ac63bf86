"""Partition: split a rematerialized joint graph into forward and backward.

Every node is bound to its half already; the calling convention between the halves (sizes last, version checks, tangents) is
AOTAutograd's own.
"""

from __future__ import annotations

from torch import fx

from fxckpt.passes.bind_sizes import bind_sizes
from fxckpt.passes.normalize import raise_getitems
from fxckpt.passes.rematerialize import Rematerialized
from fxckpt.torch_private import split


def partition(joint: fx.GraphModule, result: Rematerialized, *, num_fwd_outputs: int) -> tuple[fx.GraphModule, fx.GraphModule]:
    """Return the forward and the backward graph."""
    forward, backward = split(joint, result.saved, result.symbolic, num_fwd_outputs=num_fwd_outputs)
    for half in (forward, backward):
        raise_getitems(half.graph)
        bind_sizes(half.graph)
        half.graph.lint()
        half.recompile()
    return forward, backward
