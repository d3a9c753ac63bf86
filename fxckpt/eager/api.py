"""The eager door: ``checkpoint(function, *args)``, which records a region of eager code in place of running its Python twice.

A superset of ``torch.utils.checkpoint``: every name of that module is here with the same meaning, and where torch's own class is the right thing,
it is torch's. :mod:`fxckpt.eager.recorder` writes the :mod:`fxckpt.eager.tape`, :mod:`fxckpt.eager.replay` answers the backward.
"""

from __future__ import annotations

import difflib
import functools
import inspect
import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.utils.checkpoint as torchs
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

from fxckpt.budget import Budget
from fxckpt.eager.recorder import Keep, Kept, Recorder
from fxckpt.eager.region_cache import MEMORY, RegionMatcher, differentiable, plan_region
from fxckpt.eager.region_plan import RegionPlan
from fxckpt.eager.region_report import region_of, watched
from fxckpt.eager.replay import unpack
from fxckpt.errors import CheckpointError, InvalidOption
from fxckpt.planner.planner import planner_of
from fxckpt.policies import as_policy
from fxckpt.policies.base import Policy
from fxckpt.policies.torch_form import AskedByOp
from fxckpt.torch_private import (
    calling_line,
    debug_override,
    is_traced,
    is_transformed,
    modules_of,
    policy_context,
    selective_policy,
    surrounding_hooks,
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
NO_MODULES: AbstractContextManager[Callable[[], str]] = nullcontext(lambda: "")
NO_CONTEXTS: tuple[AbstractContextManager[Any], AbstractContextManager[Any]] = (
    nullcontext(),
    nullcontext(),
)
NO_RESULT = object()
CHECKS = ("default", "none")
WHERE = {
    CheckpointPolicy.MUST_SAVE: Kept.ON_DEVICE,
    CheckpointPolicy.PREFER_SAVE: Kept.ON_DEVICE,
    CheckpointPolicy.MUST_RECOMPUTE: Kept.NOWHERE,
    CheckpointPolicy.PREFER_RECOMPUTE: Kept.NOWHERE,
    CheckpointPolicy.MUST_CPU_OFFLOAD: Kept.ON_CPU,
    CheckpointPolicy.PREFER_CPU_OFFLOAD: Kept.ON_CPU,
    True: Kept.ON_DEVICE,
    False: Kept.NOWHERE,
}


def checkpoint(
    function: Callable[..., Any],
    *args: Any,
    use_reentrant: bool | None = None,
    preserve_rng_state: bool = True,
    context_fn: Callable[[], tuple[Any, Any]] = noop_context_fn,
    determinism_check: str = "default",
    debug: bool = False,
    early_stop: bool = True,
    engine: str = "replay",
    policy: Any = None,
    budget: Budget = None,
    **kwargs: Any,
) -> Any:
    """Return ``function(*args, **kwargs)``, and keep little of what it made until the backward.

    The region runs once. What autograd would save of it is dropped, except for its inputs, and made again by running the *ops* of the region that
    it takes, not its Python: side effects, buffer updates and random numbers happen once, and the backward gets the same bits. Any
    number of backwards, ``autograd.grad``, double backward and ``retain_graph`` work; nothing has to require a gradient; regions nest. Without
    grad mode this is a plain call.

    Parameters
    ----------
    function, args, kwargs:
        Any callable and whatever it takes: tensors in nested containers, or in its closure, are inputs like others.
    use_reentrant:
        Accepted as in torch. The two variants of torch differ in limitations that a replay does not have; with ``engine="rerun"`` it chooses.
    preserve_rng_state:
        True: a random op of the region draws the same numbers again, from the state in which it found its generator, whichever that is. False: no
        state is stored; what random ops made is kept.
    context_fn:
        Returns two context managers, for the region and for its replay; most often ``functools.partial(create_selective_checkpoint_contexts,
        policy)``, whose policy says which results stay.
    determinism_check, early_stop:
        Accepted as in torch. A replay runs no more than it must, and cannot come to other shapes.
    debug:
        Errors name the line of the region that is concerned. Takes time.
    engine:
        ``"replay"``, or ``"rerun"`` for torch's own implementation: for regions with kernels that write, unknown to PyTorch, into tensors that
        hold values already. Into memory from ``torch.empty``, or into zeros, they may write under either.
    policy:
        What the region keeps: one of :mod:`fxckpt.policies`, a function in torch's form, or a list of ops to save. Asked when the region is planned,
        which is at its first call and whenever it does something new.
    budget:
        As for :class:`fxckpt.Backend`, for this region: peak bytes of its own forward and backward, beyond what was allocated when it began.
        The first call, which is planned when it ends, then makes what is to be kept a second time.

    Raises
    ------
    InvalidOption, InvalidBudget
        For options that cannot be meant, and a policy that returns no ``CheckpointPolicy``.
    BudgetInfeasible, PolicyConflict, PolicyMatchesNothing, CaptureError
        At a call that is planned.
    CheckpointError
        In the backward, where a tensor that the region took from outside was written since.

    Examples
    --------
    >>> import torch, fxckpt
    >>> block = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Dropout(0.1), torch.nn.GELU(), torch.nn.Linear(8, 1))
    >>> fxckpt.checkpoint(block, torch.randn(4, 8)).sum().backward()
    >>> block[0].weight.grad.shape
    torch.Size([8, 8])
    """
    if torch.compiler.is_compiling() or engine == "rerun":
        if budget is not None and engine == "rerun":
            raise InvalidOption(
                f"budget={budget!r} and engine='rerun': torch's implementation knows no budget. Use engine='replay'."
            )
        if policy is not None:
            context_fn = functools.partial(create_selective_checkpoint_contexts, policy)
        # Dynamo knows torch's function by identity and tags what it covers, but takes no context_fn that nobody chose.
        chosen = (
            {}
            if context_fn is noop_context_fn
            else {"context_fn": functools.partial(_called, context_fn)}
        )
        return torchs.checkpoint(
            function,
            *args,
            use_reentrant=bool(use_reentrant) and engine == "rerun",
            preserve_rng_state=preserve_rng_state,
            determinism_check=determinism_check,
            debug=debug,
            early_stop=early_stop,
            **chosen,
            **kwargs,
        )
    if not callable(function):
        raise InvalidOption(
            f"checkpoint({function!r}, ...): give a function or module and then its arguments; {type(function).__name__} is neither."
        )
    if engine not in ENGINES or determinism_check not in CHECKS:
        raise InvalidOption(
            f"engine={engine!r}, determinism_check={determinism_check!r}: engine is one of {ENGINES}, determinism_check one of {CHECKS}."
        )
    planner = None if policy is None and budget is None else planner_of(budget, policy, "roofline")
    if not torch.is_grad_enabled():
        return function(*args, **kwargs)
    if is_transformed():
        warnings.warn(
            "fxckpt.checkpoint under a torch.func transform (grad, vmap, ...) saves what autograd saves: torch.func has no hooks for saved tensors. "
            "For its savings, compile the transformed function: torch.compile(torch.func.grad(f), backend='fxckpt').",
            stacklevel=2,
        )
        return function(*args, **kwargs)
    contexts, selective = NO_CONTEXTS, None
    if context_fn is not noop_context_fn:
        contexts = context_fn()
        selective = selective_policy(contexts)
        if selective is not None:
            contexts = NO_CONTEXTS
    if selective is not None and (policy is not None or budget is not None):
        raise InvalidOption(
            "context_fn and policy (or budget) were given: both say what the region keeps. Give the policy alone: policy=..."
        )
    follower = (
        None if planner is None else RegionMatcher(MEMORY.courses(function, budget, planner.policy))
    )
    watchers = watched()
    is_shown = (
        watchers is not None
        or debug_override(debug)
        or (follower is not None and not follower.courses.known)
    )
    looks_at_modules = is_shown or (
        planner is not None and planner.policy is not None and planner.policy.needs_graph
    )
    with modules_of(function) if looks_at_modules else NO_MODULES as module:
        locate = (
            (lambda: (calling_line() if is_shown else "", module()))
            if is_shown or planner is not None
            else None
        )
        recorder = Recorder(
            keep=follower if selective is None else _keep_by(selective.function),
            locate=locate,
            around=surrounding_hooks(),
            # A traced graph cannot hold the state of a generator.
            keep_draws=not preserve_rng_state or is_traced(),
            check_versions=selective is None or not selective.allows_writes,
            replay_context=contexts[1],
        )

        def end(result: Any) -> RegionPlan | None:
            course = (
                None
                if planner is None or follower is None
                else plan_region(recorder, follower, result, planner)
            )
            if watchers is not None:
                watchers.append(
                    region_of(
                        function,
                        recorder,
                        differentiable(result),
                        None if course is None else course.plan,
                    )
                )
            return course

        return _record(recorder, contexts[0], function, args, kwargs, end)


def checkpoint_sequential(
    functions: nn.Sequential | Sequence[Callable[..., Any]],
    segments: int | str,
    input: Any,
    use_reentrant: bool | None = None,
    **options: Any,
) -> Any:
    """Return ``input`` sent through ``functions`` in order, in ``segments`` regions.

    As in torch, all but the last segment are checkpointed. ``segments="auto"`` with a ``budget`` makes one region of the whole, whose plan decides
    what is kept of it; without one it makes about sqrt(n) segments of n functions (Chen et al. 2016, arXiv:1604.06174). ``options`` go to
    :func:`checkpoint`. Raises :class:`InvalidOption` for a number of segments that the functions cannot be cut into.

    Examples
    --------
    >>> import torch, fxckpt
    >>> layers = [torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.GELU()) for _ in range(9)]
    >>> fxckpt.checkpoint_sequential(layers, "auto", torch.randn(4, 8)).shape
    torch.Size([4, 8])
    """
    steps = list(functions.children()) if isinstance(functions, nn.Sequential) else list(functions)
    unknown = options.keys() - set(_options())
    if unknown:
        raise InvalidOption(
            f"checkpoint_sequential does not know {', '.join(sorted(unknown))}. Its options are {', '.join(_options())}."
        )
    if not steps or not all(map(callable, steps)):
        raise InvalidOption(
            f"functions={functions!r}: give an nn.Sequential, or a list of modules or functions that is not empty."
        )
    if isinstance(segments, bool) or not (
        segments == "auto" or (isinstance(segments, int) and 1 <= segments <= len(steps))
    ):
        raise InvalidOption(
            f"segments={segments!r}: give a whole number from 1 to {len(steps)}, as many functions as there are, or 'auto'."
        )
    if segments != "auto" and options.get("budget") is not None:
        raise InvalidOption(
            f"budget={options['budget']!r} and segments={segments} were given: a budget chooses what is kept. Use segments='auto'."
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
    """Functions one after the other."""

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
    """Return what torch's function of this name returns, for a policy of :mod:`fxckpt.policies` too.

    A policy is asked op by op here, without a view of the whole: of those that need one (module paths, names, ``sqrt_n``) use
    ``checkpoint(..., policy=...)``, or :class:`fxckpt.Backend`. Raises :class:`InvalidOption` for such a policy.
    """
    policy = policy_fn_or_list
    if isinstance(policy, Policy) or (
        isinstance(policy, (list, tuple)) and any(isinstance(part, Policy) for part in policy)
    ):
        found = as_policy(policy)
        assert found is not None
        if found.needs_graph:
            raise InvalidOption(
                f"{found!r} looks at modules, names or the whole sequence of values, and here a policy is asked op by op. "
                "Give it to checkpoint(..., policy=...) in eager code, or to the compile door: fxckpt.Backend(policy=...)."
            )
        policy = AskedByOp(found)
    contexts: tuple[Any, Any] = torchs.create_selective_checkpoint_contexts(
        policy, allow_cache_entry_mutation
    )
    return contexts


def _called(context_fn: Callable[[], tuple[Any, Any]]) -> tuple[Any, Any]:
    """Call ``context_fn``: bound by ``functools.partial``, a lambda is a constant to Dynamo."""
    return context_fn()


def _record(
    recorder: Recorder,
    context: AbstractContextManager[Any],
    function: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    plan: Callable[[Any], RegionPlan | None] | None = None,
) -> Any:
    """Run a region on a recorder, which is on top of all modes: it sees ops as the region calls them, and replays them so."""
    course = None
    result = NO_RESULT
    try:
        with torch.autograd.graph.saved_tensors_hooks(recorder.pack, unpack), context, recorder:
            result = function(*args, **kwargs)
        if result is NO_RESULT:
            raise CheckpointError(
                "the context for the region, from context_fn, suppressed an exception that the region raised, so that there is no result. "
                "Let exceptions pass through that context."
            )
        if plan is not None:
            course = plan(result)
        return result
    except TypeError as error:
        if kwargs and error.__traceback__ is not None and error.__traceback__.tb_next is None:
            raise InvalidOption(_unknown_keyword(function, kwargs, error)) from error
        raise
    finally:
        recorder.finish(None if course is None or course.plan is None else course)


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
        f"{error}. Keywords that checkpoint does not know go to the function: {', '.join(near or kwargs)}. "
        f"Its own are {', '.join(options)}."
    )


def _keep_by(policy: Callable[..., Any]) -> Keep:
    """Return, for a policy in torch's form, where results stay."""

    def keep(
        number: int, op: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], out: Any
    ) -> Kept:
        if op in SAC_IGNORED_OPS:
            return Kept.NOWHERE
        answer = policy(policy_context(out), op, *args, **kwargs)
        where = WHERE.get(answer) if isinstance(answer, (CheckpointPolicy, bool)) else None
        if where is None:
            raise InvalidOption(
                f"the policy returned {answer!r} for {op}; it must return a CheckpointPolicy, for example CheckpointPolicy.PREFER_RECOMPUTE."
            )
        return where

    return keep
