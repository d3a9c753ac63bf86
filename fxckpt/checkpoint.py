"""The eager door: ``checkpoint(function, *args)``, which records a region of eager code in place of running its Python twice.

A superset of ``torch.utils.checkpoint``: every name of that module is here with the same meaning, and where torch's own class is the right thing,
it is torch's. :mod:`fxckpt.tape` records, :mod:`fxckpt.replay` answers the backward.
"""

from __future__ import annotations

import difflib
import functools
import inspect
import warnings
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.utils.checkpoint as torchs
from torch.utils.checkpoint import (
    SAC_IGNORED_OPS,
    CheckpointPolicy,
    SelectiveCheckpointContext,
    noop_context_fn,
)

from fxckpt.errors import CheckpointError, InvalidOption
from fxckpt.replay import unpack
from fxckpt.tape import Keep, Kept, Recorder
from fxckpt.torch_private import (
    calling_line,
    debug_override,
    is_traced,
    is_transformed,
    selective_policy,
    surrounding_hooks,
)

ENGINES = ("replay", "rerun")
NO_CONTEXTS: tuple[AbstractContextManager[Any], AbstractContextManager[Any]] = (nullcontext(), nullcontext())
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

    Raises
    ------
    InvalidOption
        For options that cannot be meant, and a policy that returns no ``CheckpointPolicy``.
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
        # Dynamo knows torch's function by identity and tags what it covers, but takes no context_fn that was not chosen by the user.
        chosen = {} if context_fn is noop_context_fn else {"context_fn": functools.partial(_called, context_fn)}
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
    if not torch.is_grad_enabled():
        return function(*args, **kwargs)
    if is_transformed():
        warnings.warn(
            "fxckpt.checkpoint under a torch.func transform (grad, vmap, ...) saves what autograd saves: torch.func has no hooks for saved tensors. "
            "For its savings, compile the transformed function: torch.compile(torch.func.grad(f), backend='fxckpt').",
            stacklevel=2,
        )
        return function(*args, **kwargs)
    contexts, policy = NO_CONTEXTS, None
    if context_fn is not noop_context_fn:
        contexts = context_fn()
        policy = selective_policy(contexts)
        if policy is not None:
            contexts = NO_CONTEXTS
    recorder = Recorder(
        keep=None if policy is None else _keep_by(policy.function),
        around=surrounding_hooks(),
        # A traced graph cannot hold the state of a generator.
        keep_draws=not preserve_rng_state or is_traced(),
        check_versions=policy is None or not policy.allows_writes,
        locate=calling_line if debug_override(debug) else None,
        replay_context=contexts[1],
    )
    return _record(recorder, contexts[0], function, args, kwargs)


def _called(context_fn: Callable[[], tuple[Any, Any]]) -> tuple[Any, Any]:
    """Call ``context_fn``: bound by ``functools.partial``, a lambda is a constant to Dynamo."""
    return context_fn()


def _record(
    recorder: Recorder,
    context: AbstractContextManager[Any],
    function: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
) -> Any:
    """Run a region on a recorder, which is on top of all modes: it sees ops as the region calls them, and replays them so."""
    try:
        with torch.autograd.graph.saved_tensors_hooks(recorder.pack, unpack), context, recorder:
            return function(*args, **kwargs)
    except TypeError as error:
        if error.__traceback__ is not None and error.__traceback__.tb_next is None and kwargs:
            raise InvalidOption(_unknown_keyword(function, kwargs, error)) from error
        raise
    finally:
        recorder.finish()
    raise CheckpointError(
        "the context for the region, from context_fn, suppressed an exception that the region raised, so that there is no result. "
        "Let exceptions pass through that context."
    )


def _unknown_keyword(function: Callable[..., Any], kwargs: Mapping[str, Any], error: TypeError) -> str:
    options = [name for name, p in inspect.signature(checkpoint).parameters.items() if p.kind is p.KEYWORD_ONLY]
    near = [f"{name} (did you mean {close[0]}?)" for name in kwargs if (close := difflib.get_close_matches(name, options, 1))]
    return (
        f"{error}. Keywords that checkpoint does not know go to the function: {', '.join(near or kwargs)}. "
        f"Its own are {', '.join(options)}."
    )


def _keep_by(policy: Callable[..., Any]) -> Keep:
    """Return, for a policy in torch's form, where results stay."""

    def keep(op: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], out: Any) -> Kept:
        if op in SAC_IGNORED_OPS:
            return Kept.NOWHERE
        answer = policy(SelectiveCheckpointContext(is_recompute=False, op_output=out), op, *args, **kwargs)
        where = WHERE.get(answer) if isinstance(answer, (CheckpointPolicy, bool)) else None
        if where is None:
            raise InvalidOption(
                f"the policy returned {answer!r} for {op}; it must return a CheckpointPolicy, for example CheckpointPolicy.PREFER_RECOMPUTE."
            )
        return where

    return keep
