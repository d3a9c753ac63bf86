"""Forms of ops for a recompute, which leave out what the first run did once for all.

Batch norm in training reads its running statistics to update them, and for nothing else. The form
without statistics has the same first results, to the bit, and does not read what the forward has
written since.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from fxckpt.ops.properties import argument, is_mutating
from fxckpt.torch_private import OpOverload

aten = torch.ops.aten


@dataclass(frozen=True)
class RecomputeForm:
    """The op that a recompute runs in place of a node's own."""

    target: OpOverload
    args: tuple[Any, ...]
    results: int
    """Number of results, which are the first of the node's own."""

    def items(self, node: fx.Node) -> list[fx.Node]:
        """Return the items of the node's tuple that it gives."""
        return [item for item in node.users if item.args[1] < self.results]  # type: ignore[operator]

    @property
    def operands(self) -> list[fx.Node]:
        """Nodes that it reads."""
        return [arg for arg in self.args if isinstance(arg, fx.Node)]


def recompute_form(node: fx.Node) -> RecomputeForm | None:
    """Return the form that recomputes a node; None if that is its own.

    A node whose other results are read by anything but the writes to its inputs has none.
    """
    if node.target is not aten._native_batch_norm_legit_functional.default:
        return None
    if argument(node, "training") is not True or node.kwargs:
        return None
    args: tuple[Any, ...] = node.args
    source, weight, bias, mean, var, *rest = args
    if not all(isinstance(n, fx.Node) and n.op == "placeholder" for n in (mean, var)):
        return None
    if weight is None and bias is None and mean.meta["val"].dtype != source.meta["val"].dtype:
        return None  # The kernel computes in the type of the first that is given of all these.
    form = RecomputeForm(aten._native_batch_norm_legit.no_stats, (source, weight, bias, *rest), 3)
    updated = set(node.users).difference(form.items(node))
    if any(
        user.op != "output" and not is_mutating(user) for item in updated for user in item.users
    ):
        return None
    return form
