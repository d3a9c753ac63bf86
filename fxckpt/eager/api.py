"""Eager entry points: ``checkpoint`` and the other names of ``torch.utils.checkpoint``.

Each name of torch's module has the same meaning here; torch's own classes are exported unchanged.
:mod:`fxckpt.eager.recorder` writes the tape of a region (:mod:`fxckpt.eager.tape`), and
:mod:`fxckpt.eager.replay` recomputes saved tensors from it in the backward.
"""

from __future__ import annotations

import difflib
import functools
import inspect
import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import (
    SAC_IGNORED_OPS,
    CheckpointFunction,
    CheckpointPolicy,
    DefaultDeviceType,
    GraphExecGroup,
    SelectiveCheckpointContext,
    check_backward_validity,
    detach_variable,
    get_device_states,
    noop_context_fn,
    set_checkpoint_debug_enabled,
    set_checkpoint_early_stop,
    set_device_states,
)

from fxckpt.budgets import Budget
from fxckpt.eager.recorder import Keep, Kept, Recorder
from fxckpt.eager.region_cache import CACHE, RegionMatcher, differentiable, plan_of_region
from fxckpt.eager.region_plan import RegionPlan
from fxckpt.eager.region_report import Region, region_of, watched
from fxckpt.eager.replay import unpack
from fxckpt.errors import CaptureError, CheckpointError, InvalidOption
from fxckpt.planner.planner import Planner, planner_of
from fxckpt.policies import as_policy
from fxckpt.policies.base import Policy
from fxckpt.policies.torch_form import AskedByOp
from fxckpt.tiers import Tier, tier_of
from fxckpt.torch_private import (
    TAKES_HOOKS_OPTION,
    calling_line,
    debug_override,
    is_called_by_compiler,
    is_traced,
    is_transformed,
    modules_of,
    policy_context,
    selective_policy,
    surrounding_hooks,
    torch_checkpoint,
    torch_selective_contexts,
)

__all__ = [
    "SAC_IGNORED_OPS",
    "CheckpointError",
    "CheckpointFunction",
    "CheckpointPolicy",
    "DefaultDeviceType",
    "GraphExecGroup",
    "SelectiveCheckpointContext",
    "check_backward_validity",
    "checkpoint",
    "checkpoint_sequential",
    "create_selective_checkpoint_contexts",
    "detach_variable",
    "get_device_states",
    "noop_context_fn",
    "set_checkpoint_debug_enabled",
    "set_checkpoint_early_stop",
    "set_device_states",
]

ENGINES = ("replay", "rerun")
"""Values of ``engine``."""
NO_MODULES: AbstractContextManager[Callable[[], str]] = nullcontext(lambda: "")
NO_CONTEXTS: tuple[AbstractContextManager[Any], AbstractContextManager[Any]] = (
    nullcontext(),
    nullcontext(),
)
NO_RESULT = object()
"""Result of a region whose context suppressed its exception."""
TRANSFORMED = (
    "fxckpt.checkpoint under a torch.func transform (grad, vmap, ...) saves what autograd "
    "saves: torch.func has no hooks for saved tensors. For its savings, compile the "
    "transformed function: torch.compile(torch.func.grad(f), backend='fxckpt')."
)
"""Warning for a region under a transform."""
CHECKS = ("default", "none")
"""Values of ``determinism_check``, as in torch."""
LOCATIONS = {
    CheckpointPolicy.MUST_SAVE: Kept.ON_DEVICE,
    CheckpointPolicy.PREFER_SAVE: Kept.ON_DEVICE,
    CheckpointPolicy.MUST_RECOMPUTE: Kept.NOWHERE,
    CheckpointPolicy.PREFER_RECOMPUTE: Kept.NOWHERE,
    CheckpointPolicy.MUST_CPU_OFFLOAD: Kept.ON_CPU,
    CheckpointPolicy.PREFER_CPU_OFFLOAD: Kept.ON_CPU,
    True: Kept.ON_DEVICE,
    False: Kept.NOWHERE,
}
"""Location of a result by a policy's answer, in torch's form."""


def checkpoint(
    function: Callable[..., Any] | None = None,
    *args: Any,
    use_reentrant: bool | None = None,
    preserve_rng_state: bool = True,
    context_fn: Callable[[], tuple[Any, Any]] = noop_context_fn,
    determinism_check: str = "default",
    debug: bool = False,
    early_stop: bool = True,
    respect_saved_tensors_hooks: bool | None = None,
    engine: str = "replay",
    policy: Any = None,
    budget: Budget = None,
    offload: Any = None,
    **kwargs: Any,
) -> Any:
    """Return ``function(*args, **kwargs)``, and recompute in the backward what autograd would save.

    The Python of the region runs once. Its inputs are saved; other saved tensors are recomputed by
    replaying the recorded *ops* that they depend on. Side effects, buffer updates and random draws
    therefore happen once, and the backward gets the same bits. Repeated backwards,
    ``autograd.grad``, double backward and ``retain_graph`` work, no input has to require a
    gradient, and regions nest. Without grad mode this is a plain call. Without a function, this
    returns a decorator: ``checkpoint(budget=0.5)(function)``.

    Parameters
    ----------
    function, args, kwargs:
        Any callable and its arguments. Tensors in nested containers or in a closure are inputs too.
    use_reentrant:
        Accepted for compatibility. It selects torch's variant only with ``engine="rerun"``; a
        replay has the limitations of neither variant.
    preserve_rng_state:
        True: save the generator state before each random op, and draw the same numbers in a replay.
        False: save no state, and keep the results of random ops.
    context_fn:
        Returns two context managers, for the region and for its replay; most often
        ``functools.partial(create_selective_checkpoint_contexts, policy)``, whose policy selects
        the results to keep.
    determinism_check, early_stop:
        Accepted for compatibility. A replay runs only the ops it needs, with the same shapes.
    debug:
        Name the line of the region in errors. Slows the region down.
    respect_saved_tensors_hooks:
        False: keep results that a policy selects out of the saved-tensor hooks that surround the
        region, such as ``save_on_cpu``. None and True: pass them through.
    engine:
        ``"replay"``, or ``"rerun"`` for torch's own implementation. Choose ``"rerun"`` if kernels
        unknown to PyTorch write into tensors that already hold values. Memory from
        ``torch.empty`` and zeros may be filled by such kernels under either engine.
    policy:
        Selects the results to keep: a policy of :mod:`fxckpt.policies`, a function in torch's form,
        or a list of ops to save. It is consulted when the region is planned: at its first call, and
        whenever its sequence of ops or shapes is new.
    budget:
        As for :class:`fxckpt.Backend`, for this region: peak bytes of its own forward and backward
        beyond the bytes allocated at its start. The region is planned at the end of its first call,
        which then recomputes the results to keep.
    offload:
        A place that the region's saved tensors are sent to when it ends and fetched from in the
        backward: a tier of :mod:`fxckpt.tiers`, ``"64GiB"`` or ``"host"``. Sent are the inputs that
        autograd computed, and the results that are kept; of these only what the policy sends, if it
        says so (``offload(...)``, ``MUST_CPU_OFFLOAD``). Compiled code takes the backend's.

    Raises
    ------
    TierFull
        The place has no room left for what is sent.
    InvalidOption, InvalidBudget
        If an option is invalid, or a policy returns no ``CheckpointPolicy``.
    BudgetInfeasible, PolicyConflict, PolicyMatchesNothing, CaptureError
        If planning fails, at a call that is planned.
    CheckpointError
        In the backward, if a tensor from outside the region was written after the forward.

    Examples
    --------
    >>> import torch, fxckpt
    >>> from torch import nn
    >>> block = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.1), nn.GELU(), nn.Linear(8, 1))
    >>> fxckpt.checkpoint(block, torch.randn(4, 8)).sum().backward()
    >>> block[0].weight.grad.shape
    torch.Size([8, 8])
    """
    is_torchs = torch.compiler.is_compiling() or engine == "rerun" or is_called_by_compiler()
    if is_torchs or (function is None and not args):
        options = {
            "use_reentrant": use_reentrant,
            "preserve_rng_state": preserve_rng_state,
            "context_fn": context_fn,
            "determinism_check": determinism_check,
            "debug": debug,
            "early_stop": early_stop,
            "respect_saved_tensors_hooks": respect_saved_tensors_hooks,
            "engine": engine,
            "policy": policy,
            "budget": budget,
            "offload": offload,
        }
        if function is None and not args:
            return _decorator(options, kwargs)
        return torch_checkpoint(function, *args, **_torch_options(**options), **kwargs)
    if function is None:
        raise InvalidOption("checkpoint(None, ...): give a function or module, then its arguments.")
    _check_options(function, engine, determinism_check)
    tier = _shared_tier(offload) if isinstance(offload, str) else tier_of(offload)
    _check_traced(budget, offload)
    planner = None
    if policy is not None or budget is not None:
        # A budget is of the region alone, between whose forward and backward values are away.
        planner = planner_of(
            budget, policy, "roofline", offload=None if budget is not None else tier
        )
    if not torch.is_grad_enabled():
        return function(*args, **kwargs)
    if is_transformed():
        warnings.warn(TRANSFORMED, stacklevel=2)
        return function(*args, **kwargs)
    contexts, selective = _contexts_of(context_fn, planner)
    # A traced graph cannot hold the state of a generator.
    keep_draws = not preserve_rng_state or is_traced()
    recording = _Recording(
        planner,
        selective,
        replay_context=contexts[1],
        keep_draws=keep_draws,
        hooks_see_chosen=respect_saved_tensors_hooks is not False,
        matcher=(
            None
            if planner is None
            else RegionMatcher(
                CACHE.plans(
                    function,
                    budget,
                    planner.policy,
                    sends=planner.offload is not None,
                    keeps_draws=keep_draws,
                )
            )
        ),
        tier=tier,
        watchers=watched(),
        debug=debug_override(debug),
    )
    with _modules(function, planner, recording.is_shown) as module:
        recorder = recording.recorder(module)
        plan = functools.partial(recording.end, function, recorder)
        return _record(recorder, contexts[0], function, args, kwargs, plan)


@dataclass(frozen=True)
class _Recording:
    """Options by which one call of a region is recorded, and planned or reported at its end."""

    planner: Planner | None
    """Plans the region; None without a policy and a budget."""
    selective: Any
    """Selective policy in torch's form, if any."""
    replay_context: AbstractContextManager[Any]
    """Context of the region's replays."""
    keep_draws: bool
    """Whether results of random ops are kept, and no generator state."""
    hooks_see_chosen: bool
    """Whether results that a policy selects pass through the hooks around the region."""
    matcher: RegionMatcher | None
    """Follows the calls of a planned region; None without a planner."""
    watchers: list[Region] | None
    """Where a report of regions collects them; None without a report."""
    tier: Tier | None
    """Where what is kept is sent to; None keeps it on its device."""
    debug: bool
    """Whether errors name the line of the region."""

    @property
    def is_shown(self) -> bool:
        """Whether anyone may see the lines and modules of the region's calls."""
        is_new = self.matcher is not None and not self.matcher.plans.known
        return self.watchers is not None or self.debug or is_new

    def recorder(self, module: Callable[[], str]) -> Recorder:
        """Return the recorder of one call; ``module`` returns the path of the running module."""
        is_shown, selective = self.is_shown, self.selective
        return Recorder(
            keep=self.matcher if selective is None else _keep_by(selective.function),
            locate=(
                (lambda: (calling_line() if is_shown else "", module()))
                if is_shown or self.planner is not None
                else None
            ),
            around=surrounding_hooks(),
            hooks_see_chosen=self.hooks_see_chosen,
            keep_draws=self.keep_draws,
            check_versions=selective is None or not selective.allows_writes,
            tier=self.tier,
            is_unplanned=None if self.matcher is None else self.matcher.is_lost,
            replay_context=self.replay_context,
        )

    def end(
        self, function: Callable[..., Any], recorder: Recorder, result: Any
    ) -> RegionPlan | None:
        """Return the plan of a region that has run, and report the region to watchers."""
        region_plan = None
        if self.planner is not None and self.matcher is not None:
            region_plan = plan_of_region(recorder, self.matcher, result, self.planner)
        if self.watchers is not None:
            plan = None if region_plan is None else region_plan.plan
            leaving = () if self.tier is None else recorder.leaving(region_plan)
            self.watchers.append(
                region_of(function, recorder, differentiable(result), plan, leaving)
            )
        return region_plan


@functools.cache
def _shared_tier(offload: str) -> Tier | None:
    """Return the place that all regions with the same text send to."""
    return tier_of(offload)


def _decorator(options: dict[str, Any], kwargs: Mapping[str, Any]) -> Callable[..., Any]:
    """Return a decorator that makes every call of a function a region with ``options``.

    Raises :class:`InvalidOption` for ``kwargs``, of which no function is known yet.
    """
    if kwargs:
        raise InvalidOption(
            f"checkpoint(...) without a function does not know {', '.join(sorted(kwargs))}. "
            f"Its options are {', '.join(_options())}; the function's own go to its calls."
        )

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        _check_options(function, options["engine"], options["determinism_check"])

        @functools.wraps(function)
        def region(*args: Any, **kwargs: Any) -> Any:
            return checkpoint(function, *args, **options, **kwargs)

        return region

    return decorate


def _torch_options(
    engine: str,
    policy: Any,
    budget: Budget,
    offload: Any,
    respect_saved_tensors_hooks: bool | None,
    **same: Any,
) -> dict[str, Any]:
    """Return the options of torch's own implementation for those of :func:`checkpoint`.

    Dynamo recognizes torch's function by identity and tags the region; it rejects an explicit
    ``context_fn`` that is the default. A compiled region saves nothing outside its graph, so that
    ``respect_saved_tensors_hooks`` matters to ``engine="rerun"`` alone. Raises
    :class:`InvalidOption` for what torch's implementation cannot do.
    """
    is_rerun = engine == "rerun"
    if budget is not None and is_rerun:
        raise InvalidOption(
            f"budget={budget!r} and engine='rerun': torch's implementation knows no budget. "
            "Use engine='replay'."
        )
    if offload is not None and is_rerun:
        raise InvalidOption(
            f"offload={offload!r} and engine='rerun': torch's implementation sends nothing away. "
            "Use engine='replay'."
        )
    context_fn = same.pop("context_fn")
    if policy is not None:
        context_fn = functools.partial(create_selective_checkpoint_contexts, policy)
    if context_fn is not noop_context_fn:
        same["context_fn"] = functools.partial(_called, context_fn)
    same["use_reentrant"] = bool(same["use_reentrant"]) and is_rerun
    if is_rerun and TAKES_HOOKS_OPTION:
        same["respect_saved_tensors_hooks"] = respect_saved_tensors_hooks
    elif is_rerun and respect_saved_tensors_hooks:
        raise InvalidOption(
            f"respect_saved_tensors_hooks=True and engine='rerun': the implementation of torch "
            f"{torch.__version__} knows no such option. Use engine='replay'."
        )
    return same


def _check_options(function: Any, engine: str, determinism_check: str) -> None:
    """Raise :class:`InvalidOption` for a function or an option that ``checkpoint`` rejects."""
    if not callable(function):
        raise InvalidOption(
            f"checkpoint({function!r}, ...): give a function or module and then its arguments; "
            f"{type(function).__name__} is neither."
        )
    if engine not in ENGINES or determinism_check not in CHECKS:
        raise InvalidOption(
            f"engine={engine!r}, determinism_check={determinism_check!r}: engine is one of "
            f"{ENGINES}, determinism_check one of {CHECKS}."
        )


def _check_traced(budget: Budget, offload: Any) -> None:
    """Raise :class:`CaptureError` for a budget, or a tier, in a call that is traced."""
    if offload is not None and is_traced():
        raise CaptureError(
            f"checkpoint(offload={offload!r}) in a call that make_fx traces: a graph has no region "
            "that ends. Leave offload out, and give one to what compiles the graph."
        )
    if budget is not None and is_traced():
        raise CaptureError(
            f"checkpoint(budget={budget!r}) in a call that make_fx traces, as "
            "torch.compiler.precompile does: a region is planned when it runs. Leave the budget "
            "out, and make a region of each part that is to be recomputed."
        )


def _contexts_of(
    context_fn: Callable[[], tuple[Any, Any]], planner: Planner | None
) -> tuple[tuple[Any, Any], Any]:
    """Return the contexts for a region and its replay, and torch's selective policy, if any.

    A selective policy replaces the contexts: the recorder applies it. Raises :class:`InvalidOption`
    for a selective policy beside a planner.
    """
    if context_fn is noop_context_fn:
        return NO_CONTEXTS, None
    contexts = context_fn()
    selective = selective_policy(contexts)
    if selective is None:
        return contexts, None
    if planner is not None:
        raise InvalidOption(
            "context_fn and policy (or budget) were given: both say what the region keeps. "
            "Give the policy alone: policy=..."
        )
    return NO_CONTEXTS, selective


def _modules(
    function: Callable[..., Any], planner: Planner | None, is_shown: bool
) -> AbstractContextManager[Callable[[], str]]:
    """Return a context whose value returns the path of the running module, if someone needs it."""
    policy = None if planner is None else planner.policy
    is_needed = is_shown or (policy is not None and policy.needs_graph)
    return modules_of(function) if is_needed else NO_MODULES


def checkpoint_sequential(
    functions: nn.Sequential | Sequence[Callable[..., Any]],
    segments: int | str,
    input: Any,
    use_reentrant: bool | None = None,
    **options: Any,
) -> Any:
    """Apply ``functions`` to ``input`` in order, in ``segments`` checkpointed regions.

    As in torch, all but the last segment are checkpointed. ``segments="auto"`` with a ``budget``
    makes one region of all functions, and its plan selects the results to keep; without a budget it
    makes about sqrt(n) segments of n functions (Chen et al. 2016, arXiv:1604.06174).
    ``use_reentrant`` and ``options`` go to :func:`checkpoint`. Raises :class:`InvalidOption` for
    unknown options, for ``functions`` that are empty or not callable, and for an impossible number
    of segments.

    Examples
    --------
    >>> import torch, fxckpt
    >>> from torch import nn
    >>> layers = [nn.Sequential(nn.Linear(8, 8), nn.GELU()) for _ in range(9)]
    >>> fxckpt.checkpoint_sequential(layers, "auto", torch.randn(4, 8)).shape
    torch.Size([4, 8])
    """
    steps = list(functions.children()) if isinstance(functions, nn.Sequential) else list(functions)
    unknown = options.keys() - set(_options())
    if unknown:
        raise InvalidOption(
            f"checkpoint_sequential does not know {', '.join(sorted(unknown))}. "
            f"Its options are {', '.join(_options())}."
        )
    if not steps or not all(map(callable, steps)):
        raise InvalidOption(
            f"functions={functions!r}: give an nn.Sequential, or a list of modules or functions "
            "that is not empty."
        )
    if isinstance(segments, bool) or not (
        segments == "auto" or (isinstance(segments, int) and 1 <= segments <= len(steps))
    ):
        raise InvalidOption(
            f"segments={segments!r}: give a whole number from 1 to {len(steps)}, as many functions "
            "as there are, or 'auto'."
        )
    if segments != "auto" and options.get("budget") is not None:
        raise InvalidOption(
            f"budget={options['budget']!r} and segments={segments} were given: a budget chooses "
            "what is kept. Use segments='auto'."
        )
    options["use_reentrant"] = use_reentrant
    if segments == "auto" and options.get("budget") is not None:
        return checkpoint(_Chain(steps), input, **options)
    size = len(steps) // (round(math.sqrt(len(steps))) if segments == "auto" else int(segments))
    last = len(steps) - size if segments == "auto" else size * (int(segments) - 1)
    for start in range(0, last, size):
        input = checkpoint(_Chain(steps[start : min(start + size, last)]), input, **options)
    return _Chain(steps[last:])(input)


class _Chain(nn.Module):
    """Composition of functions, applied in order."""

    def __init__(self, steps: Sequence[Callable[..., Any]]) -> None:
        super().__init__()
        self._steps = steps
        for i, step in enumerate(steps):
            if isinstance(step, nn.Module):
                self.add_module(str(i), step)

    def forward(self, value: Any) -> Any:
        for step in self._steps:
            value = step(value)
        return value


def create_selective_checkpoint_contexts(
    policy_fn_or_list: Any, allow_cache_entry_mutation: bool = False
) -> tuple[Any, Any]:
    """Return torch's selective checkpoint contexts, also for a policy of :mod:`fxckpt.policies`.

    The policy is consulted op by op, without the graph. Raises :class:`InvalidOption` for a policy
    that needs the graph (module paths, names, ``sqrt_n``): give it to ``checkpoint(...,
    policy=...)`` or to :class:`fxckpt.Backend`.

    Parameters
    ----------
    policy_fn_or_list:
        A policy, or a list of them, or torch's own forms: a function, or a list of ops to save.
    allow_cache_entry_mutation:
        As in torch: whether a saved result may be written to before the backward.

    Examples
    --------
    >>> import torch, fxckpt
    >>> from functools import partial
    >>> policy = fxckpt.policies.save_matmuls
    >>> contexts = partial(fxckpt.create_selective_checkpoint_contexts, policy)
    >>> w = torch.ones(3, 3, requires_grad=True)
    >>> fxckpt.checkpoint(lambda w: (w @ w).exp().sum(), w, context_fn=contexts).backward()
    """
    policy = policy_fn_or_list
    if isinstance(policy, Policy) or (
        isinstance(policy, (list, tuple)) and any(isinstance(part, Policy) for part in policy)
    ):
        found = as_policy(policy)
        assert found is not None
        if found.needs_graph:
            raise InvalidOption(
                f"{found!r} looks at modules, names or the whole sequence of values, and here a "
                "policy is asked op by op. Give it to checkpoint(..., policy=...) in eager code, "
                "or to the backend of torch.compile: fxckpt.Backend(policy=...)."
            )
        policy = AskedByOp(found)
    contexts: tuple[Any, Any] = torch_selective_contexts(policy, allow_cache_entry_mutation)
    return contexts


def _called(context_fn: Callable[[], tuple[Any, Any]]) -> tuple[Any, Any]:
    """Call ``context_fn``; bound by ``functools.partial``, a lambda is a constant to Dynamo."""
    return context_fn()


def _record(
    recorder: Recorder,
    context: AbstractContextManager[Any],
    function: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    plan: Callable[[Any], RegionPlan | None] | None = None,
) -> Any:
    """Run a region under a recorder on top of all modes, so that ops are recorded as called."""
    region_plan = None
    result = NO_RESULT
    try:
        with torch.autograd.graph.saved_tensors_hooks(recorder.pack, unpack), context, recorder:
            result = function(*args, **kwargs)
        if result is NO_RESULT:
            raise CheckpointError(
                "the context for the region, from context_fn, suppressed an exception that the "
                "region raised, so that there is no result. "
                "Let exceptions pass through that context."
            )
        if plan is not None:
            region_plan = plan(result)
        recorder.send(region_plan)
        return result
    except TypeError as error:
        if kwargs and error.__traceback__ is not None and error.__traceback__.tb_next is None:
            raise InvalidOption(_unknown_keyword(function, kwargs, error)) from error
        raise
    finally:
        has_plan = region_plan is not None and region_plan.plan is not None
        recorder.finish(region_plan if has_plan else None)


def _options() -> list[str]:
    return [
        name
        for name, p in inspect.signature(checkpoint).parameters.items()
        if p.kind is p.KEYWORD_ONLY
    ]


def _unknown_keyword(
    function: Callable[..., Any], kwargs: Mapping[str, Any], error: TypeError
) -> str:
    options = _options()
    near = [
        f"{name} (did you mean {close[0]}?)"
        for name in kwargs
        if (close := difflib.get_close_matches(name, options, 1))
    ]
    return (
        f"{error}. Keywords that checkpoint does not know go to the function: "
        f"{', '.join(near or kwargs)}. "
        f"Its own are {', '.join(options)}."
    )


def _keep_by(policy: Callable[..., Any]) -> Keep:
    """Return the recorder's ``keep`` for a policy in torch's form."""

    def keep(
        number: int, op: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], out: Any
    ) -> Kept:
        if op in SAC_IGNORED_OPS:
            return Kept.NOWHERE
        answer = policy(policy_context(out), op, *args, **kwargs)
        where = LOCATIONS.get(answer) if isinstance(answer, (CheckpointPolicy, bool)) else None
        if where is None:
            raise InvalidOption(
                f"the policy returned {answer!r} for {op}; it must return a CheckpointPolicy, "
                "for example CheckpointPolicy.PREFER_RECOMPUTE."
            )
        return where

    return keep
