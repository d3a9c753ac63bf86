"""Classes of ops that policies select: matrix products, attention kernels, pointwise ops."""

from __future__ import annotations

import re
from typing import Any

import torch

MATMULS = frozenset(
    (
        "mm",
        "addmm",
        "bmm",
        "baddbmm",
        "mv",
        "addmv",
        "matmul",
        "linear",
        "_scaled_mm",
        "_grouped_mm",
        "_scaled_grouped_mm",
        "_int_mm",
    )
)


def is_matmul(op: Any) -> bool:
    """Return whether an op multiplies matrices."""
    return getattr(op, "namespace", "") == "aten" and op._opname in MATMULS


def is_attention(op: Any) -> bool:
    """Return whether an op is a forward attention kernel."""
    name = str(getattr(op, "_opname", None) or getattr(op, "__name__", ""))
    return "backward" not in name and (
        "dot_product" in name or re.search("(flash|efficient|flex)_attention", name) is not None
    )


def is_pointwise(op: Any) -> bool:
    """Return whether torch tags an op as pointwise."""
    return torch.Tag.pointwise in getattr(op, "tags", ())
