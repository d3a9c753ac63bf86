"""Comparison: a model's step run for real, as it is and inside budgets, side by side."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils import _pytree as pytree

from fxckpt.backend import Backend, InnerCompiler
from fxckpt.budget import Budget, format_bytes
from fxckpt.cli.factory import Target
from fxckpt.costs.models import CostModel
from fxckpt.errors import CaptureError, InvalidOption
from fxckpt.measure import measure_peak
from fxckpt.utils.tables import Column, Table
from fxckpt.utils.units import format_seconds


@dataclass(frozen=True)
class Run:
    """One way to run the step. Peaks in bytes beyond what was allocated before, seconds a step."""

    name: str
    peak_bytes: int
    predicted_bytes: int | None
    seconds: float
    times: float
    """Seconds over those of the uncheckpointed step."""
    gradients: str
    """How they compare with the uncheckpointed step's."""


def compare(
    target: Target,
    budgets: Sequence[Budget],
    *,
    steps: int,
    inner: str | InnerCompiler = "aot_eager",
    policy: Callable[..., Any] | None = None,
    cost: str | CostModel = "roofline",
    tick: Callable[[str], object] = lambda name: None,
) -> tuple[Run, ...]:
    """Run the uncheckpointed step and one a budget, first once each, then ``steps`` times in turn; ``tick`` is told what runs.

    Raises :class:`fxckpt.CaptureError` for a model on the meta device, which cannot run, or without anything to differentiate, and
    :class:`fxckpt.InvalidOption` for no steps.
    """
    if steps < 1:
        raise InvalidOption(f"steps={steps}: at least one step has to be timed.")
    leaves = _leaves(target)
    if any(leaf.is_meta for leaf in leaves):
        raise CaptureError(
            "the model is on the meta device: it can be planned, but it cannot run. Make it on a real one, of a size that fits."
        )
    torch.compiler.reset()
    backends = [Backend(budget=budget, inner=inner, policy=policy, cost=cost) for budget in budgets]
    names = [
        "uncheckpointed",
        *("fxckpt, no budget" if budget is None else f"fxckpt {budget}" for budget in budgets),
    ]
    calls = [target.model, *(torch.compile(target.model, backend=backend) for backend in backends)]
    gradients, peaks = [], []
    seconds: list[list[float]] = [[] for _ in names]
    for name, call in zip(names, calls, strict=True):
        tick(name)
        _seconds(target, call, leaves)
        gradients.append([leaf.grad.clone() for leaf in leaves if leaf.grad is not None])
        tick(name)
        _clear(leaves)
        peaks.append(measure_peak(lambda call=call: _step(target, call)))  # type: ignore[misc]  # bound now
    for _ in range(steps):
        for name, call, found in zip(names, calls, seconds, strict=True):
            tick(name)
            found.append(_seconds(target, call, leaves))
    _clear(leaves)
    medians = [statistics.median(found) for found in seconds]
    predicted = [None, *(b.plans[0].peak_bytes if len(b.plans) == 1 else None for b in backends)]
    verdicts = ["", *(_verdict(gradients[0], other) for other in gradients[1:])]
    return tuple(
        Run(name, peak, guess, median, median / medians[0], verdict)
        for name, peak, guess, median, verdict in zip(
            names, peaks, predicted, medians, verdicts, strict=True
        )
    )


def table(runs: Sequence[Run]) -> Table:
    """Return the runs as a table."""
    columns = (
        Column("name", "run"),
        Column("peak_bytes", "peak", format_bytes, is_number=True),
        Column(
            "predicted_bytes",
            "predicted",
            lambda v: "" if v is None else format_bytes(v),
            is_number=True,
        ),
        Column("seconds", "a step", format_seconds, is_number=True),
        Column("times", "x", lambda v: f"{v:.2f}", is_number=True),
        Column("gradients", "gradients"),
    )
    return Table(
        columns,
        tuple(
            (r.name, r.peak_bytes, r.predicted_bytes, r.seconds, r.times, r.gradients) for r in runs
        ),
    )


def _leaves(target: Target) -> list[torch.Tensor]:
    own = list(target.model.parameters()) if isinstance(target.model, torch.nn.Module) else []
    given = [
        leaf
        for leaf in pytree.tree_leaves((target.args, dict(target.kwargs)))
        if isinstance(leaf, torch.Tensor)
    ]
    return [t for t in (*own, *given) if t.requires_grad or t.is_meta]


def _step(target: Target, call: Callable[..., Any]) -> None:
    outputs = [
        leaf
        for leaf in pytree.tree_leaves(call(*target.args, **target.kwargs))
        if isinstance(leaf, torch.Tensor)
    ]
    losses = [t for t in outputs if t.requires_grad]
    if not losses:
        raise CaptureError(
            "nothing to run: no output needs a gradient. Give parameters or inputs that require grad."
        )
    total = losses[0].sum() if len(losses) == 1 else torch.stack([t.sum() for t in losses]).sum()
    total.backward()


def _clear(leaves: Sequence[torch.Tensor]) -> None:
    for leaf in leaves:
        leaf.grad = None


def _seconds(target: Target, call: Callable[..., Any], leaves: Sequence[torch.Tensor]) -> float:
    """Run one step from the same seed, leave its gradients, and return what it took."""
    _clear(leaves)
    torch.manual_seed(0)
    begin = time.perf_counter()
    _step(target, call)
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter() - begin


def _verdict(expected: Sequence[torch.Tensor], found: Sequence[torch.Tensor]) -> str:
    if len(expected) == len(found) and all(
        torch.equal(a, b) for a, b in zip(expected, found, strict=True)
    ):
        return "equal, bitwise"
    if len(expected) == len(found) and all(
        torch.allclose(a, b, rtol=1e-4, atol=1e-6) for a, b in zip(expected, found, strict=True)
    ):
        return "equal up to rounding"
    return "DIFFERENT"
