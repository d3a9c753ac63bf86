"""Capture without execution: the plan of a model on fake tensors.

The model is copied with fake parameters (shapes only, no memory) and captured whole by Dynamo; the joint graph then takes the same way as in
the compile door, so both make the same plan. Works for models on the meta device.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from fxckpt import budget as budgets
from fxckpt.backend import Backend
from fxckpt.cost import CostModel
from fxckpt.errors import CaptureError
from fxckpt.plan import Plan
from fxckpt.torch_private import capture_whole


def plan(
    model_or_fn: Callable[..., Any],
    *args: Any,
    budget: budgets.Budget = None,
    policy: Callable[..., Any] | None = None,
    cost: str | CostModel = "roofline",
    **kwargs: Any,
) -> Plan:
    """Return the plan that :class:`fxckpt.Backend` would make for ``model_or_fn(*args, **kwargs)``, without running it.

    Raises :class:`CaptureError` if the model does not capture as one graph or has nothing to differentiate, and what
    :class:`fxckpt.Backend` raises.

    Examples
    --------
    >>> import torch, fxckpt
    >>> with torch.device("meta"):
    ...     model = torch.nn.Sequential(*(torch.nn.Linear(512, 512) for _ in range(8)))
    >>> fxckpt.plan(model, torch.empty(64, 512, device="meta"), budget=None).recomputed
    ()
    """
    backend = Backend(budget=budget, policy=policy, inner="aot_eager", cost=cost)
    if not callable(model_or_fn):
        raise CaptureError(f"cannot plan {model_or_fn!r}: it is not callable. Give a module or a function.")

    def compile_only(gm: fx.GraphModule, inputs: list[Any]) -> None:
        backend(gm, inputs)

    with torch.enable_grad():
        capture_whole(model_or_fn, args, kwargs, compile_only)
    if not backend.plans:
        raise CaptureError(
            "nothing to plan: no output needs a gradient. Give parameters or inputs that require grad, and call outside no_grad()."
        )
    return backend.plans[0]
