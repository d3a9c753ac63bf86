"""A benchmark: peak, time and gradients of a step, uncheckpointed and within budgets."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch.utils import _pytree as pytree

from fxckpt.backend import Backend
from fxckpt.backend.options import InnerCompiler
from fxckpt.budgets import Budget, format_bytes
from fxckpt.cli.factory import ModelCall
from fxckpt.costs.models import CostModel
from fxckpt.errors import BudgetInfeasible, CaptureError, InvalidOption
from fxckpt.measure import measure_peak
from fxckpt.utils.tables import Column, Table
from fxckpt.utils.units import format_seconds


@dataclass(frozen=True)
class Run:
    """The measurements of one way to run the step."""

    name: str
    """``"uncheckpointed"``, or the budget."""
    peak_bytes: int | None
    """Peak of one step, beyond the bytes allocated before it; None for an infeasible budget."""
    predicted_bytes: int | None
    """The plan's peak; None if the step has not exactly one plan."""
    seconds: float | None
    """Median time of a step; None for an infeasible budget."""
    times: float | None
    """Median time divided by that of the uncheckpointed step; None for an infeasible budget."""
    gradients: str
    """Comparison with the gradients of the uncheckpointed step; empty for that step itself."""
    infeasible: BudgetInfeasible | None = None
    """The error of a budget that is infeasible."""


def compare(
    target: ModelCall,
    budgets: Sequence[Budget],
    *,
    steps: int,
    inner: str | InnerCompiler = "aot_eager",
    policy: Callable[..., Any] | None = None,
    cost: str | CostModel = "roofline",
    tick: Callable[[str], object] = lambda name: None,
) -> tuple[Run, ...]:
    """Run the step uncheckpointed and within each budget, and return the measurements.

    Every way runs twice, for its gradients and its peak. Then all run ``steps`` times in turn, for
    their times. An infeasible budget does not run. ``tick`` is called with the name of the way
    before each run. Raises :class:`fxckpt.CaptureError` for a model on the meta device or without a
    differentiable output, and :class:`fxckpt.InvalidOption` if ``steps`` is 0.
    """
    if steps < 1:
        raise InvalidOption(f"steps={steps}: at least one step has to be timed.")
    leaves = _leaves(target)
    _refuse_meta(leaves)
    torch.compiler.reset()
    backends = [Backend(budget=budget, inner=inner, policy=policy, cost=cost) for budget in budgets]
    names = [
        "uncheckpointed",
        *("fxckpt, no budget" if budget is None else f"fxckpt {budget}" for budget in budgets),
    ]
    calls = [target.model, *(torch.compile(target.model, backend=backend) for backend in backends)]
    expected: list[torch.Tensor] | None = None
    ways: list[Run] = []
    for name, call, backend in zip(names, calls, (None, *backends), strict=True):
        run, gradients = _untimed(target, name, call, backend, leaves, expected, tick)
        expected = gradients if expected is None else expected
        ways.append(run)
    feasible = {way.name for way in ways if way.infeasible is None}
    timed = {name: call for name, call in zip(names, calls, strict=True) if name in feasible}
    medians = _medians(target, timed, leaves, steps=steps, tick=tick)
    return tuple(
        replace(way, seconds=medians[way.name], times=medians[way.name] / medians[names[0]])
        if way.name in medians
        else way
        for way in ways
    )


def _refuse_meta(leaves: Sequence[torch.Tensor]) -> None:
    """Raise an error for a model on the meta device."""
    if any(leaf.is_meta for leaf in leaves):
        raise CaptureError(
            "the model is on the meta device: it can be planned, but it cannot run. "
            "Make it on a real one, of a size that fits."
        )


def _untimed(
    target: ModelCall,
    name: str,
    call: Callable[..., Any],
    backend: Backend | None,
    leaves: Sequence[torch.Tensor],
    expected: Sequence[torch.Tensor] | None,
    tick: Callable[[str], object],
) -> tuple[Run, list[torch.Tensor] | None]:
    """Run one way twice; return its peak and verdict, without times, and its gradients.

    An infeasible budget has neither.
    """
    tick(name)
    try:
        _seconds(target, call, leaves)
    except BudgetInfeasible as error:
        return Run(name, None, None, None, None, "", error), None
    gradients = [leaf.grad.clone() for leaf in leaves if leaf.grad is not None]
    verdict = "" if expected is None else _verdict(expected, gradients)
    tick(name)
    _clear(leaves)
    peak = measure_peak(partial(_step, target, call))
    plans = () if backend is None else backend.plans
    planned = plans[0].peak_bytes if len(plans) == 1 else None
    return Run(name, peak, planned, None, None, verdict), gradients


def _medians(
    target: ModelCall,
    calls: Mapping[str, Callable[..., Any]],
    leaves: Sequence[torch.Tensor],
    *,
    steps: int,
    tick: Callable[[str], object],
) -> dict[str, float]:
    """Return the median seconds of each way to run the step, by its name."""
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    # torch.utils.benchmark times one way in a block; in turns, load on the machine falls on all.
    for _ in range(steps):
        for name, call in calls.items():
            tick(name)
            seconds[name].append(_seconds(target, call, leaves))
    _clear(leaves)
    return {name: statistics.median(times) for name, times in seconds.items()}


def table(runs: Sequence[Run]) -> Table:
    """Return the runs as a table."""
    columns = (
        Column("name", "run"),
        Column("peak_bytes", "peak", _unless_none(format_bytes), is_number=True),
        Column("predicted_bytes", "predicted", _unless_none(format_bytes), is_number=True),
        Column("seconds", "a step", _unless_none(format_seconds), is_number=True),
        Column("times", "x", _unless_none(lambda v: f"{v:.2f}"), is_number=True),
        Column("gradients", "gradients"),
    )
    return Table(
        columns,
        tuple(
            (r.name, r.peak_bytes, r.predicted_bytes, r.seconds, r.times, r.gradients)
            if r.infeasible is None
            else (r.name, None, None, None, None, _least(r.infeasible))
            for r in runs
        ),
    )


def _unless_none(to_text: Callable[[Any], str]) -> Callable[[Any], str]:
    return lambda value: "" if value is None else to_text(value)


def _least(error: BudgetInfeasible) -> str:
    return f"infeasible: the least is {format_bytes(error.floor_bytes)}"


def _leaves(target: ModelCall) -> list[torch.Tensor]:
    """Return the parameters and inputs that require a gradient or are on the meta device."""
    model = target.model
    parameters = list(model.parameters()) if isinstance(model, torch.nn.Module) else []
    inputs = [
        leaf
        for leaf in pytree.tree_leaves((target.args, dict(target.kwargs)))
        if isinstance(leaf, torch.Tensor)
    ]
    return [t for t in (*parameters, *inputs) if t.requires_grad or t.is_meta]


def _step(target: ModelCall, call: Callable[..., Any]) -> None:
    """Run the forward and the backward of the sum of all outputs that require a gradient."""
    outputs = [
        leaf
        for leaf in pytree.tree_leaves(call(*target.args, **target.kwargs))
        if isinstance(leaf, torch.Tensor)
    ]
    losses = [t for t in outputs if t.requires_grad]
    if not losses:
        raise CaptureError(
            "nothing to run: no output needs a gradient. "
            "Give parameters or inputs that require grad."
        )
    total = losses[0].sum() if len(losses) == 1 else torch.stack([t.sum() for t in losses]).sum()
    total.backward()


def _clear(leaves: Sequence[torch.Tensor]) -> None:
    for leaf in leaves:
        leaf.grad = None


def _seconds(target: ModelCall, call: Callable[..., Any], leaves: Sequence[torch.Tensor]) -> float:
    """Run one step with seed 0 and return its time; the gradients stay on the leaves."""
    _clear(leaves)
    torch.manual_seed(0)
    start = time.perf_counter()
    _step(target, call)
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter() - start


def _verdict(expected: Sequence[torch.Tensor], found: Sequence[torch.Tensor]) -> str:
    """Return how two lists of gradients compare, in words."""
    if len(expected) == len(found) and all(
        torch.equal(a, b) for a, b in zip(expected, found, strict=True)
    ):
        return "equal, bitwise"
    if len(expected) == len(found) and all(
        torch.allclose(a, b, rtol=1e-4, atol=1e-6) for a, b in zip(expected, found, strict=True)
    ):
        return "equal up to rounding"
    return "DIFFERENT"
