"""Capture without execution: the plan of a model on fake tensors.

The model is copied with fake parameters (shapes only, no memory) and captured whole by Dynamo and
AOTAutograd. The joint graph is the one that ``torch.compile`` gives the backend, so both make the
same plan. Models may be on the meta device, and planned for a GPU that is elsewhere.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from fxckpt import budgets
from fxckpt.costs.models import CostModel
from fxckpt.errors import CaptureError
from fxckpt.passes.graphs import Joint
from fxckpt.passes.meta import DEVICE, MODEL
from fxckpt.planner.pipeline import Place, prepare
from fxckpt.planner.planned_device import PlannedDevice, planned_device, warn_beyond
from fxckpt.planner.planner import planner_of
from fxckpt.plans.types import Plan
from fxckpt.tiers import Tier, tier_of
from fxckpt.torch_private import (
    aot_autograd,
    boxed,
    capture_whole,
    leave_capture,
)
from fxckpt.utils.progress import searching

HERE = PlannedDevice()
"""The device that a model is on, or this machine's accelerator."""


def capture_joint(
    model_or_fn: Callable[..., Any],
    args: Sequence[Any],
    kwargs: dict[str, Any],
    target: PlannedDevice = HERE,
) -> Joint:
    """Return the joint graph of ``model_or_fn(*args, **kwargs)``; nothing is executed.

    Raises :class:`CaptureError` if the model does not capture as one graph or has nothing to
    differentiate.
    """
    found: list[Joint] = []

    def receive(
        joint: fx.GraphModule, inputs: Sequence[Any], *, num_fwd_outputs: int, **_: Any
    ) -> Any:
        found.append(Joint(joint, num_fwd_outputs))
        leave_capture()

    compile_graph = aot_autograd(
        fw_compiler=boxed,
        inference_compiler=boxed,
        partition_fn=receive,
        keep_inference_input_mutations=True,
    )

    def trace(gm: fx.GraphModule, inputs: list[Any]) -> Any:
        with target.tracing(gm):
            return compile_graph(gm, inputs)

    if not callable(model_or_fn):
        raise CaptureError(
            f"cannot plan {model_or_fn!r}: it is not callable. Give a module or a function."
        )
    with torch.enable_grad():
        capture_whole(model_or_fn, tuple(args), kwargs, trace, target.trace_on)
    if not found:
        raise CaptureError(
            "nothing to plan: no output needs a gradient, or all that do are views of inputs. Give "
            "parameters or inputs that require grad, and do not detach what is made of them."
        )
    if target.is_away and target.place is not None:
        prepare(found[0], (Place(target.place),))
    noted = found[0].module.meta
    noted[MODEL] = name_of(model_or_fn)
    if target.named is not None:
        noted[DEVICE] = target.named.name
    return found[0]


def name_of(model_or_fn: Callable[..., Any]) -> str:
    """Return what a reader calls a model: its class, a function's name, or a lambda's line."""
    if isinstance(model_or_fn, torch.nn.Module):
        return type(model_or_fn).__name__
    name = str(getattr(model_or_fn, "__qualname__", type(model_or_fn).__name__))
    name = name.rpartition("<locals>.")[2]
    code = getattr(model_or_fn, "__code__", None)
    if name.endswith("<lambda>") and code is not None:
        return f"lambda at {Path(code.co_filename).name}:{code.co_firstlineno}"
    return name


def is_on_meta(
    model_or_fn: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]
) -> bool:
    """Return whether any parameter or input is on the meta device."""
    given = [*model_or_fn.parameters()] if isinstance(model_or_fn, torch.nn.Module) else []
    return any(
        isinstance(leaf, torch.Tensor) and leaf.is_meta
        for leaf in (*given, *pytree.tree_leaves((args, kwargs)))
    )


def plan(
    model_or_fn: Callable[..., Any],
    *args: Any,
    budget: budgets.Budget = None,
    policy: Any = None,
    cost: str | CostModel = "roofline",
    max_slowdown: float | None = None,
    device: str | torch.device | None = None,
    offload: Tier | str | None = None,
    tile: int | str | None = None,
    **kwargs: Any,
) -> Plan:
    """Return the plan of ``model_or_fn(*args, **kwargs)``, which is not run.

    Unless the model is on the meta device or ``device`` is named, each distinct CPU kernel runs
    once, on synthetic inputs, to measure its workspace.

    Parameters
    ----------
    model_or_fn, args, kwargs:
        The forward of a step: a module or a function, and what it is called with. It may be on the
        meta device.
    budget, policy, cost, max_slowdown, offload, tile:
        As for :class:`fxckpt.Backend`. A tier without rates of its own takes those of a named
        device's link.
    device:
        What to plan for: the name of a GPU (``"H100"``, see
        :data:`fxckpt.costs.devices.DEVICES`), which need not be here, ``"cuda"`` or ``"cpu"``. None
        is where the model is; for a model on the meta device, this machine's accelerator, else an
        H100, as ``plan.cost`` says.

    Returns
    -------
    Plan
        That which :class:`fxckpt.Backend` with ``inner="aot_eager"`` makes.

    Raises
    ------
    CaptureError
        If the model does not capture as one graph or has nothing to differentiate.
    InvalidBudget, InvalidOption
        For invalid arguments, and a device that is not known.
    BudgetInfeasible, SlowdownInfeasible
        If no plan fits.

    Examples
    --------
    >>> import torch, fxckpt
    >>> with torch.device("meta"):
    ...     model = torch.nn.Sequential(*(torch.nn.Linear(512, 512) for _ in range(8)))
    >>> fxckpt.plan(model, torch.empty(64, 512, device="meta"), budget=None).recomputed
    ()
    >>> fxckpt.plan(model, torch.empty(64, 512, device="meta"), device="B200").cost
    'roofline of B200'
    """
    on_meta = is_on_meta(model_or_fn, args, kwargs)
    target = planned_device(device, is_on_meta=on_meta)
    if device is not None:
        warn_beyond(target.named, "budget", budget)
    return plan_for(
        target,
        model_or_fn,
        args,
        kwargs,
        budget=budgets.within(budget, max_slowdown),
        policy=policy,
        cost=cost,
        offload=offload,
        tile=tile,
    )


def plan_for(
    target: PlannedDevice,
    model_or_fn: Callable[..., Any],
    args: Sequence[Any],
    kwargs: dict[str, Any],
    *,
    budget: budgets.Budget,
    policy: Any,
    cost: str | CostModel,
    offload: Tier | str | None = None,
    tile: int | str | None = None,
) -> Plan:
    """Return the plan of a call for a target, as :func:`plan` does."""
    # A model on the meta device may be far too large for this machine: its kernels are not run.
    is_runnable = target.named is None and not is_on_meta(model_or_fn, args, kwargs)
    planner = planner_of(
        budget,
        policy,
        cost,
        measure_workspace=is_runnable,
        device=target.named,
        offload=tier_of(offload),
        tile=tile,
    )
    with searching("plan"):
        joint = capture_joint(model_or_fn, args, kwargs, target)
        prepare(joint)
        _, _, plan = planner.plan_with_tiles(joint)
    return plan
