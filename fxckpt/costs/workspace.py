"""Workspace: the memory an op's kernel allocates and frees before it returns.

Convolutions reorder their operands, attention keeps blocks, some reductions buffer: library workspace that no graph shows. Each distinct op
of a CPU graph is run once on made-up values and watched by the allocator's own events.
"""

from __future__ import annotations

import logging

import torch
from torch import fx

from fxckpt.costs.isolated_op import REFUSED, IsolatedOp, devices
from fxckpt.ops.properties import tensors
from fxckpt.torch_private import allocation_events, size_hint, storage_id

log = logging.getLogger("fxckpt")

WITHOUT_SCRATCH = ("aten.mm", "aten.addmm", "aten.bmm", "aten.baddbmm")
"""Matrix products of these call straight into a BLAS with its own, static buffers; running them would take the most time."""
BLAS_DTYPES = (torch.float32, torch.float64)


class MeasuredWorkspace:
    """Measures ops once each; lives for one compile."""

    def __init__(self) -> None:
        self._known: dict[str, int] = {}

    def __call__(self, node: fx.Node) -> int:
        """Return the workspace bytes of one run of ``node``; 0 for what does not run on the CPU or is not torch's own."""
        trial = IsolatedOp.of(node)
        if trial is None or devices(node) != {"cpu"}:
            return 0
        operands = [t for arg in node.all_input_nodes for t in tensors(arg.meta.get("val"))]
        if str(trial.op.overloadpacket) in WITHOUT_SCRATCH and all(map(_blas_takes, operands)):
            return 0
        if trial.key not in self._known:
            self._known[trial.key] = _measure(trial, _result_bytes(node))
        return self._known[trial.key]


def _blas_takes(matrix: torch.Tensor) -> bool:
    """Return whether a BLAS reads a matrix where it lies.

    One that is expanded or conjugated, or has no dense row or column, is copied first; half precision goes through oneDNN, which reorders.
    """
    shape, stride = [size_hint(n) for n in matrix.shape], [size_hint(n) for n in matrix.stride()]
    if matrix.dtype not in BLAS_DTYPES or any(
        n > 1 and s == 0 for n, s in zip(shape, stride, strict=True)
    ):
        return False
    if len(shape) < 2:
        return True
    (rows, columns), (down, right) = shape[-2:], stride[-2:]
    return (columns == 1 or (right == 1 and down >= columns)) or (
        rows == 1 or (down == 1 and right >= rows)
    )


def _result_bytes(node: fx.Node) -> int:
    """Return the bytes of the storages that an op gives, by the graph."""
    return sum(
        {
            storage_id(t): size_hint(t.untyped_storage().nbytes())
            for t in tensors(node.meta.get("val"))
        }.values()
    )


def _measure(trial: IsolatedOp, result_bytes: int) -> int:
    try:
        with trial.call() as call:
            changes, result = allocation_events(call)
    except REFUSED as error:
        log.info("workspace of %s not measured, planned as none: %s", trial.op, error)
        return 0
    del result
    live = peak = 0
    for change in changes:
        live += change
        peak = max(peak, live)
    # Some kernels (col2im) leave their result in a larger storage than it needs, which no graph shows either.
    return peak - min(live, result_bytes)
