"""Plans as data: saved values, recomputes with their places, and the reasons.

A plan holds node *names* of one joint graph, never ``fx.Node``, so that it prints, compares,
pickles, and applies to every capture of the same graph. The solver makes plans and
:mod:`fxckpt.passes.transforms.rematerialize` applies them; neither knows the other.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fxckpt.budgets import format_bytes
from fxckpt.errors import InvalidOption
from fxckpt.plans.snapshot import GraphSnapshot
from fxckpt.reason import Decision, Reason
from fxckpt.solver.schedule import Away, Schedule

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from torch import fx

    from fxckpt.plans.carriers import Contexts, NodePolicy
    from fxckpt.reports.difference import Difference
    from fxckpt.reports.explanation import Explanation
    from fxckpt.reports.timeline import Timeline
    from fxckpt.reports.tradeoff import Frontier


@dataclass(frozen=True)
class Row:
    """One forward value that the backward needs, and the decision about it."""

    name: str
    """Name of the node in the joint graph."""
    op: str
    """Name of the op, for people."""
    shape: tuple[int, ...]
    dtype: str
    bytes: int
    """Bytes of the value's storage, counted once."""
    module: str
    """Path of the module that called the op."""
    source: str
    """File and line of the model's source."""
    decision: Decision
    reason: Reason
    runs: int
    """Number of recomputes in the backward; 0 if the value is saved."""
    recompute_seconds: float
    """Seconds of one recompute."""
    recompute_flops: int
    """FLOPs of one recompute."""


@dataclass(frozen=True)
class Recompute:
    """One recompute of a forward op in the backward."""

    name: str
    """Name of the forward op."""
    before: str
    """Name of the backward node that follows the recompute; ``"output"`` at the end."""


@dataclass(frozen=True)
class Offload:
    """One saved value that is away from the device during some ops.

    Positions are those of :attr:`Plan.profile`.
    """

    name: str
    """Name of the node in the joint graph."""
    bytes: int
    """Bytes of the value's storage."""
    first: int
    """First op at which the value is away."""
    last: int
    """Last op at which the value is away; its copy back begins after it."""


@dataclass(frozen=True)
class RegionBudget:
    """A part of the model with a budget of its own, and what a plan saves of its values."""

    name: str
    """The user's name, or the line of the source."""
    budget: str
    """The budget as given: bytes, or a fraction."""
    limit_bytes: int
    """Most bytes that may be saved."""
    saved_bytes: int
    """Bytes that the plan saves."""
    least_bytes: int
    """Fewest bytes that can be saved."""
    default_bytes: int
    """Bytes that are saved without a budget."""
    binds: bool
    """Whether more would be saved without this budget, with the others in force."""


@dataclass(frozen=True)
class Tiling:
    """How regions of independent rows were unrolled in the graph that was planned."""

    count: int
    """Number of tiles of each region, at most."""
    groups: int
    """Number of groups of identical regions that were unrolled, the widest first."""
    is_ahead: bool = False
    """Whether the gradients of the widest region are computed in its forward, and scaled later."""
    regions: tuple[str, ...] = ()
    """Names of the regions: the modules that they begin in."""

    def __str__(self) -> str:
        shown = ", ".join(self.regions[:2]) + ("" if len(self.regions) <= 2 else ", ...")
        ahead = ", gradients of the first with its forward" if self.is_ahead else ""
        return f"{self.count} in {len(self.regions)} regions ({shown}){ahead}"


@dataclass(frozen=True)
class Plan:
    """Saved and recomputed forward values of one joint graph, with their memory and time.

    Bytes are beyond those allocated when the step began. Seconds and FLOPs are by the cost model
    named in ``cost``.

    >>> import torch, fxckpt
    >>> model = torch.nn.Sequential(*(torch.nn.Linear(8, 8), torch.nn.GELU()) * 4)
    >>> plan = fxckpt.plan(model, torch.randn(512, 8), budget="128KiB", cost="flops")
    >>> len(plan.saved) + len(plan.recomputed)
    7
    >>> print(str(plan).splitlines()[1])
    budget                     128.0 KiB
    >>> plan.peak_bytes <= plan.budget_bytes < plan.baseline_peak_bytes
    True
    >>> fxckpt.Plan.from_json(plan.to_json()) == plan
    True

    Methods explain it, compare it, and plan other budgets without a new capture:

    >>> least, *_, most = plan.frontier(points=2).plans
    >>> least.peak_bytes == plan.floor_bytes, most.recompute_seconds
    (True, 0.0)
    >>> len(plan.explain().rows) == len(plan.rows)
    True
    >>> max(tick.bytes for tick in plan.timeline().ticks) == plan.peak_bytes
    True
    """

    saved: tuple[str, ...]
    """Names of the nodes that the forward saves."""
    recomputed: tuple[str, ...]
    """Names of the nodes that the backward recomputes."""
    schedule: tuple[Recompute, ...]
    """Every recompute, in the order of the backward."""
    saved_bytes: int
    """Bytes of the saved values."""
    peak_bytes: int
    """Peak of one forward and backward by the planner's model."""
    baseline_peak_bytes: int
    """Peak of the uncheckpointed graph, which saves everything that the backward reads."""
    floor_bytes: int
    """Least peak that the planner reached on this graph."""
    floor_bound_bytes: int
    """Lower bound on the peak of any plan for this order of the graph."""
    recompute_seconds: float
    """Seconds beyond those of the uncheckpointed step."""
    recompute_flops: int
    """FLOPs beyond those of the uncheckpointed step."""
    lower_bound_seconds: float
    """Lower bound on the recompute time of any plan within the budget.

    See :mod:`fxckpt.solver.exact.lower_bounds`.
    """
    price: float
    """Shadow price of the budget: seconds that one more MiB saves, at most and at the margin.

    It is 0 if the budget does not bind.
    """
    next_seconds: float
    """Most seconds that 100 MiB more can save, by the lower bound there."""
    step_seconds: float
    """Seconds of forward and backward of the uncheckpointed graph."""
    step_flops: int
    """FLOPs of forward and backward of the uncheckpointed graph."""
    budget_bytes: int | None
    """Budget in bytes, or None if there was none."""
    rows: tuple[Row, ...]
    """One row for each saved or recomputed value."""
    profile: tuple[int, ...]
    """Live bytes during each op, the forward's ops first."""
    forward_ops: int
    """Number of leading entries of ``profile`` that belong to the forward."""
    cost: str
    """Name of the cost model."""
    compiled_peak_bytes: int | None = None
    """Peak by the inner compiler's schedule of the two halves, or None if none was asked."""
    compiled_halves_bytes: tuple[int, int] | None = None
    """Peaks of the forward and of the backward by that schedule; None if not both were asked."""
    compiled_held_bytes: int | None = None
    """Bytes that its forward holds for its backward alone; None if none was asked."""
    never_stored: tuple[str, ...] = ()
    """Values that Inductor is expected to inline into the kernels of their readers.

    See :mod:`fxckpt.passes.inductor.fusion_model`.
    """
    keeps_order: bool = True
    """Whether a compiler that reorders ops must keep the order of the backward.

    It is False for a plan that is the choice of torch's own partitioner.
    """
    frees_early: bool = False
    """Whether the compiled backward frees memory that Inductor would keep for a later buffer.

    It is True only if the plan is over the budget otherwise.
    """
    budget_binds: bool = False
    """Whether a plan of a higher peak would take less time."""
    regions: tuple[RegionBudget, ...] = ()
    """Parts of the model with a budget of their own, in the order in which they run."""
    offloads: tuple[Offload, ...] = ()
    """Saved values that are sent away from the device, in the order of the program's storages."""
    stall_seconds: float = 0.0
    """Seconds of waits for copies off the device and back, by the link's rates."""
    tiling: Tiling | None = None
    """How the joint graph was tiled; None for the graph as it was traced."""
    graph: tuple[str, ...] = field(default=(), repr=False)
    """Joint graph that the plan was made for, one line per node, then one per budget region."""
    snapshot: GraphSnapshot | None = field(default=None, compare=False, repr=False)
    """That graph as reports, plots and pages read it; equality of plans ignores it."""

    def __str__(self) -> str:
        from fxckpt.reports.explanation import summary_of

        return summary_of(self)

    def __repr__(self) -> str:
        # The digest, for caches are keyed by the repr of what a user gave.
        runs = f"{len(self.saved)} saved, {len(self.schedule)} recomputed"
        return f"<Plan {self.digest}: peak of {format_bytes(self.peak_bytes)}, {runs}>"

    @property
    def digest(self) -> str:
        """Hash of the graph and of the decisions about it.

        It is equal on all machines, and for all ways of capture, if graph and decisions are equal.
        """
        decided = (
            *self.graph,
            "saved",
            *self.saved,
            "runs again",
            *(f"{run.name} before {run.before}" for run in self.schedule),
            *(f"{o.name} is away from {o.first} to {o.last}" for o in self.offloads),
        )
        return hashlib.sha256("\n".join(decided).encode()).hexdigest()[:16]

    def to_json(self, *, indent: int | None = None) -> str:
        """Return the plan as JSON text for :meth:`from_json`, without its snapshot."""
        from fxckpt.plans.serialize import dump

        return dump(self, indent=indent)

    @staticmethod
    def from_json(text: str) -> Plan:
        """Return the plan of a JSON text that :meth:`to_json` wrote.

        Raises :class:`~fxckpt.errors.InvalidPlan` for another text, one of another version, or one
        that was changed.
        """
        from fxckpt.plans.serialize import load

        return load(text)

    @property
    def reasons(self) -> dict[str, Reason]:
        """Reason for each saved or recomputed value, by name."""
        return {row.name: row.reason for row in self.rows}

    @property
    def away_bytes(self) -> int:
        """Bytes that are sent away, all of which are off the device at the forward's end."""
        return sum(offload.bytes for offload in self.offloads)

    @property
    def extra_seconds(self) -> float:
        """Seconds beyond those of the uncheckpointed step: recomputes, and waits for copies."""
        return self.recompute_seconds + self.stall_seconds

    @property
    def slowdown(self) -> float:
        """Extra time as a share of the uncheckpointed step; 0 where the step takes no time."""
        return self.extra_seconds / self.step_seconds if self.step_seconds else 0.0

    def as_context_fn(self) -> Callable[[], Contexts]:
        """Return the plan as ``context_fn`` of ``torch.utils.checkpoint.checkpoint``.

        The region must be the function that was planned. Saved is what the plan saves, op by op in
        the order of calls, with three exceptions that eager torch needs: random ops are always
        recomputed, from the generator's state that torch keeps; so are writes in place, and views.
        A region is recomputed as a whole when its backward starts: the bytes between forward and
        backward are the plan's, its peak need not be.

        The context raises :class:`fxckpt.PlanMismatch` in a forward that does not run the planned
        ops. Raises :class:`fxckpt.InvalidOption` for a plan without its snapshot.

        >>> import torch, fxckpt
        >>> from torch.utils.checkpoint import checkpoint
        >>> block = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.GELU())
        >>> x = torch.ones(4, 8)
        >>> plan = fxckpt.plan(block, x, policy=fxckpt.policies.recompute_all)
        >>> y = checkpoint(block, x, use_reentrant=False, context_fn=plan.as_context_fn())
        >>> y.sum().backward()
        """
        from fxckpt.plans import carriers

        return carriers.context_fn(self, snapshot_of_plan(self).labels)

    def tag(self, joint: fx.GraphModule) -> None:
        """Write the plan as torch's tags into a joint graph, for torch's own partitioner.

        ``node.meta["recompute"]`` of forward nodes becomes ``CheckpointPolicy.MUST_SAVE`` or
        ``MUST_RECOMPUTE``. The graph must be one of the model and shapes that were planned.

        Raises :class:`fxckpt.PlanMismatch` if the plan saves a node that the graph lacks, and
        :class:`fxckpt.InvalidOption` for a plan without its snapshot.
        """
        from fxckpt.plans import carriers

        carriers.tag(self, snapshot_of_plan(self).labels, joint)

    def as_node_policy(self) -> NodePolicy:
        """Return the plan as a policy of the nodes of another graph, such as torchtitan's.

        ``policy(node)`` returns a ``CheckpointPolicy``, which torchtitan's
        ``tag_sac_policy(gm, policy_fn=policy)`` takes. A node is found by its module, its op and
        the number of that op's calls in the module before it. Random ops are saved.

        Raises :class:`fxckpt.InvalidOption` for a plan without its snapshot.
        """
        from fxckpt.plans import carriers

        return carriers.node_policy(self, snapshot_of_plan(self).labels)

    def saved_regions(self, regions: Iterable[str], *, share: float = 0.5) -> frozenset[str]:
        """Return which regions to save, for checkpointing that decides by region.

        A region is named by its module; of those returned the plan saves at least ``share`` of the
        bytes that their values have. For ``torch_remat``:
        ``remat.region(self.mlp, "mlp", recompute="mlp" not in plan.saved_regions(names))``.

        Raises :class:`fxckpt.InvalidOption` for a name that no op of the plan is in, and for a plan
        without its snapshot.
        """
        from fxckpt.plans import carriers

        return carriers.saved_regions(self, snapshot_of_plan(self).labels, regions, share)

    def explain(self) -> Explanation:
        """Return the plan as rows, which print as tables and a memory profile."""
        from fxckpt.reports.explanation import explain

        return explain(self)

    def diff(self, other: Plan) -> Difference:
        """Return the changes from this plan to ``other``.

        Raises :class:`fxckpt.InvalidOption` if ``other`` is no plan, or one of another graph.
        """
        from fxckpt.reports.difference import diff

        return diff(self, other)

    def timeline(self) -> Timeline:
        """Return the contents of the memory at each op of the step, value by value.

        Raises :class:`fxckpt.InvalidOption` for a plan without its snapshot.
        """
        from fxckpt.reports.timeline import timeline

        return timeline(self)

    def frontier(self, points: int = 8) -> Frontier:
        """Return plans of the same step at ``points`` budgets and this one, without a new capture.

        Raises :class:`fxckpt.InvalidOption` for fewer than 2 points, and for a plan without its
        snapshot.
        """
        from fxckpt.planner.sweep import frontier_of

        return frontier_of(self, points)

    def plot_memory(self, ax: Axes | None = None, *, over: str = "ops") -> Axes:
        """Draw the contents of the memory over the step's ops, and return the axes.

        ``over="time"`` draws them over the step's time. It draws on ``ax``, or on a new figure.
        Needs matplotlib. Raises :class:`fxckpt.InvalidOption` for another ``over``, and for a plan
        without its snapshot.
        """
        from fxckpt.reports import plots

        return plots.memory(self, ax, over=over)

    def plot_modules(self, ax: Axes | None = None, *, depth: int | None = None) -> Axes:
        """Draw saved and recomputed bytes by module, and return the axes.

        ``depth`` truncates module paths to that many components. It draws on ``ax``, or on a new
        figure. Needs matplotlib.
        """
        from fxckpt.reports import plots

        return plots.modules(self, ax, depth=depth)

    def to_html(self, path: str | Path, *, points: int = 8, title: str | None = None) -> Path:
        """Write one self-contained page to ``path``, and return the path.

        The page shows the graph by module, the reason for each decision, and the memory over the
        step. It has a slider over ``points`` plans of the same step (see :meth:`frontier`); with 0
        points it shows only this plan. Its title is by default the name of the model.

        Raises :class:`fxckpt.InvalidOption` for 1 point or fewer than 0, and for a plan without its
        snapshot.
        """
        from fxckpt.reports import html

        if points != 0 and points < 2:
            raise InvalidOption(
                f"points={points!r}: the page's slider has at least 2 plans, from the floor up; "
                "with points=0 there is none."
            )

        plans = self.frontier(points).plans if points else (self,)
        return html.write(plans, path, chosen=plans.index(self), title=title)

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        printer.text(str(self.explain().top(20)))

    def _repr_html_(self) -> str:
        return self.explain()._repr_html_()


def schedule_of(plan: Plan) -> Schedule:
    """Return the schedule of a plan in the indices of its graph's program."""
    snapshot = snapshot_of_plan(plan)
    return Schedule(
        tuple(sorted(snapshot.storage_index[name] for name in plan.saved)),
        tuple(snapshot.op_index[run.name] for run in plan.schedule),
        tuple(snapshot.backward_index[run.before] for run in plan.schedule),
        tuple(Away(snapshot.storage_index[o.name], o.first, o.last) for o in plan.offloads),
    )


def snapshot_of_plan(plan: Plan) -> GraphSnapshot:
    """Return the snapshot of a plan's graph.

    Raises :class:`fxckpt.InvalidOption` for a plan without one.
    """
    if plan.snapshot is None:
        raise InvalidOption(
            "this plan does not carry the graph it was made for, so it cannot be drawn or "
            "explained value by value. Plan again: fxckpt.plan(model, *inputs, budget=...)."
        )
    return plan.snapshot
