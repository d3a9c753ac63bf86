"""A region's plan, keyed by call number, so that it applies to later tapes with the same calls."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fxckpt.plans.types import Plan

CallKey = tuple[Any, tuple[int, ...] | None, torch.dtype | None, bool]
"""An op with the shape and dtype of its first result, and whether an argument has a gradient."""


@dataclass(frozen=True)
class RegionRecompute:
    """One recompute of a call in the backward."""

    call: int
    """Number of the call on the tape; -1 for an op that is on no tape."""
    position: int
    """Index of the first backward op that reads its results."""
    last_reader: int
    """Index of the last recompute that reads its results; its own index if none does."""
    until: int
    """Position of the next recompute of the call, where its results stop being used."""


@dataclass(frozen=True)
class LastUse:
    """Last use of the saved results of a call that is recomputed after it."""

    recompute: int
    """Index of the last recompute that reads them; -1 if none does."""
    position: int
    """Index of the last backward op that reads them; -1 if none does."""


@dataclass(frozen=True)
class Consumer:
    """The backward ops of one forward call."""

    position: int
    """Index of the last of these ops in the backward."""
    roots: frozenset[int]
    """Numbers of the calls that produce the forward values these ops read."""


@dataclass(frozen=True)
class RegionPlan:
    """A plan and the sequence of calls it applies to."""

    plan: Plan | None
    """None for a region without a plan, which keeps nothing."""
    keys: tuple[CallKey, ...]
    """Keys of the calls, in order: the plan applies to regions with the same keys."""
    packed: tuple[int, ...]
    """Number of calls before each tensor that autograd saved; depends on the inputs' gradients."""
    kept: Mapping[int, frozenset[int]]
    """Positions of the kept results of each call."""
    away: Mapping[int, frozenset[int]]
    """Positions of those among them that a policy sends away."""
    recomputes: tuple[RegionRecompute, ...]
    """Recomputes in the order of the backward."""
    consumers: Mapping[int, Consumer]
    """Backward ops of each call that has a gradient."""
    last_uses: Mapping[int, LastUse]
    """Last use of the results of each call that are saved, and recomputed when they are freed."""
    end: int
    """Number of ops in the backward."""

    def position(self, time: int, root: int, *, is_second: bool) -> int:
        """Return the position of the backward op that reads a tensor saved after ``time`` calls.

        Call ``root`` produced the tensor. Either the call before ``time`` saved it as its result,
        or the call after as its argument; if both did, the former was first and ``is_second``
        selects the latter.
        """
        savers = [self.consumers[n] for n in (time - 1, time) if n in self.consumers]
        able = [saver for saver in savers if root in saver.roots] or savers
        return able[-1 if is_second else 0].position if able else self.end


def unplanned(keys: Sequence[CallKey], packed: tuple[int, ...]) -> RegionPlan:
    """Return the plan of a region that keeps nothing."""
    return RegionPlan(
        plan=None,
        keys=tuple(keys),
        packed=packed,
        kept={},
        away={},
        recomputes=(),
        consumers={},
        last_uses={},
        end=0,
    )


def call_key(op: Any, args: Sequence[Any], out: Any) -> CallKey:
    """Return the key of a call."""
    first = out[0] if isinstance(out, (tuple, list)) and out else out
    has_gradient = any(map(_has_gradient, args))
    if isinstance(first, Tensor):
        return (op, tuple(first.shape), first.dtype, has_gradient)
    return (op, None, None, has_gradient)


def _has_gradient(arg: Any) -> bool:
    """Return whether an argument has a gradient, or a tensor in its list."""
    if type(arg) is list:
        return any(map(_has_gradient, arg))
    return isinstance(arg, Tensor) and arg.requires_grad
