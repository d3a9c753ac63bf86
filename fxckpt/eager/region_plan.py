"""Courses: what a region does, call by call, and what its plan has kept and run again, in numbers that hold for every tape of that region."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fxckpt.plans.types import Plan

CallKey = tuple[Any, tuple[int, ...] | None, torch.dtype | None]
"""An op, and shape and type of its first result."""


@dataclass(frozen=True)
class Rerun:
    """One run of a call in the backward."""

    call: int
    """Its number on the tape; -1 for what a tape does not have."""
    position: int
    """Of the backward's ops: the first that reads what it makes."""
    last_reader: int
    """Index in the course of the last rerun that reads what this one makes; its own, if none does."""
    until: int
    """Position at which the call runs once more: what it makes serves the backward up to there."""


@dataclass(frozen=True)
class Consumer:
    """What the gradient of a call came down to."""

    position: int
    """Of the last of its ops among those of the backward."""
    roots: frozenset[int]
    """Numbers of the calls that fill what it reads of the forward."""


@dataclass(frozen=True)
class RegionPlan:
    """What a region does, and what its plan says of it."""

    plan: Plan | None
    """None: there is nothing to plan, and nothing is kept."""
    seen: tuple[CallKey, ...]
    """What the region did, call by call, views left out: a course is for regions that do the same."""
    packed: tuple[int, ...]
    """After how many calls autograd saved tensors, which differs with what needs a gradient."""
    kept: Mapping[int, frozenset[int]]
    """For each call, which of its results are kept."""
    reruns: tuple[Rerun, ...]
    """In the order of the backward."""
    consumers: Mapping[int, Consumer]
    """For each call that has a gradient."""
    end: int
    """How many ops the backward has."""

    def position(self, time: int, root: int, *, is_second: bool) -> int:
        """Return where the backward asks for a saved tensor: one saved after ``time`` calls, which is what call ``root`` filled.

        It was saved by the call before, as its result, or by the call after, as its argument; where both save it, the former came first.
        """
        savers = [self.consumers[n] for n in (time - 1, time) if n in self.consumers]
        able = [saver for saver in savers if root in saver.roots] or savers
        return able[-1 if is_second else 0].position if able else self.end


def unplanned(did: Sequence[CallKey], packed: tuple[int, ...]) -> RegionPlan:
    """Return the course of a region that keeps nothing."""
    return RegionPlan(
        plan=None, seen=tuple(did), packed=packed, kept={}, reruns=(), consumers={}, end=0
    )


def seen(op: Any, out: Any) -> CallKey:
    """Return what tells a call from others."""
    first = out[0] if isinstance(out, (tuple, list)) and out else out
    return (op, tuple(first.shape), first.dtype) if isinstance(first, Tensor) else (op, None, None)
