"""Registration of ops by users: their costs, and whether they may be recomputed.

A registration is an attribute of the op itself (an ``OpOverload`` lives as long as its library),
so that no table has to be kept in step; :func:`registrations` lists what has one.
"""

from __future__ import annotations

import hashlib
import marshal
import math
import numbers
from collections.abc import Callable
from dataclasses import dataclass
from types import FunctionType
from typing import Any
from weakref import WeakSet

from fxckpt.errors import InvalidOption
from fxckpt.torch_private import OpOverload, has_effect, overloads_of

Count = int | float | Callable[..., int | float]
_ATTRIBUTE = "_fxckpt_registered"


@dataclass(frozen=True)
class Registered:
    """The registration of one op; None for facts that were not given."""

    flops: Count | None = None
    """FLOPs of one run, or a function of the op's arguments."""
    bytes: Count | None = None
    """Bytes read and written in one run, or a function of the op's arguments."""
    workspace: Count | None = None
    """Bytes allocated and freed within one run, or a function of the op's arguments."""
    recompute: bool | None = None
    """Whether the op may be recomputed."""


NOTHING = Registered()
"""Registration of an op that nobody registered."""
_registered: WeakSet[Any] = WeakSet()
"""The ops that have a registration."""


def register_op(
    op: Any,
    *,
    flops: Count | None = None,
    bytes: Count | None = None,
    workspace: Count | None = None,
    recompute: bool | None = None,
) -> None:
    """Register an op's costs, and whether it may be recomputed, most often for a custom op.

    An unregistered op outside of torch's own namespaces is never recomputed, counts no FLOPs but
    those of a formula of ``torch.utils.flop_counter``, moves the bytes of its arguments and
    results, and needs no memory beside them. A second call replaces the first.

    Parameters
    ----------
    op:
        The result of ``torch.library.custom_op``, a packet ``torch.ops.mylib.myop`` (all its
        overloads that write nothing), or one overload (``torch.ops.mylib.myop.default``).
    flops, bytes:
        FLOPs of one run, and bytes that it reads and writes: numbers, or functions of the op's own
        arguments (fake tensors: shapes and dtypes, no values).
    workspace:
        Most bytes that one run allocates and frees, as a fused loss does for its logits: as above.
    recompute:
        True: a second run with the same arguments gives the same values and has no effect.
        False: the op must not be recomputed.

    Raises
    ------
    InvalidOption
        For an object that is no op, for a count that is negative or not finite, and for
        ``recompute=True`` if the op writes its arguments or has effects.

    Examples
    --------
    >>> import torch, fxckpt
    >>> @torch.library.custom_op("docs::triple", mutates_args=())
    ... def triple(x: torch.Tensor) -> torch.Tensor:
    ...     return 3 * x
    >>> fxckpt.register_op(triple, flops=lambda x: x.numel(), recompute=True)
    """
    registration = Registered(
        _count("flops", flops), _count("bytes", bytes), _count("workspace", workspace), recompute
    )
    if recompute is not None and not isinstance(recompute, bool):
        raise InvalidOption(f"recompute={recompute!r} is neither True nor False.")
    overloads = _overloads(op)
    for overload in overloads:
        if recompute and _has_visible_effect(overload):
            raise InvalidOption(
                f"{overload} writes its arguments or has effects: a second run would be visible, "
                "so it cannot be registered with recompute=True. Make it functional "
                "(return the result, mutates_args=()), or leave recompute out."
            )
    for overload in overloads:
        setattr(overload, _ATTRIBUTE, registration)
        _registered.add(overload)


def _has_visible_effect(overload: OpOverload) -> bool:
    """Return whether a second run would be visible."""
    return bool(has_effect(overload) or overload._schema.is_mutable)


def registered(op: Any) -> Registered:
    """Return the registration of an op; one without facts if there is none."""
    registration = getattr(op, _ATTRIBUTE, NOTHING)
    return registration if isinstance(registration, Registered) else NOTHING


def registrations() -> str | None:
    """Return all registrations as text that is the same in another process.

    None if a count is a function that its code does not tell from others: a closure, or an object
    that is no plain function.
    """
    lines = []
    for op in _registered:
        facts = registered(op)
        counts = [_stable(facts.flops), _stable(facts.bytes), _stable(facts.workspace)]
        if None in counts:
            return None
        lines.append(f"{op} {counts} {facts.recompute}")
    return " ".join(sorted(lines))


def _stable(count: Count | None) -> str | None:
    """Return a count as text; None for a function that its code does not tell from others."""
    if not callable(count):
        return repr(count)
    if not isinstance(count, FunctionType) or count.__closure__ or count.__defaults__:
        return None
    return hashlib.sha256(marshal.dumps(count.__code__)).hexdigest()


def _count(name: str, count: Count | None) -> Count | None:
    if count is None or callable(count):
        return count
    if not isinstance(count, numbers.Real) or not math.isfinite(count) or count < 0:
        raise InvalidOption(
            f"{name}={count!r} is not a count. Give a number from 0 up, "
            "or a function of the op's arguments that returns one."
        )
    return count


def _overloads(op: Any) -> list[OpOverload]:
    overloads = overloads_of(op)
    if len(overloads) > 1:
        overloads = [
            overload for overload in overloads if not _has_visible_effect(overload)
        ] or overloads
    if overloads:
        return overloads
    raise InvalidOption(
        f"{op!r} is not an op that can be registered. Give what torch.library.custom_op returned, "
        "or torch.ops.<namespace>.<name>. A plain function is captured op by op and needs no "
        "registration; of a higher-order op nothing can be said but for its body."
    )
