"""Raise getitems: items of a tuple follow its op at once, so that the tuple dies.

Expects any graph. Leaves one whose ``getitem`` calls stand behind the ops whose results they take.
"""

from __future__ import annotations

import operator

from torch import fx

from fxckpt.torch_private import OpOverload


def raise_getitems(graph: fx.Graph) -> None:
    """Move every ``getitem`` right behind its op, so that the tuple dies at once."""
    for node in list(graph.nodes):
        if node.target is operator.getitem and isinstance(node.args[0], fx.Node):
            parent = node.args[0]
            if isinstance(parent.target, OpOverload):
                parent.append(node)
