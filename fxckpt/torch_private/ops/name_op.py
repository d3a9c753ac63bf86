"""The op behind :func:`fxckpt.name`."""

from __future__ import annotations

import torch.utils.checkpoint
from torch import fx
from torch._ops import OpOverload

NAME = "fxckpt::named"
"""Qualified name of the op.

The op returns nothing, so that neither autograd nor functionalization sees an alias in it.
"""
torch.library.define(NAME, "(Tensor value, str label) -> ()", tags=(torch.Tag.pt2_compliant_tag,))


@torch.library.impl(NAME, "CompositeExplicitAutograd")
def _name(value: torch.Tensor, label: str) -> None:
    """Do nothing; the name matters to a capture only."""


@torch.library.register_fake(NAME)  # type: ignore[untyped-decorator]
def _name_fake(value: torch.Tensor, label: str) -> None:
    """Return nothing, like the op itself."""


@torch.library.impl(NAME, "FuncTorchBatched")
def _name_batched(value: torch.Tensor, label: str) -> None:
    """Name the tensor under the batch dimension of ``torch.vmap``."""
    name_op(torch._C._functorch.get_unwrapped(value), label)


name_op: OpOverload = torch.ops.fxckpt.named.default
# Without users, the op would be removed by dead code elimination.
fx.node.has_side_effect(name_op)
