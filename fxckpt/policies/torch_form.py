"""Policies in torch's form: functions of a context, an op and its arguments."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.checkpoint import CheckpointPolicy, SelectiveCheckpointContext

from fxckpt.errors import InvalidOption
from fxckpt.policies.base import Policy, Value
from fxckpt.torch_private import policy_context, policy_output


@dataclass(frozen=True)
class FunctionPolicy(Policy):
    """A function in torch's form, ``policy(ctx, op, *args, **kwargs)``, as a policy."""

    function: Callable[..., Any]
    is_part: bool = False
    """Whether the function may return None, to leave a value to other policies."""

    def decide(self, value: Value) -> CheckpointPolicy | None:
        """Return the function's answer, called with fake tensors.

        Raises :class:`InvalidOption` if the function raises, or returns neither a
        ``CheckpointPolicy`` nor, as torch allows, a bool.
        """
        context = policy_context(value.output)
        try:
            answer = self.function(context, value.op, *value.args, **value.kwargs)
        except Exception as error:
            raise InvalidOption(
                f"the policy raised {type(error).__name__}: {error}\n"
                f"Asked about {value}. Its arguments are fake tensors: shapes and dtypes "
                "without values, so that a policy cannot depend on what they hold."
            ) from error
        if isinstance(answer, bool):
            return CheckpointPolicy.MUST_SAVE if answer else CheckpointPolicy.PREFER_RECOMPUTE
        if answer is None and self.is_part:
            return None
        if answer is None:
            raise InvalidOption(
                f"the policy returned None for {value.op}, and there is no other policy to decide. "
                "Return a CheckpointPolicy for every op, for example "
                "CheckpointPolicy.PREFER_RECOMPUTE, or name who decides the rest: "
                "first_match(function, recompute_all)."
            )
        if not isinstance(answer, CheckpointPolicy):
            raise InvalidOption(
                f"the policy returned {answer!r} for {value.op}; it must return a "
                "CheckpointPolicy, for example CheckpointPolicy.PREFER_RECOMPUTE."
            )
        return answer

    def __repr__(self) -> str:
        return str(getattr(self.function, "__name__", self.function))


@dataclass(frozen=True)
class AskedByOp:
    """A policy turned into torch's form: asked with an op's call alone, without the graph."""

    policy: Policy

    def __call__(
        self, ctx: SelectiveCheckpointContext, op: Any, *args: Any, **kwargs: Any
    ) -> CheckpointPolicy:
        """Return the policy's answer, PREFER_RECOMPUTE if it leaves the value open."""
        output = policy_output(ctx)
        first = output[0] if isinstance(output, (tuple, list)) and output else output
        known = isinstance(first, torch.Tensor)
        value = Value(
            op=op,
            shape=tuple(first.shape) if known else (),
            dtype=first.dtype if known else None,
            bytes=first.nbytes if known else 0,
            args=args,
            kwargs=kwargs,
            output=output,
        )
        answer = self.policy.decide(value)
        return CheckpointPolicy.PREFER_RECOMPUTE if answer is None else answer
