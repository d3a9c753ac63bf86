"""In-place forms: the variant of an op that writes its result into the memory of an operand.

A form computes the same bits as the op: it is the same kernel, told where to write. Where torch has
an ``out=`` variant of a kernel that may overwrite what it reads, the result can go to any operand;
otherwise ``op_`` writes its first argument. Variants that torch generates are no such forms: they
compute apart and copy.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch

from fxckpt.ops.kernels import OWN
from fxckpt.torch_private import OpOverload


@dataclass(frozen=True)
class InPlaceForm:
    """How an op writes its result into one of its operands."""

    target: OpOverload
    """The variant that writes."""
    operands: tuple[int, ...]
    """Positions of the arguments that it may write."""
    out: str | None
    """Name of the argument for the written tensor; None where it is the first argument."""
    is_elementwise: bool
    """Whether an element is read before it is written and never after, under any other operand."""
    devices: frozenset[str] | None = None
    """Types of the devices whose kernels are known to allow it; None for all."""


# fmt: off
ELEMENTWISE = frozenset(
    (
        "elu_backward", "hardshrink_backward", "hardsigmoid_backward", "hardswish",
        "hardswish_backward", "hardtanh_backward", "leaky_relu_backward", "log_sigmoid_backward",
        "softplus_backward", "softshrink_backward",
    )
)
"""Ops that torch has no tag for that says so."""

COPYING = frozenset(("clone",))
"""Elementwise ops that only copy."""

ROW_WISE = frozenset(
    (
        "_log_softmax", "_log_softmax_backward_data", "_softmax", "_softmax_backward_data",
        "cross_entropy_backward",
    )
)
"""Ops that read a whole row, and then write element after element what they read there."""

WRITING = frozenset(
    (
        "accumulate_mm", "addbmm", "addmm", "addmv", "addr", "baddbmm", "copy", "index_add",
        "index_copy", "index_fill", "index_put", "index_reduce", "masked_fill", "masked_scatter",
        "scatter", "scatter_add", "scatter_reduce",
    )
)
"""Ops that copy their first argument and write into the copy."""

PRODUCTS = frozenset(("addbmm", "addmm", "addmv", "addr", "baddbmm"))
"""Members of ``WRITING`` whose kernels on a GPU may differ between the two forms."""
# fmt: on

HOST = frozenset(("cpu",))
HOST_AND_CUDA = frozenset(("cpu", "cuda"))
"""Devices on which a variant was found to give the same bits."""


@cache
def in_place_form(op: OpOverload) -> InPlaceForm | None:
    """Return the in-place form of an op, or None if it has none.

    Examples
    --------
    >>> import torch
    >>> form = in_place_form(torch.ops.aten.tanh_backward.default)
    >>> str(form.target), form.operands, form.out
    ('aten.tanh_backward.grad_input', (0, 1), 'grad_input')
    >>> in_place_form(torch.ops.aten.mm.default) is None
    True
    """
    if not _is_plain(op):
        return None
    name = op._opname
    if name in WRITING:
        target = _writes_first(op)
        devices = HOST if name in PRODUCTS else None
        return None if target is None else InPlaceForm(target, (0,), None, False, devices)
    is_elementwise = (torch.Tag.pointwise in op.tags or name in ELEMENTWISE) and name not in COPYING
    if not is_elementwise and name not in ROW_WISE:
        return None
    devices = None if is_elementwise else HOST_AND_CUDA
    if (found := _writes_out(op)) is not None:
        target, out = found
        operands = tuple(i for i, a in enumerate(op._schema.arguments) if str(a.type) == "Tensor")
        return InPlaceForm(target, operands, out, is_elementwise, devices)
    if op._overloadname.startswith("Scalar"):
        return None  # The scalar is rounded to the operand's type first: bfloat16 bits differ.
    target = _writes_first(op)
    return None if target is None else InPlaceForm(target, (0,), None, is_elementwise, devices)


def _is_plain(op: OpOverload) -> bool:
    """Return whether an op of torch, or ours, makes one new tensor, and draws nothing."""
    returns = op._schema.returns
    return (
        (op.namespace == "aten" or op in OWN)
        and not op._schema.is_mutable
        and torch.Tag.nondeterministic_seeded not in op.tags
        and len(returns) == 1
        and str(returns[0].type) == "Tensor"
        and returns[0].alias_info is None
    )


def _writes_out(op: OpOverload) -> tuple[OpOverload, str] | None:
    """Return the ``out=`` variant of an op's kernel, and the name of the argument it writes."""
    packet = op._overloadpacket
    given = [(a.name, str(a.type)) for a in op._schema.arguments]
    for overload in packet.overloads():
        variant = getattr(packet, overload)
        arguments = variant._schema.arguments
        written = [a.name for a in arguments if a.alias_info is not None and a.kwarg_only]
        others = [(a.name, str(a.type)) for a in arguments if a.name not in written]
        if len(written) == 1 and others == given and torch.Tag.generated not in variant.tags:
            return variant, written[0]
    return None


def _writes_first(op: OpOverload) -> OpOverload | None:
    """Return the variant of an op that writes its first argument."""
    packet = getattr(getattr(torch.ops, op.namespace), f"{op._opname}_", None)
    if packet is None or op._overloadname not in packet.overloads():
        return None
    variant: OpOverload = getattr(packet, op._overloadname)
    given, found = (
        [(a.name, str(a.type)) for a in each._schema.arguments] for each in (op, variant)
    )
    return variant if given == found and torch.Tag.generated not in variant.tags else None
