"""torch's own form of selective checkpointing."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch.utils.checkpoint
from torch.utils.checkpoint import SelectiveCheckpointContext


def policy_context(output: Any) -> SelectiveCheckpointContext:
    """Return what a policy in torch's form is asked with about an op that gives ``output``."""
    context = SelectiveCheckpointContext(is_recompute=False)
    # torch 2.11 has no such argument; who is asked by fxckpt may read it all the same.
    context.op_output = output
    return context


def policy_output(context: SelectiveCheckpointContext) -> Any:
    """Return what the op gives that a policy is asked about. torch 2.11 itself asks before the op runs: None."""
    return getattr(context, "op_output", None)


@dataclass(frozen=True)
class Selective:
    """What ``create_selective_checkpoint_contexts`` was given."""

    function: Callable[..., Any]
    allows_writes: bool


def selective_policy(contexts: tuple[Any, Any]) -> Selective | None:
    """Return the policy behind the contexts that torch's ``create_selective_checkpoint_contexts`` returned; None for other contexts."""
    from torch.utils.checkpoint import _CachedTorchDispatchMode, _CachingTorchDispatchMode

    forward, recompute = contexts
    if (
        type(forward) is not _CachingTorchDispatchMode
        or type(recompute) is not _CachedTorchDispatchMode
    ):
        return None
    return Selective(forward.policy_fn, recompute.allow_cache_entry_mutation)


def debug_override(debug: bool) -> bool:
    """Return whether to debug: as ``set_checkpoint_debug_enabled`` says, else ``debug``."""
    override = torch.utils.checkpoint._checkpoint_debug_enabled
    return debug if override is None else bool(override)
