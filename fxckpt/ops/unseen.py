"""The op that stands in a region's graph for values that no trace of the graph can compute.

Such are memory that a kernel unseen by the dispatcher may have filled, and results whose size
depends on values. The op reads the tensors that they are computed from; at least one, as torch
takes an op without any for one of its own.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fxckpt.torch_private import OpOverload

NAME = "fxckpt::unseen"
"""Qualified name of the op. Its number keeps two of them from being taken for one."""
torch.library.define(
    NAME,
    "(str op, int number, Tensor[] reads, int[] size, int[] stride, ScalarType dtype, "
    "Device device) -> Tensor",
    tags=(torch.Tag.pt2_compliant_tag,),
)


def _unseen(
    op: str,
    number: int,
    reads: Sequence[Tensor],
    size: Sequence[int],
    stride: Sequence[int],
    dtype: torch.dtype,
    device: torch.device,
) -> Tensor:
    """Return memory like that of the values, for a trace or a measurement."""
    return torch.empty_strided(size, stride, dtype=dtype, device=device)


torch.library.impl(NAME, "cpu", _unseen)
torch.library.register_fake(NAME, _unseen)
unseen: OpOverload = torch.ops.fxckpt.unseen.default
