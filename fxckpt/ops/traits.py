"""Traits of an op that a tape needs, from its schema, its tags and its registration."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from fxckpt.ops.properties import CHOOSING, UNINITIALIZED
from fxckpt.ops.registry import registered
from fxckpt.torch_private import OpOverload, has_effect

ZEROS = frozenset(("zeros", "zeros_like", "new_zeros"))
"""Ops whose result an extension kernel may fill, besides those of uninitialized memory."""
HIDDEN_WRITES = {
    "native_batch_norm": (3, 4),
    "cudnn_batch_norm": (3, 4),
    "miopen_batch_norm": (3, 4),
}
"""Positions of arguments that an op writes beyond its schema: running statistics."""
LOOKING_AT_GRAD = frozenset(("_sparse_mm_reduce_impl",))
"""Ops whose kernels make less of tensors that require no gradient, which a replay's do not."""
LIKES = ("empty", "full", "ones", "rand", "randint", "randn", "zeros")
"""Factories that torch also has as ``..._like``."""
NEWS = ("empty", "empty_strided", "full", "ones", "zeros")
"""Factories that torch also has as ``new_...``."""
ASKING_GEOMETRY = frozenset(
    (*(f"{name}_like" for name in LIKES), *(f"new_{name}" for name in NEWS))
)
"""Ops that read only the metadata of their first argument."""
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
"""Ops that write the whole of their first argument without reading it."""
PURE = frozenset(("aten", "prims", "quantized", "inductor", "_c10d_functional"))
"""Namespaces of ops whose recompute gives the same values.

Collectives do where all ranks run them again in the same order, as they do the backward.
"""
ARRIVING = frozenset(("wait_tensor",))
"""Ops after which the values of their first argument are there, which they return."""


class Opacity(enum.IntEnum):
    """Facts that the tape does not know of a storage's content, in increasing degree.

    A value of an opaque storage is kept when it is read, with the content that it has then.
    """

    TRANSPARENT = 0
    """Nothing: it comes from outside, or recorded calls computed it."""
    ZEROED = 1
    """Zeros, which a kernel unseen by the dispatcher may fill, until a recorded call writes."""
    UNINITIALIZED = 2
    """An unseen kernel must fill it, until a recorded call writes the whole of it."""
    OPAQUE = 3
    """Unknown for good."""


@dataclass(frozen=True, slots=True)
class Traits:
    """Properties of an op that a tape needs to record it."""

    is_random: bool
    """Whether the op may draw from a generator, by its tag."""
    dropout: int | None
    """Position of the dropout probability; nothing is drawn if it is zero or left out."""
    generator: int | None
    """Position of the generator; None if the op has none, or takes it by keyword only."""
    writes: tuple[int | str, ...]
    """Arguments that the op writes: positions, or names of keyword-only ones."""
    reads: bool
    """Whether the op reads elements of its arguments; a view does not."""
    opacity: Opacity
    """Opacity of the storages of the results."""
    never_twice: bool
    """Whether results are kept, as a recompute could differ or be visible."""
    overwrites: bool
    """Whether the op writes the whole of its first argument without reading it."""
    is_out: bool
    """Whether the op writes its keyword-only arguments (``out=``) and no others."""
    fills: int | None
    """Position of an argument that autograd saves before the op fills it."""
    asks_geometry: bool
    """Whether the op reads only the sizes, dtype and device of its first argument."""
    is_arrival: bool
    """Whether the op only waits until the values of its first argument are there."""
    is_plain: bool
    """Whether the op draws and writes nothing, reads values, and has transparent results."""


def traits_of(op: Any) -> Traits:
    """Return the traits of an op."""
    return _traits(op, registered(op).recompute)


UNKNOWN_OP = Traits(
    is_random=False,
    dropout=None,
    generator=None,
    writes=(),
    reads=True,
    opacity=Opacity.OPAQUE,
    never_twice=True,
    overwrites=False,
    is_out=False,
    fills=None,
    asks_geometry=False,
    is_arrival=False,
    is_plain=False,
)
"""Traits of an op without a schema: its results are kept."""


@cache
def _traits(op: Any, recompute: bool | None) -> Traits:
    """Return the traits of an op, of which a registration says ``recompute``."""
    if not isinstance(op, OpOverload):
        return UNKNOWN_OP
    arguments = op._schema.arguments
    declared = _declared_writes(arguments)
    name = op._opname if op.namespace == "aten" else ""
    aliases = any(r.alias_info is not None for r in op._schema.returns)
    # set_ takes the storage of another tensor, which may not be on the tape.
    is_first_run_only = name in CHOOSING or name in LOOKING_AT_GRAD or name == "set_"
    never_twice = is_first_run_only or not _may_recompute(op, recompute)
    positions = {a.name: i for i, a in enumerate(arguments) if not a.kwarg_only}
    is_random = torch.Tag.nondeterministic_seeded in op.tags
    is_arrival = op.namespace == "_c10d_functional" and op._opname in ARRIVING
    writes = (*declared, *HIDDEN_WRITES.get(name, ()), *((0,) if is_arrival else ()))
    opacity = Opacity.OPAQUE if never_twice else _opacity(name)
    return Traits(
        is_random=is_random,
        dropout=positions.get("dropout_p"),
        generator=positions.get("generator"),
        writes=writes,
        reads=bool(declared) or not aliases,
        opacity=opacity,
        never_twice=never_twice,
        overwrites=name in OVERWRITING,
        is_out=bool(declared) and all(isinstance(argument, str) for argument in declared),
        fills=1 if name.startswith("rrelu_with_noise") and not name.endswith("backward") else None,
        asks_geometry=name in ASKING_GEOMETRY,
        is_arrival=is_arrival,
        is_plain=not (is_random or writes or opacity or name in ASKING_GEOMETRY),
    )


def _declared_writes(arguments: Sequence[Any]) -> list[int | str]:
    """Return the arguments that a schema marks as written, by position or keyword."""
    return [
        a.name if a.kwarg_only else i
        for i, a in enumerate(arguments)
        if a.alias_info is not None and a.alias_info.is_write
    ]


def _opacity(name: str) -> Opacity:
    """Return the opacity of the storages that an op makes."""
    if name in UNINITIALIZED:
        return Opacity.UNINITIALIZED
    return Opacity.ZEROED if name in ZEROS else Opacity.TRANSPARENT


def _may_recompute(op: OpOverload, recompute: bool | None) -> bool:
    """Return whether recomputing an op gives the same values and has no visible effect."""
    return op.namespace in PURE and not has_effect(op) if recompute is None else recompute
