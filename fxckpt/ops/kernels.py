"""Kernels of ours: ops of torch run part by part, in the memory of an operand.

::

    accumulate_mm(total, a, b)     total + a @ b, in the type of the total, float32
    cross_entropy_backward(...)    _log_softmax_backward_data(nll_loss_backward(...), ...)

Each has a form that writes into an operand, as torch's own ops have. No product is stored beside
the total: cuBLAS adds what it computes to the total where it writes it; elsewhere a part of the
rows at a time is computed, rounded to the type of the operands, and added. The gradient of
log-probabilities, zero but for one number a row, is stored for a part of the rows at a time; the
bits are those of the two ops.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from fxckpt.torch_private import OpOverload

aten = torch.ops.aten

PART_BYTES = 16 << 20
"""Bytes of the rows that are computed at a time, at most."""
PARTS = 8
"""Parts of a value of fewer bytes than as many of these."""
ROWS = 16
"""Rows of a part are a multiple of it, so that they are aligned as those of the whole are."""


def _parts(rows: int, row_bytes: int) -> Iterator[slice]:
    """Yield the parts of the rows of a matrix."""
    most = min(PART_BYTES // max(1, row_bytes), -(-rows // PARTS))
    step = max(1, most // ROWS) * ROWS
    return (slice(first, first + step) for first in range(0, rows, step))


def _accumulate_into(total: Tensor, mat1: Tensor, mat2: Tensor) -> Tensor:
    if total.device.type == "cuda" and torch.version.hip is None:
        aten.addmm.dtype_out(total, mat1, mat2, total.dtype, out=total)
        return total
    for part in _parts(total.shape[0], total.shape[1] * mat1.element_size()):
        total[part].add_(mat1[part] @ mat2)
    return total


def _accumulated(total: Tensor, mat1: Tensor, mat2: Tensor) -> Tensor:
    return _accumulate_into(total.clone(), mat1, mat2)


def _loss_backward_into(
    grad: Tensor,
    scores: Tensor,
    target: Tensor,
    weight: Tensor | None,
    reduction: int,
    ignore_index: int,
    total_weight: Tensor,
    input_dtype: torch.dtype,
    *,
    out: Tensor,
) -> Tensor:
    for part in _parts(scores.shape[0], scores.shape[1] * scores.element_size()):
        of_scores = aten.nll_loss_backward(
            grad[part] if grad.dim() else grad,
            scores[part],
            target[part],
            weight,
            reduction,
            ignore_index,
            total_weight,
        )
        aten._log_softmax_backward_data.out(of_scores, scores[part], 1, input_dtype, out=out[part])
        del of_scores  # Or the next part would be stored beside it.
    return out


def _loss_backward(grad: Tensor, scores: Tensor, *given: Any) -> Tensor:
    return _loss_backward_into(grad, scores, *given, out=_like_scores(grad, scores, *given))


def _like_scores(grad: Tensor, scores: Tensor, *given: Any) -> Tensor:
    """Return memory for the gradient of what the scores are computed from."""
    return scores.new_empty(scores.shape, dtype=given[-1])


LOSS = (
    "Tensor grad, Tensor scores, Tensor target, Tensor? weight, int reduction, "
    "SymInt ignore_index, Tensor total_weight, ScalarType input_dtype"
)
KERNELS: dict[str, tuple[str, Callable[..., Tensor], Callable[..., Tensor]]] = {
    "accumulate_mm": (
        "(Tensor total, Tensor mat1, Tensor mat2) -> Tensor",
        _accumulated,
        lambda total, mat1, mat2: torch.empty_like(total),
    ),
    "accumulate_mm_": (
        "(Tensor(a!) total, Tensor mat1, Tensor mat2) -> Tensor(a!)",
        _accumulate_into,
        lambda total, mat1, mat2: total,
    ),
    "cross_entropy_backward": (f"({LOSS}) -> Tensor", _loss_backward, _like_scores),
    "cross_entropy_backward.out": (
        f"({LOSS}, *, Tensor(a!) out) -> Tensor(a!)",
        _loss_backward_into,
        lambda *_, out: out,
    ),
}
"""Schema, kernel and fake kernel of each form."""
for _name, (_schema, _kernel, _fake) in KERNELS.items():
    torch.library.define(f"fxckpt::{_name}", _schema, tags=(torch.Tag.pt2_compliant_tag,))
    torch.library.impl(f"fxckpt::{_name}", "CompositeExplicitAutograd", _kernel)
    torch.library.register_fake(f"fxckpt::{_name}", _fake)

accumulate_mm: OpOverload = torch.ops.fxckpt.accumulate_mm.default
cross_entropy_backward: OpOverload = torch.ops.fxckpt.cross_entropy_backward.default
OWN = frozenset((accumulate_mm, cross_entropy_backward))
"""Ops of ours that return a new tensor, and always the same one."""


@register_flop_formula([torch.ops.fxckpt.accumulate_mm, torch.ops.fxckpt.accumulate_mm_])  # type: ignore[untyped-decorator]
def _flops(total: Any, mat1: Any, mat2: Any, *_: Any, **__: Any) -> int:
    """Return the FLOPs of the product, given the operands' shapes."""
    rows, inner = mat1
    return 2 * rows * inner * mat2[1]  # type: ignore[no-any-return]
