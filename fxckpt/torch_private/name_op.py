"""Op behind :func:`fxckpt.name`."""

from __future__ import annotations

import torch.utils.checkpoint
from torch import fx
from torch._ops import OpOverload

NAME = "fxckpt::named"
"""The op behind :func:`fxckpt.name`. It returns nothing, so that neither autograd nor functionalization sees an alias in it."""
torch.library.define(NAME, "(Tensor value, str label) -> ()", tags=(torch.Tag.pt2_compliant_tag,))


@torch.library.impl(NAME, "CompositeExplicitAutograd")
def _name(value: torch.Tensor, label: str) -> None:
    """Do nothing: a name is for those who capture."""


@torch.library.register_fake(NAME)  # type: ignore[untyped-decorator]
def _name_fake(value: torch.Tensor, label: str) -> None:
    """Make nothing."""


@torch.library.impl(NAME, "FuncTorchBatched")
def _name_batched(value: torch.Tensor, label: str) -> None:
    """Name what lies under the batch."""
    name_op(torch._C._functorch.get_unwrapped(value), label)


name_op: OpOverload = torch.ops.fxckpt.named.default
# Nobody uses what it returns, and yet dead code elimination must leave it alone.
fx.node.has_side_effect(name_op)
