"""Selective checkpointing in torch's own form."""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch.utils.checkpoint import (
    CheckpointPolicy,
    create_selective_checkpoint_contexts,
    set_checkpoint_debug_enabled,
)

from fxckpt.torch_private import (
    debug_override,
    policy_context,
    policy_output,
    selective_policy,
)


def save_all(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE


def test_the_policy_behind_contexts_is_found() -> None:
    """It is the function given to torch, with the permission to write what it saves."""
    found = selective_policy(create_selective_checkpoint_contexts(save_all, True))
    assert found is not None and found.function is save_all and found.allows_writes
    found = selective_policy(create_selective_checkpoint_contexts([torch.ops.aten.mm.default]))
    assert found is not None and not found.allows_writes


def test_other_contexts_have_no_policy() -> None:
    """Contexts of a user's own have none."""
    assert selective_policy((contextlib.nullcontext(), contextlib.nullcontext())) is None


def test_a_context_holds_the_op_s_output() -> None:
    """A policy can read the output in every version of torch."""
    output = torch.ones(2)
    assert policy_output(policy_context(output)) is output
    assert policy_output(object()) is None  # type: ignore[arg-type]


def test_the_global_debug_switch_wins() -> None:
    """``set_checkpoint_debug_enabled`` replaces the option while it is set."""
    assert debug_override(True) and not debug_override(False)
    with set_checkpoint_debug_enabled(True):
        assert debug_override(False)
    with set_checkpoint_debug_enabled(False):
        assert not debug_override(True)
