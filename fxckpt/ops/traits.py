"""Traits: what has to be known of an op to write it on a tape, from its schema, its tags and what its author said."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from fxckpt.ops.properties import CHOOSING, UNINITIALIZED
from fxckpt.ops.registry import registered
from fxckpt.torch_private import OpOverload, has_effect

ZEROS = frozenset(("zeros", "zeros_like", "new_zeros"))
"""Memory that extension kernels are given to fill, beside memory that is not initialized at all."""
HIDDEN_WRITES = {
    "native_batch_norm": (3, 4),
    "cudnn_batch_norm": (3, 4),
    "miopen_batch_norm": (3, 4),
}
"""Arguments that an op writes although its schema does not say so: running statistics."""
LOOKING_AT_GRAD = frozenset(("_sparse_mm_reduce_impl",))
"""Ops whose kernel makes less of tensors that need no gradient, as those of a replay do not."""
LIKES = ("empty", "full", "ones", "rand", "randint", "randn", "zeros")
NEWS = ("empty", "empty_strided", "full", "ones", "zeros")
ASKING_GEOMETRY = frozenset(
    (*(f"{name}_like" for name in LIKES), *(f"new_{name}" for name in NEWS))
)
"""Ops that ask their first argument for its geometry alone."""
OVERWRITING = frozenset(
    (
        "bernoulli_",
        "cauchy_",
        "copy_",
        "exponential_",
        "fill_",
        "geometric_",
        "log_normal_",
        "normal_",
        "random_",
        "uniform_",
        "zero_",
    )
)
"""Ops that write all of their first argument without reading it."""
CERTAIN, SUSPECT, BLANK, OPAQUE = range(4)
"""What a tape knows of the content of a storage.

CERTAIN: all. SUSPECT: zeros, which a kernel behind the dispatcher may have been given to fill, until a call on the tape writes it. BLANK: not
initialized, so that a kernel must have filled it, until a call writes all of it. OPAQUE: nothing, ever. In doubt, what is read is kept as it is then.
"""
PURE = frozenset(("aten", "prims", "quantized", "inductor"))
"""Namespaces of ops of which a second run gives what the first gave."""


@dataclass(frozen=True, slots=True)
class Traits:
    """What has to be known of an op to write it down."""

    is_random: bool
    dropout: int | None
    """Position of an argument that is zero where nothing is drawn, or is left out."""
    generator: int | None
    """Position of the generator, if it is not given by keyword."""
    writes: tuple[int | str, ...]
    """Arguments that it writes: positions, or names of those given by keyword only."""
    reads: bool
    """False for a view, which looks at no element."""
    doubt: int
    """What the tape does not know of its results: CERTAIN, SUSPECT, BLANK or OPAQUE."""
    never_twice: bool
    """Its results are kept, for a second run could differ or be seen."""
    overwrites: bool
    """Writes all of its first argument without reading it."""
    is_out: bool
    """Writes what it is given by ``out=``, and nothing else."""
    fills: int | None
    """Position of an argument that it fills, and that autograd saves before it does."""
    asks_geometry: bool
    """Asks its first argument for sizes, type and device alone."""
    is_plain: bool
    """Draws nothing, writes nothing, leaves no doubt, and reads its arguments."""


def traits_of(op: Any) -> Traits:
    """Return the traits of an op."""
    return _traits(op, registered(op).recompute)


@cache
def _traits(op: Any, recompute: bool | None) -> Traits:
    if not isinstance(op, OpOverload):
        return Traits(False, None, None, (), True, OPAQUE, True, False, False, None, False, False)
    arguments = op._schema.arguments
    declared = [
        a.name if a.kwarg_only else i
        for i, a in enumerate(arguments)
        if a.alias_info is not None and a.alias_info.is_write
    ]
    name = op._opname if op.namespace == "aten" else ""
    aliases = any(r.alias_info is not None for r in op._schema.returns)
    # set_ takes the storage of another tensor, or of none on the tape.
    never_twice = (
        name in CHOOSING
        or name in LOOKING_AT_GRAD
        or name == "set_"
        or not _may_run_twice(op, recompute)
    )
    positions = {a.name: i for i, a in enumerate(arguments) if not a.kwarg_only}
    is_random = torch.Tag.nondeterministic_seeded in op.tags
    writes = (*declared, *HIDDEN_WRITES.get(name, ()))
    doubt = (
        OPAQUE
        if never_twice
        else BLANK
        if name in UNINITIALIZED
        else SUSPECT
        if name in ZEROS
        else CERTAIN
    )
    return Traits(
        is_random=is_random,
        dropout=positions.get("dropout_p"),
        generator=positions.get("generator"),
        writes=writes,
        reads=bool(declared) or not aliases,
        doubt=doubt,
        never_twice=never_twice,
        overwrites=name in OVERWRITING,
        is_out=bool(declared) and all(isinstance(where, str) for where in declared),
        fills=1 if name.startswith("rrelu_with_noise") and not name.endswith("backward") else None,
        asks_geometry=name in ASKING_GEOMETRY,
        is_plain=not (is_random or writes or doubt or name in ASKING_GEOMETRY),
    )


def _may_run_twice(op: OpOverload, recompute: bool | None) -> bool:
    """Return whether a second run of an op gives what its first gave, and nobody sees it."""
    return op.namespace in PURE and not has_effect(op) if recompute is None else recompute
