"""Scratch: the memory an op's kernel allocates and frees before it returns.

Convolutions reorder their operands, attention keeps blocks, some reductions buffer: library workspace that no graph shows. Each distinct op
(by target, shapes, strides, dtypes and plain arguments) of a CPU graph is run once on random values (integers: zeros) and watched by the
allocator's own events.
"""

from __future__ import annotations

import logging
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from fxckpt.passes.facts import is_collective, is_known_pure, tensors
from fxckpt.torch_private import OpOverload, allocation_events, outside_trace, size_hint

log = logging.getLogger("fxckpt")

WITHOUT_SCRATCH = ("aten.mm", "aten.addmm", "aten.bmm", "aten.baddbmm")
"""Matrix products call straight into a BLAS with its own, static buffers; running them would take the most time."""


class MeasuredScratch:
    """Measures ops once each; lives for one compile."""

    def __init__(self) -> None:
        self._known: dict[Any, int] = {}

    def __call__(self, node: fx.Node) -> int:
        """Return the scratch bytes of one run of ``node``; 0 for what does not run on the CPU or is not torch's own."""
        if not isinstance(node.target, OpOverload) or not is_known_pure(node) or is_collective(node):
            return 0
        operands = [t for arg in node.all_input_nodes for t in tensors(arg.meta.get("val"))]
        if str(node.target.overloadpacket) in WITHOUT_SCRATCH and all(map(_blas_takes, operands)):
            return 0
        values = [node.meta.get("val"), *(arg.meta.get("val") for arg in node.all_input_nodes)]
        if any(t.device.type != "cpu" for v in values for t in tensors(v)) or not any(True for v in values for t in tensors(v)):
            return 0
        args, kwargs = fx.map_arg((node.args, node.kwargs), lambda n: n.meta.get("val"))
        leaves, spec = pytree.tree_flatten((args, kwargs))
        key = (node.target, tuple(_signature(leaf) for leaf in leaves), str(spec))
        if key not in self._known:
            self._known[key] = _measure(node, leaves, spec)
        return self._known[key]


def _blas_takes(matrix: torch.Tensor) -> bool:
    """Return whether a BLAS reads a matrix where it lies; one that is expanded or conjugated, or has no dense row or column, is copied first."""
    shape, stride = [size_hint(n) for n in matrix.shape], [size_hint(n) for n in matrix.stride()]
    if matrix.is_complex() or any(n > 1 and s == 0 for n, s in zip(shape, stride, strict=True)):
        return False
    if len(shape) < 2:
        return True
    (rows, columns), (down, right) = shape[-2:], stride[-2:]
    return (columns == 1 or (right == 1 and down >= columns)) or (rows == 1 or (down == 1 and right >= rows))


def _signature(leaf: Any) -> str:
    if isinstance(leaf, torch.Tensor):
        sizes = [size_hint(n) for n in (*leaf.shape, *leaf.stride(), leaf.storage_offset())]
        return f"{leaf.dtype} {len(leaf.shape)} {sizes} {leaf.is_conj()}"
    return repr(leaf)


def _real(leaf: Any) -> Any:
    if isinstance(leaf, torch.Tensor):
        shape, stride = [size_hint(n) for n in leaf.shape], [size_hint(n) for n in leaf.stride()]
        span = 1 + sum((n - 1) * s for n, s in zip(shape, stride, strict=True)) if 0 not in shape else 0
        offset = size_hint(leaf.storage_offset())
        filled = torch.zeros(span + offset, dtype=leaf.dtype)
        if (leaf.is_floating_point() or leaf.is_complex()) and leaf.dtype.itemsize > 1:
            # Some kernels need legal probabilities, some need more room for greater values.
            filled.uniform_()
        tensor = filled.as_strided(shape, stride, offset)
        return tensor.conj() if leaf.is_conj() else tensor
    if isinstance(leaf, (torch.SymInt, torch.SymFloat, torch.SymBool)):
        return size_hint(leaf)
    return leaf


def _measure(node: fx.Node, leaves: list[Any], spec: pytree.TreeSpec) -> int:
    op = node.target
    assert isinstance(op, OpOverload)
    with outside_trace(), torch.no_grad(), torch.random.fork_rng(devices=[]):
        args, kwargs = pytree.tree_unflatten([_real(leaf) for leaf in leaves], spec)
        try:
            changes, result = allocation_events(lambda: op(*args, **kwargs))
        except (RuntimeError, IndexError, ValueError) as error:
            # Such values are not always legal (an index, a factorization): the op is planned as if it needed no workspace.
            log.info("scratch of %s (%s) not measured: %s", node.name, node.target, error)
            return 0
    del result
    live = peak = 0
    for change in changes:
        live += change
        peak = max(peak, live)
    return peak - live
