"""Workspace: the memory an op's kernel allocates and frees before it returns.

Convolutions reorder their operands, attention keeps blocks, some reductions buffer: no graph shows
this workspace. Each distinct op runs on synthetic inputs, on the CPU once, each thread watched by
the memory meter, on a GPU twice, between two readings of the caching allocator's statistics.
"""

from __future__ import annotations

import logging
import math

import torch
from torch import fx

from fxckpt.costs.isolated_op import REFUSED, IsolatedOp, devices
from fxckpt.costs.op_counts import evaluate_count
from fxckpt.memory_meter import AcceleratorMeter, Meter, counting_meter, meter_of
from fxckpt.ops.properties import tensors
from fxckpt.ops.registry import registered
from fxckpt.torch_private import allocated_bytes, allocation_events, size_hint, storage_id

log = logging.getLogger("fxckpt")

BLAS_PRODUCTS = ("aten.mm", "aten.addmm", "aten.bmm", "aten.baddbmm")
"""Matrix products that call a BLAS with static buffers; no workspace is measured for them.

They would take most of the time of measuring.
"""

BLAS_DTYPES = (torch.float32, torch.float64)
"""Dtypes that a BLAS multiplies."""


def stated_workspace(node: fx.Node) -> int:
    """Return the workspace bytes that ``register_op`` was told of an op, 0 without."""
    count = registered(node.target).workspace
    return 0 if count is None else math.ceil(max(0, evaluate_count(node, count)))


class MeasuredWorkspace:
    """Measured workspace of ops, each distinct call run once per compile."""

    def __init__(self) -> None:
        self._known: dict[str, int] = {}

    def __call__(self, node: fx.Node) -> int:
        """Return the workspace bytes of one run of ``node``.

        Return what was registered for an op, and 0 for one of a device that is not here or one
        that cannot run in isolation.
        """
        if registered(node.target).workspace is not None:
            return stated_workspace(node)
        isolated = IsolatedOp.of(node)
        if isolated is None:
            return 0
        if devices(node) != {"cpu"}:
            return self._on_gpu(node, isolated)
        operands = [t for arg in node.all_input_nodes for t in tensors(arg.meta.get("val"))]
        if str(isolated.op.overloadpacket) in BLAS_PRODUCTS and all(map(_blas_takes, operands)):
            return 0
        if isolated.key not in self._known:
            self._known[isolated.key] = _measure(isolated, _result_bytes(node))
        return self._known[isolated.key]

    def _on_gpu(self, node: fx.Node, isolated: IsolatedOp) -> int:
        """Return the workspace bytes of an op on a GPU; 0 for a pointwise op, which has none."""
        if (
            not {"cuda"} <= devices(node) <= {"cuda", "cpu"}
            or not torch.cuda.is_available()
            or torch.Tag.pointwise in isolated.op.tags
        ):
            return 0
        if isolated.key not in self._known:
            meter = meter_of(torch.device("cuda"))
            self._known[isolated.key] = metered(meter, isolated, _result_bytes(node))
        return self._known[isolated.key]


def _blas_takes(matrix: torch.Tensor) -> bool:
    """Return whether a BLAS reads a matrix in place.

    An expanded or conjugated matrix, or one without dense rows or columns, is copied first. Half
    precision goes through oneDNN, which reorders its operands.
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
    """Return the bytes of the storages of a node's results, from the graph."""
    return sum(
        {
            storage_id(t): allocated_bytes(size_hint(t.untyped_storage().nbytes()), t.device.type)
            for t in tensors(node.meta.get("val"))
        }.values()
    )


def metered(meter: Meter, isolated: IsolatedOp, result_bytes: int) -> int:
    """Return the workspace bytes of one op by a meter of its device.

    The first run is not counted: libraries take memory once, and keep it.
    """
    try:
        with isolated.call() as call:
            call()
            start = meter.allocated()
            if isinstance(meter, AcceleratorMeter):
                meter.restart_peak()
            with meter.watch() as watch:
                result = call()
                live, peak = meter.allocated() - start, watch.peak() - start
    except REFUSED as error:
        log.info("workspace of %s not measured, planned as none: %s", isolated.op, error)
        return 0
    del result
    return max(0, peak - min(live, result_bytes))


def _measure(isolated: IsolatedOp, result_bytes: int) -> int:
    """Return the workspace bytes of one run of a CPU op.

    Kernels take buffers on the threads they work with, which only the counting allocator sees;
    without it, the allocator's events of this thread are summed.
    """
    meter = counting_meter()
    try:
        with isolated.call() as call:
            if meter is not None and meter.exact:
                peak, live = meter.peak_of_threads(call)
            else:
                changes, _ = allocation_events(call)
                live = peak = 0
                for change in changes:
                    live += change
                    peak = max(peak, live)
    except REFUSED as error:
        log.info("workspace of %s not measured, planned as none: %s", isolated.op, error)
        return 0
    # Some kernels (col2im) return a result in a larger storage than the graph shows; the excess
    # counts as workspace.
    return max(0, peak - min(live, result_bytes))
