"""The frontier: recompute time against peak, from the floor to the uncheckpointed step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tabulate import tabulate
from tqdm import tqdm

from fxckpt.budget import Budget, format_bytes, validate
from fxckpt.capture import capture_joint, is_on_meta
from fxckpt.cost import CostModel
from fxckpt.errors import InvalidOption
from fxckpt.passes.normalize import normalize
from fxckpt.pipeline import Planner
from fxckpt.plan import Plan
from fxckpt.policies import as_node_policy
from fxckpt.units import format_seconds

if TYPE_CHECKING:
    from matplotlib.axes import Axes


@dataclass(frozen=True)
class Point:
    """One plan of a frontier. Seconds are extra time beyond the uncheckpointed step's."""

    budget_bytes: int
    peak_bytes: int
    saved_bytes: int
    recompute_seconds: float
    lower_bound_seconds: float
    """No plan of this budget takes less."""
    share: float
    """Recompute time over the time of the uncheckpointed step."""


@dataclass(frozen=True)
class Frontier:
    """Plans from the least peak to the uncheckpointed one; recompute time never rises with the budget."""

    plans: tuple[Plan, ...]

    @property
    def rows(self) -> tuple[Point, ...]:
        """The curve as data, one point a plan."""
        return tuple(
            Point(
                plan.budget_bytes or plan.peak_bytes,
                plan.peak_bytes,
                plan.saved_bytes,
                plan.recompute_seconds,
                plan.lower_bound_seconds,
                plan.recompute_seconds / plan.step_seconds if plan.step_seconds else 0.0,
            )
            for plan in self.plans
        )

    def __str__(self) -> str:
        body = [
            (
                format_bytes(p.budget_bytes),
                format_bytes(p.peak_bytes),
                format_bytes(p.saved_bytes),
                format_seconds(p.recompute_seconds),
                f"{p.share:+.2%}",
                format_seconds(p.lower_bound_seconds),
            )
            for p in self.rows
        ]
        head = ("budget", "peak", "saved", "extra time", "of the step", "least possible")
        return str(tabulate(body, headers=head, disable_numparse=True, colalign=("right",) * 6))

    def plot(self, ax: Axes | None = None) -> Axes:
        """Draw recompute time over peak, with the lower bound under it, and return the axes. Needs matplotlib."""
        from matplotlib import pyplot as plt

        axes = ax if ax is not None else plt.subplots(layout="constrained")[1]
        step = self.plans[0].step_seconds or 1.0
        peaks = [p.peak_bytes / 2**20 for p in self.rows]
        budgets = [p.budget_bytes / 2**20 for p in self.rows]
        axes.step(peaks, [100 * p.share for p in self.rows], where="post", color="tab:blue", marker="o", label="best plan found")
        bounds = [100 * p.lower_bound_seconds / step for p in self.rows]
        axes.plot(budgets, bounds, color="0.3", linestyle="--", label="no plan is below")
        axes.axvline(self.plans[0].floor_bound_bytes / 2**20, color="0.6", linestyle=":", label="no plan is to the left")
        axes.set_xlabel("peak of one forward and backward, MiB")
        axes.set_ylabel("recompute time, % of the step")
        axes.set_ylim(bottom=0)
        axes.grid(alpha=0.3)
        axes.legend()
        return axes


def frontier(
    model_or_fn: Callable[..., Any],
    *args: Any,
    points: int | Sequence[Budget] = 16,
    policy: Callable[..., Any] | None = None,
    cost: str | CostModel = "roofline",
    **kwargs: Any,
) -> Frontier:
    """Return the plans of ``model_or_fn(*args, **kwargs)`` at many budgets; the step is not run.

    ``points`` is how many budgets, from the floor to the uncheckpointed peak, evenly spaced in their logarithm; or the budgets themselves, each as
    :class:`fxckpt.Backend` takes it. A progress bar shows on a terminal. Raises :class:`CaptureError` as :func:`fxckpt.plan` does,
    :class:`BudgetInfeasible` for a budget below the floor and :class:`InvalidOption` for fewer than 2 points or no budgets.

    Examples
    --------
    >>> import torch, fxckpt
    >>> with torch.device("meta"):
    ...     model = torch.nn.Sequential(*(torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.GELU()) for _ in range(8)))
    >>> curve = fxckpt.frontier(model, torch.empty(512, 64, device="meta"), points=4)
    >>> [row.recompute_seconds for row in curve.rows] == sorted((row.recompute_seconds for row in curve.rows), reverse=True)
    True
    """
    if isinstance(points, int):
        count, is_legal = points, points >= 2
    else:
        is_legal = isinstance(points, Sequence) and not isinstance(points, str) and len(points) > 0
        count = len(points) if is_legal else 0
    if not is_legal:
        raise InvalidOption(
            f"points={points!r}: a frontier has at least 2 points, the floor and the uncheckpointed plan, or a list of budgets. "
            "Examples: points=16, points=['8GiB', '6GiB', 0.5]."
        )
    for budget in () if isinstance(points, int) else points:
        validate(budget)
    planner = Planner(None, as_node_policy(policy), cost, measure_scratch=not is_on_meta(model_or_fn, args, kwargs))
    joint = capture_joint(model_or_fn, args, kwargs)
    normalize(joint.module)
    with tqdm(total=count, desc="frontier", disable=None) as bar:
        plans = planner.frontier(joint.module, num_fwd_outputs=joint.num_fwd_outputs, points=points, tick=bar.update)
    return Frontier(plans)
