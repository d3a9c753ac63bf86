"""Isolated op: one op of a graph, run outside it on synthetic inputs.

Its time and its workspace are measured, which the graph does not show.
"""

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

OPAQUE = ("mkldnn", "cudnn", "miopen", "thnn", "nested", "sparse", "assert", "functional_assert")
"""Prefixes of the names of ops that read buffers in a private layout, and of assertions.

Synthetic inputs may crash them; a failed assertion on a GPU ends every later call.
"""

MOST_BYTES = 2**32
"""Most bytes (4 GiB) of synthetic inputs with symbolic sizes; guess.

Their sizes are upper bounds, which may exceed the memory of any real step.
"""


@dataclass(frozen=True, eq=False)
class IsolatedOp:
    """One op and the arguments of its call."""

    op: OpOverload
    leaves: tuple[Any, ...]
    spec: pytree.TreeSpec
    key: str
    """Key of the call: equal for equal targets, plain arguments and metadata of tensors."""

    @classmethod
    def of(cls, node: fx.Node) -> IsolatedOp | None:
        """Return a node's op and arguments, or None if it is unsafe to run on synthetic inputs.

        Unsafe are ops other than torch's own, collectives, ops in :data:`OPAQUE`,
        and calls whose symbolic sizes allow more than :data:`MOST_BYTES`.
        """
        if (
            not isinstance(node.target, OpOverload)
            or not is_torchs_own(node)
            or is_collective(node)
        ):
            return None
        if node.target._opname.lstrip("_").startswith(OPAQUE):
            return None
        args, kwargs = fx.map_arg(_without_dropout(node), lambda n: n.meta.get("val"))
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
        """Yield the op bound to synthetic inputs, outside any trace; restore the generators after.

        The call may raise one of :data:`REFUSED`, since synthetic inputs are not always legal
        (indices, matrices to factorize).
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


def _without_dropout(node: fx.Node) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments of a node; a backward that repeats a forward's dropout drops nothing.

    Kernels of attention read the seed where the forward's kernel has left it, on the GPU or on the
    host, which no graph tells: a seed in the wrong place ends the process.
    """
    op: Any = node.target
    if not op._opname.endswith("_backward"):
        return node.args, node.kwargs
    # A call may leave out its last arguments.
    names = [argument.name for argument in op._schema.arguments]
    args = tuple(0.0 if n == "dropout_p" else a for n, a in zip(names, node.args, strict=False))
    return args, {n: 0.0 if n == "dropout_p" else a for n, a in node.kwargs.items()}


REFUSED = (RuntimeError, IndexError, ValueError)
"""Errors an op may raise on illegal inputs."""


def devices(node: fx.Node) -> set[str]:
    """Return the device types of a node's input and output tensors."""
    values = [node.meta.get("val"), *(arg.meta.get("val") for arg in node.all_input_nodes)]
    return {t.device.type for v in values for t in tensors(v)}


def _bytes_at_bound(leaf: Any) -> int:
    """Return the bytes of a tensor with symbolic sizes, at their upper bounds.

    Return 0 for a tensor of fixed sizes, since the step allocates it too.
    """
    if not isinstance(leaf, torch.Tensor) or all(isinstance(n, int) for n in leaf.shape):
        return 0
    return math.prod(size_hint(n) for n in leaf.shape) * leaf.element_size()


def signature(leaf: Any) -> str:
    """Return an argument as text.

    A tensor's is its device type, dtype, shape, strides, offset and conjugation, without values.
    """
    if isinstance(leaf, torch.Tensor):
        sizes = [size_hint(n) for n in (*leaf.shape, *leaf.stride(), leaf.storage_offset())]
        return f"{leaf.device.type} {leaf.dtype} {len(leaf.shape)} {sizes} {leaf.is_conj()}"
    if isinstance(leaf, (torch.SymInt, torch.SymFloat, torch.SymBool)):
        return str(size_hint(leaf))
    return repr(leaf)


def synthetic_input(leaf: Any) -> Any:
    """Return a real value for a fake or symbolic one.

    Floats are random in [0, 1), integers and one-byte floats are 0, booleans are true, and symbolic
    numbers take their hints.
    """
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
            # A mask that selects everything costs the most.
            filled.fill_(True)
        elif (leaf.is_floating_point() or leaf.is_complex()) and leaf.dtype.itemsize > 1:
            # Some kernels need legal probabilities, others more workspace for larger values.
            filled.uniform_()
        tensor = filled.as_strided(shape, stride, offset)
        return tensor.conj() if leaf.is_conj() else tensor
    if isinstance(leaf, (torch.SymInt, torch.SymFloat, torch.SymBool)):
        return size_hint(leaf)
    return leaf
