"""The eager door: ``checkpoint(function, *args)``, a superset of ``torch.utils.checkpoint`` that records instead of running Python twice.

Every name of ``torch.utils.checkpoint`` is here with the same meaning. Where torch's class is the right thing, it is torch's.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.utils.checkpoint as torchs
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import (
    SAC_IGNORED_OPS,
    CheckpointFunction,
    CheckpointPolicy,
    DefaultDeviceType,
    GraphExecGroup,
    SelectiveCheckpointContext,
    check_backward_validity,
    create_selective_checkpoint_contexts,
    detach_variable,
    get_device_states,
    noop_context_fn,
    set_checkpoint_debug_enabled,
    set_checkpoint_early_stop,
    set_device_states,
)

from fxckpt.errors import CheckpointError, InvalidOption
from fxckpt.replay import unpack
from fxckpt.tape import Keep, Recorder
from fxckpt.torch_private import selective_policy, surrounding_hooks

ENGINES = ("replay", "rerun")


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
    if torch.compiler.is_compiling() or engine == "rerun":
        return torchs.checkpoint(
            function,
            *args,
            use_reentrant=bool(use_reentrant),
            preserve_rng_state=preserve_rng_state,
            context_fn=context_fn,
            determinism_check=determinism_check,
            debug=debug,
            early_stop=early_stop,
            **kwargs,
        )
    if not torch.is_grad_enabled():
        return function(*args, **kwargs)
    recorder = Recorder(around=surrounding_hooks(), keep_draws=not preserve_rng_state)
    try:
        with torch.autograd.graph.saved_tensors_hooks(recorder.pack, unpack), recorder:
            return function(*args, **kwargs)
    finally:
        recorder.finish()
