"""Planned regions: an eager region under a policy or a budget is planned at its first call, and later calls that do the same follow that plan."""

from __future__ import annotations

import functools
import threading
import warnings
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from fxckpt.budget import Budget
from fxckpt.eager.plan_region import region_plan_of
from fxckpt.eager.recorder import Kept, Recorder
from fxckpt.eager.region_plan import CallKey, RegionPlan, seen, unplanned
from fxckpt.eager.replay import make
from fxckpt.eager.tape import Call, TensorVersion
from fxckpt.errors import CaptureError
from fxckpt.planner.planner import Planner
from fxckpt.policies.base import Policy
from fxckpt.policies.torch_form import FunctionPolicy
from fxckpt.torch_private import OpOverload
from fxckpt.utils.pytrees import flatten

PLAIN = (int, float, str, bytes, type(None), OpOverload)
MOST_WAYS = 32
"""Of one function; policies made anew at every call would pile up."""
MOST_COURSES = 64
"""A function that goes more ways than this has the oldest planned again."""


@dataclass(eq=False)
class CachedPlans:
    """The ways that one function was seen to go, under one policy and budget."""

    known: list[RegionPlan] = field(default_factory=list)

    def add(self, course: RegionPlan) -> None:
        """Remember a course, and forget the oldest of too many."""
        self.known = [course, *self.known[: MOST_COURSES - 1]]


class RegionMatcher:
    """Says, call by call, what a region keeps: what the first of the courses says that the region has kept to so far."""

    def __init__(self, courses: CachedPlans) -> None:
        self.courses = courses
        self.did: list[CallKey] = []
        self._left = list(courses.known)

    def __call__(
        self, number: int, op: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], out: Any
    ) -> Kept | frozenset[int]:
        """Return which results of a call are kept."""
        at = len(self.did)
        self.did.append(seen(op, out))
        self._left = [
            course
            for course in self._left
            if at < len(course.seen) and course.seen[at] == self.did[at]
        ]
        return self._left[0].kept.get(number, frozenset()) if self._left else Kept.NOWHERE

    def course(self, packed: tuple[int, ...]) -> RegionPlan | None:
        """Return the course that the region went, at its end, when tensors were saved after ``packed`` calls; None if it is a new one."""
        return next(
            (
                course
                for course in self._left
                if len(course.seen) == len(self.did) and course.packed == packed
            ),
            None,
        )


class RegionCache:
    """The courses of all functions, as long as those live; the one memory that outlives a call of ``checkpoint``."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        """Held while a region is planned: torch traces one graph at a time."""
        self._of: weakref.WeakKeyDictionary[Any, dict[Any, CachedPlans]] = (
            weakref.WeakKeyDictionary()
        )

    def courses(
        self, function: Callable[..., Any], budget: Budget, policy: Policy | None
    ) -> CachedPlans:
        """Return the courses of a function, which all modules of a class share."""
        with self.lock:
            ways = self._of.setdefault(_kind(function), {})
            # 1 byte is not 1.0 of the peak.
            found = ways.setdefault((type(budget), budget, _identity(policy)), CachedPlans())
            while len(ways) > MOST_WAYS:
                del ways[next(iter(ways))]
            return found


MEMORY = RegionCache()


def plan_region(
    recorder: Recorder, follower: RegionMatcher, result: Any, planner: Planner
) -> RegionPlan:
    """Return the course of a region that has just run; plan it, if it is new.

    What the plan keeps of a new region is then made from its tape, once, so that the first call too stays within its budget. A region that cannot be
    traced has no plan: with a budget that is a :class:`CaptureError`, with a policy a warning. Raises what planning raises.
    """
    packed = tuple(handle.time for handle in recorder.tape.live())
    course = follower.course(packed)
    if course is not None:
        return course
    outputs = recorder.places_of(differentiable(result)) or _ends(recorder.calls)
    try:
        with MEMORY.lock:
            course = region_plan_of(recorder.calls, outputs, follower.did, packed, planner)
    except CaptureError as error:
        if planner.budget is not None:
            raise CaptureError(
                f"{error}\nA budget needs a plan of the region. Leave out what cannot be traced, or the budget."
            ) from error
        warnings.warn(
            f"policy={planner.policy!r} is not applied, and the region keeps its inputs alone: {error}",
            stacklevel=2,
        )
        course = unplanned(follower.did, packed)
    follower.courses.add(course)
    recorder.keep_only(make(recorder.tape, recorder.latest(course.kept)))
    return course


def _ends(calls: Sequence[Call]) -> list[TensorVersion]:
    """Return the results that no call reads: what a region is likely to give, where it gives it in objects of its own."""
    read = {place for call in calls for place in call.reads()}
    ends = [
        place
        for call in calls
        for ref in call.outputs
        if (place := ref()) is not None and place not in read
    ]
    return [
        place
        for place in ends
        if place.geometry is not None and place.geometry[3].is_floating_point
    ]


def differentiable(result: Any) -> list[Tensor]:
    """Return the tensors in what a region returned that have a gradient."""
    return [leaf for leaf in flatten(result)[0] if isinstance(leaf, Tensor) and leaf.requires_grad]


def _kind(function: Callable[..., Any]) -> Any:
    """Return what functions that do the same have in common, and lives as long as they: a class, or the code of a function."""
    while isinstance(function, functools.partial):
        function = function.func
    if isinstance(function, nn.Module):
        return type(function)
    function = getattr(function, "__func__", function)
    return getattr(function, "__code__", type(function))


def _identity(policy: Policy | None) -> Any:
    """Return what tells a policy from others: of a function, its code and what it closes over, so that a lambda made anew is known again."""
    return _identity_of(policy.function) if isinstance(policy, FunctionPolicy) else policy


def _identity_of(function: Any) -> Any:
    if isinstance(function, functools.partial):
        bound = (*function.args, *function.keywords.items())
        return _identity_of(function.func), tuple(_plainly(value) for value in bound)
    code = getattr(function, "__code__", None)
    if code is None:
        return function
    cells = [cell.cell_contents for cell in getattr(function, "__closure__", None) or ()]
    defaults = [
        *(getattr(function, "__defaults__", None) or ()),
        *(getattr(function, "__kwdefaults__", None) or {}).items(),
    ]
    return code, tuple(
        _plainly(value) for value in (*cells, *defaults, getattr(function, "__self__", None))
    )


def _plainly(value: Any) -> Any:
    """Return a value that may live on in a key; by identity where it is not plain, as a model that a policy closes over."""
    if isinstance(value, tuple):
        return tuple(_plainly(item) for item in value)
    return value if isinstance(value, PLAIN) else id(value)
