"""``torch.utils.checkpoint``: its functions, selective policies, and Dynamo's recognition."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch.utils.checkpoint
from torch._dynamo.variables import builder
from torch.utils.checkpoint import SelectiveCheckpointContext

from fxckpt.torch_private.autograd.engine import surrounding_hooks

torch_checkpoint = torch.utils.checkpoint.checkpoint
torch_selective_contexts = torch.utils.checkpoint.create_selective_checkpoint_contexts
REPLACED = {
    "checkpoint": torch_checkpoint,
    "checkpoint_sequential": torch.utils.checkpoint.checkpoint_sequential,
    "create_selective_checkpoint_contexts": torch_selective_contexts,
}
"""Torch's own functions, also after the names of its module were assigned others."""
CHECKPOINT_MODULE = torch.utils.checkpoint.__name__
TAKES_HOOKS_OPTION = "respect_saved_tensors_hooks" in inspect.signature(torch_checkpoint).parameters
"""Whether torch's ``checkpoint`` takes this option, new in torch 2.15."""

# Dynamo compares with whatever torch.utils.checkpoint.checkpoint is at the time. Were it fxckpt's,
# Dynamo would break the graph at every region of code that imported torch's before.
builder.is_utils_checkpoint = lambda obj: obj is torch_checkpoint  # type: ignore[attr-defined]


def is_called_by_compiler() -> bool:
    """Return whether the caller's caller is a higher-order operator that runs a traced region.

    These operators look up ``torch.utils.checkpoint.checkpoint`` when they run, and need torch's
    own: it tags the nodes of the joint graph.
    """
    caller = sys._getframe(1).f_back
    return caller is not None and caller.f_globals.get("__name__") == "torch._higher_order_ops.wrap"


def is_early_stop(error: BaseException) -> bool:
    """Return whether torch's ``checkpoint`` ends a recompute, as it has all that it needs."""
    return isinstance(error, torch.utils.checkpoint._StopRecomputationError)


def is_in_checkpoint() -> bool:
    """Return whether torch's ``checkpoint`` packs what is saved, and runs this forward twice."""
    hooks = surrounding_hooks()
    return hooks is not None and getattr(hooks[0], "__module__", "") == CHECKPOINT_MODULE


def modules_with(functions: tuple[Any, ...]) -> Iterator[tuple[ModuleType, str, Any]]:
    """Yield the loaded modules outside fxckpt with a global that is one of ``functions``.

    Each comes with the global's name and value.
    """
    found = {id(function) for function in functions}
    modules = {
        id(module): module
        for name, module in list(sys.modules.items())
        if isinstance(module, ModuleType) and name.partition(".")[0] != "fxckpt"
    }
    for module in modules.values():
        for attribute, value in list(vars(module).items()):
            if id(value) in found:
                yield module, attribute, value


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
