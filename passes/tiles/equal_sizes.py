"""Equal sizes: let a gather take as many rows as there are, where it did when it was traced.

Inputs whose sizes vary have symbols of their own: logits and the tokens that are chosen from them
have as many rows at run time, and nothing in the graph says so, as a gather may also take fewer.
Guards say it then. A batch for which they do not hold is compiled anew.

Expects a joint graph whose halves are not compiled yet. Leaves the graph alone.
"""

from __future__ import annotations

import torch
from torch import fx

from fxckpt.torch_private import guard_equal, is_computed, is_surely_equal, size_hint, traced_size

aten = torch.ops.aten


def guard_gathers(graph: fx.Graph) -> None:
    """Guard the rows of each gather of few elements to be as many as those that it takes from."""
    for node in graph.find_nodes(op="call_function", target=aten.gather.default):
        source, dim, index = node.args[:3]
        whole, part = source.meta["val"], index.meta["val"]
        if whole.dim() != part.dim() or size_hint(whole.numel()) <= size_hint(part.numel()):
            continue
        pairs = [*zip(whole.shape, part.shape, strict=True)]
        del pairs[dim]
        others = [pair for pair in pairs if not is_surely_equal(*pair)]
        if all(all(map(is_computed, p)) and traced_size(p[0]) == traced_size(p[1]) for p in others):
            for pair in others:
                guard_equal(*pair)
