"""Graphs that passes rewrite: a joint forward and backward, before it is split."""

from __future__ import annotations

from dataclasses import dataclass

from torch import fx


@dataclass(frozen=True)
class Joint:
    """A joint forward/backward graph in AOTAutograd's form."""

    module: fx.GraphModule
    """The graph, with its inputs named ``primals_*`` and ``tangents_*``."""
    num_fwd_outputs: int
    """Number of leading outputs that belong to the forward; the rest are gradients."""
