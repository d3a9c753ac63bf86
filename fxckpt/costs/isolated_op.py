"""Isolated op: an op of a graph on its own, run on made-up values to learn what a graph does not show."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from fxckpt.ops.properties import is_collective, is_torchs_own, tensors
from fxckpt.torch_private import OpOverload, outside_trace, size_hint

OPAQUE = ("mkldnn", "cudnn", "miopen", "thnn", "nested", "sparse")
"""Beginnings of the names of ops that read buffers of a layout of their own: made-up ones may crash them."""

MOST_BYTES = 2**32
"""Operands whose sizes vary are not tried beyond this: the end of a range may be more than any step has."""


@dataclass(frozen=True, eq=False)
class IsolatedOp:
    """One op and what it is called with."""

    op: OpOverload
    leaves: tuple[Any, ...]
    spec: pytree.TreeSpec
    key: str
    """Equal for equal calls: target, plain arguments, and of tensors shape, strides, offset, dtype and device."""

    @classmethod
    def of(cls, node: fx.Node) -> IsolatedOp | None:
        """Return the trial of a node's op; None for what is not torch's own, has effects, or talks to other ranks."""
        if (
            not isinstance(node.target, OpOverload)
            or not is_torchs_own(node)
            or is_collective(node)
        ):
            return None
        if node.target._opname.lstrip("_").startswith(OPAQUE):
            return None
        args, kwargs = fx.map_arg((node.args, node.kwargs), lambda n: n.meta.get("val"))
        leaves, spec = pytree.tree_flatten((args, kwargs))
        if sum(map(_bytes_at_bound, leaves)) > MOST_BYTES:
            return None
        return cls(
            node.target,
            tuple(leaves),
            spec,
            " ".join((str(node.target), *map(signature, leaves), str(spec))),
        )

    @contextmanager
    def call(self) -> Iterator[Callable[[], Any]]:
        """Give the op bound to random values (integers: zeros, booleans: true), outside of any trace; generators are put back after.

        The call may raise :data:`REFUSED`: such values are not always legal (an index, a factorization).
        """
        devices = sorted(
            {
                leaf.device.index or 0
                for leaf in self.leaves
                if isinstance(leaf, torch.Tensor) and leaf.device.type == "cuda"
            }
        )
        with outside_trace(), torch.no_grad(), torch.random.fork_rng(devices=devices):
            args, kwargs = pytree.tree_unflatten(
                [synthetic_input(leaf) for leaf in self.leaves], self.spec
            )
            yield lambda: self.op(*args, **kwargs)


REFUSED = (RuntimeError, IndexError, ValueError)
"""What an op raises on values it does not take."""


def devices(node: fx.Node) -> set[str]:
    """Return the types of device that a node's tensors, in and out, are on."""
    values = [node.meta.get("val"), *(arg.meta.get("val") for arg in node.all_input_nodes)]
    return {t.device.type for v in values for t in tensors(v)}


def _bytes_at_bound(leaf: Any) -> int:
    """Return the bytes of a tensor whose sizes vary, at their upper bounds; 0 for one of fixed sizes, which the step makes as well."""
    if not isinstance(leaf, torch.Tensor) or all(isinstance(n, int) for n in leaf.shape):
        return 0
    return math.prod(size_hint(n) for n in leaf.shape) * leaf.element_size()


def signature(leaf: Any) -> str:
    """Return what kernels see of an argument: of a tensor all but its numbers."""
    if isinstance(leaf, torch.Tensor):
        sizes = [size_hint(n) for n in (*leaf.shape, *leaf.stride(), leaf.storage_offset())]
        return f"{leaf.device.type} {leaf.dtype} {len(leaf.shape)} {sizes} {leaf.is_conj()}"
    if isinstance(leaf, (torch.SymInt, torch.SymFloat, torch.SymBool)):
        return str(size_hint(leaf))
    return repr(leaf)


def synthetic_input(leaf: Any) -> Any:
    """Return a real value for a fake or symbolic one: random floats in [0, 1), integers of zero, booleans that are all true."""
    if isinstance(leaf, torch.Tensor):
        shape, stride = [size_hint(n) for n in leaf.shape], [size_hint(n) for n in leaf.stride()]
        span = (
            1 + sum((n - 1) * s for n, s in zip(shape, stride, strict=True))
            if 0 not in shape
            else 0
        )
        offset = size_hint(leaf.storage_offset())
        filled = torch.zeros(span + offset, dtype=leaf.dtype, device=leaf.device)
        if leaf.dtype is torch.bool:
            # A mask that lets all pass: what it selects, and what finds it, takes the most.
            filled.fill_(True)
        elif (leaf.is_floating_point() or leaf.is_complex()) and leaf.dtype.itemsize > 1:
            # Some kernels need legal probabilities, some need more room for greater values.
            filled.uniform_()
        tensor = filled.as_strided(shape, stride, offset)
        return tensor.conj() if leaf.is_conj() else tensor
    if isinstance(leaf, (torch.SymInt, torch.SymFloat, torch.SymBool)):
        return size_hint(leaf)
    return leaf
