"""Policies in torch's own form: functions of a context and an op."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.checkpoint import CheckpointPolicy, SelectiveCheckpointContext

from fxckpt.errors import InvalidOption
from fxckpt.policies.base import OPPOSITE, Policy, Value
from fxckpt.torch_private import policy_context, policy_output


@dataclass(frozen=True)
class FunctionPolicy(Policy):
    """A function ``policy(ctx, op, *args, **kwargs)``, torch's own form."""

    function: Callable[..., Any]
    is_part: bool = False
    """Whether there are other policies, to which it may leave a value by returning None."""

    def decide(self, value: Value) -> CheckpointPolicy | None:
        """Ask the function.

        Raises :class:`InvalidOption` if it raises, or returns anything but a ``CheckpointPolicy`` or, as torch allows, a bool.
        """
        context = policy_context(value.output)
        try:
            answer = self.function(context, value.op, *value.args, **value.kwargs)
        except Exception as error:
            raise InvalidOption(
                f"the policy raised {type(error).__name__}: {error}\nAsked about {value}. Its arguments are fake tensors: "
                "shapes and dtypes without values, so that a policy cannot depend on what they hold."
            ) from error
        if isinstance(answer, bool):
            return CheckpointPolicy.MUST_SAVE if answer else CheckpointPolicy.PREFER_RECOMPUTE
        if answer is None and self.is_part:
            return None
        if answer is None:
            raise InvalidOption(
                f"the policy returned None for {value.op}, and there is no other policy to decide. Return a CheckpointPolicy for every op, for "
                "example CheckpointPolicy.PREFER_RECOMPUTE, or name who decides the rest: first_match(function, recompute_all)."
            )
        if not isinstance(answer, CheckpointPolicy):
            raise InvalidOption(
                f"the policy returned {answer!r} for {value.op}; it must return a CheckpointPolicy, for example CheckpointPolicy.PREFER_RECOMPUTE."
            )
        if answer not in OPPOSITE:
            raise InvalidOption(
                f"the policy returned {answer!r} for {value.op}: offloading is not supported. Return MUST_SAVE to keep the value, or MUST_RECOMPUTE."
            )
        return answer

    def __repr__(self) -> str:
        return str(getattr(self.function, "__name__", self.function))


@dataclass(frozen=True)
class AskedByOp:
    """A policy in torch's form: asked with an op and its arguments, without a view of the whole."""

    policy: Policy

    def __call__(
        self, ctx: SelectiveCheckpointContext, op: Any, *args: Any, **kwargs: Any
    ) -> CheckpointPolicy:
        """What the policy says of the op; what it leaves open is run again, as torch has it."""
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
