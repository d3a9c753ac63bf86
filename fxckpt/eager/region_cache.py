"""Cache of region plans: a region is planned at its first call, and equal calls reuse the plan."""

from __future__ import annotations

import functools
import threading
import warnings
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from fxckpt.budgets import Budget
from fxckpt.eager.recorder import Kept, Recorder
from fxckpt.eager.region_plan import CallKey, RegionPlan, call_key, unplanned
from fxckpt.eager.region_planning import region_plan_of
from fxckpt.eager.replay import recomputed
from fxckpt.eager.tape import Call, TensorVersion, slice_of
from fxckpt.errors import CaptureError
from fxckpt.planner.planner import Planner
from fxckpt.policies.base import Policy
from fxckpt.policies.torch_form import FunctionPolicy
from fxckpt.torch_private import OpOverload
from fxckpt.utils.pytrees import flatten

PLAIN = (int, float, str, bytes, type(None), OpOverload)
"""Types of arguments that are equal where their values are."""
MAX_KEYS = 32
"""Limit of policies and budgets per function: new policy objects would pile up."""
MAX_PLANS = 64
"""Limit of plans per function, policy and budget; the oldest is dropped."""


@dataclass(eq=False)
class CachedPlans:
    """Plans of one function under one policy and budget, latest first."""

    known: list[RegionPlan] = field(default_factory=list)

    def add(self, region_plan: RegionPlan) -> None:
        """Add a plan, and drop the oldest beyond the limit."""
        self.known = [region_plan, *self.known[: MAX_PLANS - 1]]


class RegionMatcher:
    """Selects kept results call by call, by the first cached plan that matches the calls so far."""

    def __init__(self, plans: CachedPlans) -> None:
        self.plans = plans
        self.keys: list[CallKey] = []
        self._left = list(plans.known)

    def __call__(
        self, number: int, op: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], out: Any
    ) -> Kept | frozenset[int]:
        """Return the results of a call to keep."""
        at = len(self.keys)
        self.keys.append(call_key(op, args, out))
        self._left = [
            plan for plan in self._left if at < len(plan.keys) and plan.keys[at] == self.keys[at]
        ]
        return self._left[0].kept.get(number, frozenset()) if self._left else Kept.NOWHERE

    def is_lost(self) -> bool:
        """Return whether no cached plan matches the calls so far."""
        return not self._left

    def plan(self, packed: tuple[int, ...]) -> RegionPlan | None:
        """Return the plan that matches the whole region, saved tensors included, or None."""
        return next(
            (
                plan
                for plan in self._left
                if len(plan.keys) == len(self.keys) and plan.packed == packed
            ),
            None,
        )


class RegionCache:
    """Plans by function, weakly keyed: the only state that outlives a call of ``checkpoint``."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        """Lock for planning: torch traces one graph at a time."""
        self._of: weakref.WeakKeyDictionary[Any, dict[Any, CachedPlans]] = (
            weakref.WeakKeyDictionary()
        )

    def plans(
        self,
        function: Callable[..., Any],
        budget: Budget,
        policy: Policy | None,
        *,
        sends: bool,
        keeps_draws: bool,
    ) -> CachedPlans:
        """Return the plans of a function; all modules of a class share them.

        ``sends`` says whether a policy has a place to send values to, ``keeps_draws`` whether the
        results of random ops are kept.
        """
        with self.lock:
            by_key = self._of.setdefault(_kind(function), {})
            # A budget of 1 (byte) differs from 1.0 (a share of the peak).
            key = (type(budget), budget, _identity(policy), sends, keeps_draws)
            found = by_key.setdefault(key, CachedPlans())
            while len(by_key) > MAX_KEYS:
                del by_key[next(iter(by_key))]
            return found


CACHE = RegionCache()
"""Plans of all regions of this process."""


def plan_of_region(
    recorder: Recorder, matcher: RegionMatcher, result: Any, planner: Planner
) -> RegionPlan:
    """Return the plan of a region that has just run; plan the region if it is new.

    The kept results of a new region are recomputed once from its tape, so that its first call too
    stays within the budget. For a region that cannot be traced, raises :class:`CaptureError` with a
    budget, and warns with a policy alone. Raises the errors of planning.
    """
    packed = tuple(handle.time for handle in recorder.tape.live())
    region_plan = matcher.plan(packed)
    if region_plan is not None:
        return region_plan
    outputs = recorder.versions_of(differentiable(result)) or _ends(recorder.calls)
    try:
        if recorder.has_wrappers:
            raise CaptureError(
                "it computes on tensors that are made of others (DTensor, or another subclass), "
                "which only a compiled model can plan: torch.compile(model, backend='fxckpt')"
            )
        with CACHE.lock:
            region_plan = region_plan_of(
                recorder.calls, outputs, matcher.keys, packed, planner, recorder.held()
            )
    except CaptureError as error:
        if planner.budget is not None:
            raise CaptureError(
                f"{error}\nA budget needs a plan of the region. "
                "Leave out what cannot be traced, or the budget."
            ) from error
        warnings.warn(
            f"policy={planner.policy!r} is not applied, and the region keeps its inputs alone: "
            f"{error}",
            stacklevel=2,
        )
        region_plan = unplanned(matcher.keys, packed)
    matcher.plans.add(region_plan)
    kept = recorder.latest(region_plan.kept)
    later, _ = slice_of((handle.version for handle in recorder.tape.live()), kept)
    recorder.keep_only(recomputed(recorder.tape, kept, later=later))
    return region_plan


def _ends(calls: Sequence[Call]) -> list[TensorVersion]:
    """Return the results that no call reads: likely outputs of a region that returns objects."""
    read = {version for call in calls for version in call.reads()}
    ends = [
        version
        for call in calls
        for ref in call.outputs
        if (version := ref()) is not None and version not in read
    ]
    return [
        version
        for version in ends
        if version.geometry is not None and version.geometry[3].is_floating_point
    ]


def differentiable(result: Any) -> list[Tensor]:
    """Return the tensors in a region's result that require a gradient."""
    return [leaf for leaf in flatten(result)[0] if isinstance(leaf, Tensor) and leaf.requires_grad]


def _kind(function: Callable[..., Any]) -> Any:
    """Return the key that equivalent functions share: a module's class, or a function's code."""
    while isinstance(function, functools.partial):
        function = function.func
    if isinstance(function, nn.Module):
        return type(function)
    function = getattr(function, "__func__", function)
    return getattr(function, "__code__", type(function))


def _identity(policy: Policy | None) -> Any:
    """Return the key of a policy; for a function, its code and closure: equal lambdas match."""
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
    """Return a value that a key may hold: plain values themselves, the ``id`` of all others."""
    if isinstance(value, tuple):
        return tuple(_plainly(item) for item in value)
    return value if isinstance(value, PLAIN) else id(value)
