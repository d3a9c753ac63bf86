"""Selective activation checkpointing in torch's own form."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch.utils.checkpoint
from torch.utils.checkpoint import SelectiveCheckpointContext


def policy_context(output: Any) -> SelectiveCheckpointContext:
    """Return the context that torch's form of a policy takes, for an op that gives ``output``."""
    context = SelectiveCheckpointContext(is_recompute=False)
    # torch 2.11 takes no such argument, so it is set here: policies may read it in any version.
    context.op_output = output
    return context


def policy_output(context: SelectiveCheckpointContext) -> Any:
    """Return the output of the op that a policy is called for.

    It is None under torch 2.11, which calls the policy before the op runs.
    """
    return getattr(context, "op_output", None)


@dataclass(frozen=True)
class Selective:
    """Arguments that ``create_selective_checkpoint_contexts`` was called with."""

    function: Callable[..., Any]
    allows_writes: bool


def selective_policy(contexts: tuple[Any, Any]) -> Selective | None:
    """Return the policy behind contexts made by ``create_selective_checkpoint_contexts``.

    Returns None for other contexts.
    """
    from torch.utils.checkpoint import _CachedTorchDispatchMode, _CachingTorchDispatchMode

    forward, recompute = contexts
    if (
        type(forward) is not _CachingTorchDispatchMode
        or type(recompute) is not _CachedTorchDispatchMode
    ):
        return None
    return Selective(forward.policy_fn, recompute.allow_cache_entry_mutation)


def debug_override(debug: bool) -> bool:
    """Return the setting of ``set_checkpoint_debug_enabled`` if there is one, else ``debug``."""
    override = torch.utils.checkpoint._checkpoint_debug_enabled
    return debug if override is None else bool(override)
