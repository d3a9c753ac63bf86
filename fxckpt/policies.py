"""Policies: what the user fixes before the planner decides the rest."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import fx
from torch.utils.checkpoint import CheckpointPolicy, SelectiveCheckpointContext

from fxckpt.errors import InvalidOption
from fxckpt.passes.facts import NodePolicy


def as_node_policy(policy: Callable[..., Any] | None) -> NodePolicy | None:
    """Return a policy over nodes for a function ``policy(ctx, op, *args, **kwargs) -> CheckpointPolicy`` (torch's own form).

    ``args`` are fake tensors. MUST_SAVE and MUST_RECOMPUTE bind the planner, PREFER_* leave it free. Raises :class:`InvalidOption` for what
    is not callable, and when the policy returns anything but a ``CheckpointPolicy``.
    """
    if policy is None:
        return None
    if not callable(policy):
        raise InvalidOption(
            f"policy={policy!r} is not callable. Give a function policy(ctx, op, *args, **kwargs) that returns a CheckpointPolicy."
        )

    def on_node(node: fx.Node) -> CheckpointPolicy | None:
        args = fx.map_arg(node.args, lambda n: n.meta.get("val"))
        kwargs = fx.map_arg(node.kwargs, lambda n: n.meta.get("val"))
        try:
            answer = policy(SelectiveCheckpointContext(is_recompute=False), node.target, *args, **kwargs)
        except Exception as error:
            raise InvalidOption(
                f"the policy raised {type(error).__name__}: {error}\nAsked about {node.target} (node {node.name!r}). Its arguments are fake tensors: "
                "shapes and dtypes without values, so that a policy cannot depend on what they hold."
            ) from error
        if not isinstance(answer, CheckpointPolicy):
            raise InvalidOption(
                f"the policy returned {answer!r} for {node.target}; it must return a CheckpointPolicy, "
                "for example CheckpointPolicy.PREFER_RECOMPUTE."
            )
        return answer

    return on_node
