"""Planned regions: an eager region under a policy or a budget is planned at its first call, and later calls that do the same follow that plan."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from fxckpt.budget import Budget
from fxckpt.cost import CostModel
from fxckpt.course import Course, Seen, seen
from fxckpt.pipeline import Planner
from fxckpt.policy import Function, Policy
from fxckpt.recorder import Kept, Recorder
from fxckpt.region_plan import course_of
from fxckpt.replay import make
from fxckpt.structure import flatten
from fxckpt.torch_private import OpOverload

PLAIN = (int, float, str, bytes, type(None), OpOverload)
MOST_COURSES = 16
"""A function that goes more ways than this has the oldest planned again."""


@dataclass(eq=False)
class Courses:
    """The ways that one function was seen to go, under one policy and budget."""

    known: list[Course] = field(default_factory=list)

    def add(self, course: Course) -> None:
        """Remember a course, and forget the oldest of too many."""
        self.known = [course, *self.known[: MOST_COURSES - 1]]


class Follower:
    """Says, call by call, what a region keeps: what the first of the courses says that the region has kept to so far."""

    def __init__(self, courses: Courses) -> None:
        self.courses = courses
        self.did: list[Seen] = []
        self._left = list(courses.known)

    def __call__(self, number: int, op: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], out: Any) -> Kept | frozenset[int]:
        """Return which results of a call are kept."""
        at = len(self.did)
        self.did.append(seen(op, out))
        self._left = [course for course in self._left if at < len(course.seen) and course.seen[at] == self.did[at]]
        return self._left[0].kept.get(number, frozenset()) if self._left else Kept.NOWHERE

    def course(self) -> Course | None:
        """Return the course that the region went, at its end; None if it is a new one."""
        return next((course for course in self._left if len(course.seen) == len(self.did)), None)


class Memory:
    """The courses of all functions, as long as those live; the one memory that outlives a call of ``checkpoint``."""

    def __init__(self) -> None:
        self._of: weakref.WeakKeyDictionary[Any, dict[Any, Courses]] = weakref.WeakKeyDictionary()

    def courses(self, function: Callable[..., Any], budget: Budget, policy: Policy | None, cost: str | CostModel) -> Courses:
        """Return the courses of a function, which all modules of a class share."""
        ways = self._of.setdefault(_kind(function), {})
        return ways.setdefault((budget, _identity(policy), cost), Courses())


MEMORY = Memory()


def plan_region(recorder: Recorder, follower: Follower, result: Any, planner: Planner) -> Course | None:
    """Return the course of a region that has just run; plan it, if it is new.

    What the plan keeps of a new region is then made from its tape, once, so that the first call too stays within its budget. Raises what planning
    raises.
    """
    course = follower.course()
    if course is not None:
        return course
    course = course_of(recorder.calls, recorder.places_of(differentiable(result)), follower.did, planner)
    if course is not None:
        follower.courses.add(course)
        recorder.keep_only(make(recorder.tape, recorder.latest(course.kept)))
    return course


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
    function = policy.function if isinstance(policy, Function) else None
    code = getattr(function, "__code__", None)
    if code is None:
        return policy
    cells = tuple(cell.cell_contents for cell in getattr(function, "__closure__", None) or ())
    closed_over = (*cells, *(getattr(function, "__defaults__", None) or ()))
    # By identity where the value is not plain: a model that a policy closes over must not live on here.
    return code, tuple(value if isinstance(value, PLAIN) else id(value) for value in closed_over)
