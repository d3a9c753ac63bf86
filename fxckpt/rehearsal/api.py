"""Plan of a step of several graphs, made without running it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch

from fxckpt import budgets
from fxckpt.costs.models import CostModel
from fxckpt.errors import BudgetInfeasible, InvalidOption
from fxckpt.passes.analysis.graph_snapshot import snapshot_of
from fxckpt.passes.analysis.joint import Facts
from fxckpt.passes.meta import DEVICE
from fxckpt.planner.build_plan import build_plan
from fxckpt.planner.capture import is_on_meta
from fxckpt.planner.pipeline import prepare
from fxckpt.planner.planned_device import planned_device, warn_beyond
from fxckpt.planner.planner import Planner, device_of, planner_of
from fxckpt.plans.types import Plan
from fxckpt.rehearsal.rehearse import RehearsedGraph, RehearsedStep, rehearse
from fxckpt.reports.step_plan import GraphLevels, StepPlan
from fxckpt.solver.levels import Level, LevelSearch, level_of
from fxckpt.solver.schedule import save_all
from fxckpt.solver.search.candidates import Candidate
from fxckpt.solver.simulate import simulate
from fxckpt.solver.step_choice import StepProgram, choice_of
from fxckpt.tiers import Tier, tier_of
from fxckpt.utils.progress import searching


def plan_step(
    model_or_fn: Callable[..., Any],
    *args: Any,
    budget: budgets.Budget = None,
    policy: Any = None,
    cost: str | CostModel = "roofline",
    device: str | torch.device | None = None,
    offload: Tier | str | None = None,
    **kwargs: Any,
) -> StepPlan:
    """Return the plan of a step of several graphs, ``model_or_fn(*args, **kwargs)``; it is not run.

    The graphs are those of the parts of the model that are compiled, such as blocks by
    ``block.compile()``; if there are none, those that Dynamo makes of the whole, which end at graph
    breaks. The code between them runs on tensors without data, and what it allocates is counted.
    Each graph gets a few plans, its levels, and each call the one with which the step is within the
    budget, as :class:`fxckpt.Backend` with ``inner="aot_eager"`` chooses them.

    Parameters
    ----------
    model_or_fn, args, kwargs, policy, cost, device:
        As for :func:`fxckpt.plan`.
    budget:
        Bytes, or a fraction of the uncheckpointed step.
    offload:
        As for :func:`fxckpt.plan`. Calls in flight share the limit of the place that values are
        sent to.

    Returns
    -------
    StepPlan
        The levels of each graph, and the one that each call takes.

    Raises
    ------
    CaptureError
        If no graph has a backward, or code between the graphs reads values of tensors.
    BudgetInfeasible
        If the step fits at no level.
    InvalidBudget, InvalidOption
        For invalid arguments, and where what a policy sends away does not fit its place.

    Examples
    --------
    >>> import torch, fxckpt
    >>> layers = torch.nn.TransformerEncoderLayer(64, 4), torch.nn.TransformerEncoderLayer(64, 4)
    >>> model = torch.nn.Sequential(*map(torch.compile, layers))
    >>> step = fxckpt.plan_step(model, torch.randn(16, 8, 64), budget=0.8)
    >>> len(step.calls), step.peak_bytes <= step.budget_bytes
    (2, True)
    """
    budgets.validate(budget)
    if budget is not None and not budgets.is_in_bytes(budget):
        raise InvalidOption(
            f"budget={budget!r} is of each graph by itself. Give the step bytes or a fraction: "
            "budget='2GiB', budget=0.6."
        )
    if isinstance(policy, Plan):
        raise InvalidOption(
            "policy is a plan, which is of one graph. Give a policy of fxckpt.policies, or apply "
            "the plan by fxckpt.Backend(policy=plan)."
        )
    on_meta = is_on_meta(model_or_fn, args, kwargs)
    target = planned_device(device, is_on_meta=on_meta)
    if device is not None:
        warn_beyond(target.named, "budget", budget)
    planner = planner_of(
        budget,
        policy,
        cost,
        measure_workspace=not on_meta and target.named is None,
        device=target.named,
        offload=tier_of(offload),
    )
    with searching("plan"):
        step = rehearse(model_or_fn, args, kwargs, target)
        return _planned(planner, step)


def _planned(planner: Planner, step: RehearsedStep) -> StepPlan:
    """Return the plan of a rehearsed step."""
    read = []
    for graph in step.graphs:
        if planner.device is not None:
            graph.joint.module.meta[DEVICE] = planner.device.name
        prepare(graph.joint)
        facts, name = planner.read(graph.joint, bind_preferences=False)
        read.append((graph, planner.with_region_limits(graph.joint.module.graph, facts), name))
    baselines = [_baseline(facts) for _, facts, _ in read]
    uncheckpointed = StepProgram(tuple((baselines[g],) for g in step.calls), step.moments)
    baseline = choice_of(uncheckpointed, [0] * len(step.calls)).peak_bytes
    device = device_of(step.graphs[0].joint.module.graph)
    limit = planner.budget_bytes(planner.budget, baseline, device)
    graphs = tuple(
        _levels(planner, number, graph, facts, name, _room(step, limit))
        for number, (graph, facts, name) in enumerate(read, 1)
    )
    away_limit = None if planner.offload is None else planner.offload.limit_bytes
    program = StepProgram(tuple(graphs[g].levels for g in step.calls), step.moments, away_limit)
    plan = StepPlan.within(limit, graphs, step.calls, program, baseline_peak_bytes=baseline)
    if limit is not None and plan.peak_bytes > limit:
        raise _infeasible(planner.budget, plan, limit)
    if not program.has_room(plan.choice.levels):
        raise _too_much_away(planner, plan)
    return plan


def _baseline(facts: Facts) -> Level:
    """Return the bytes of an uncheckpointed graph."""
    schedule = save_all(facts.program)
    return level_of(facts.program, Candidate(schedule, simulate(facts.program, schedule)))


def _room(step: RehearsedStep, limit: int | None) -> int | None:
    """Return the bytes left for the backward of the only call; None if there are several."""
    if limit is None or len(step.calls) != 1:
        return None
    held: Sequence[int] = [m.outside_bytes for m in step.moments if m.is_backward or 0 in m.held]
    return limit - max(held, default=0)


def _levels(
    planner: Planner,
    number: int,
    graph: RehearsedGraph,
    facts: Facts,
    cost: str,
    room: int | None,
) -> GraphLevels:
    """Return the levels of a graph, each with its plan."""
    family = LevelSearch()(planner.search, facts.program, room)
    fx_graph = graph.joint.module.graph
    snapshot, lines = snapshot_of(fx_graph, facts), planner.lines(fx_graph)
    plans = tuple(
        replace(
            build_plan(snapshot, family.result(i), candidate, budget_bytes=None, cost=cost),
            graph=lines,
        )
        for i, candidate in enumerate(family.candidates)
    )
    return GraphLevels(number, graph.source, plans, family.levels)


def _too_much_away(planner: Planner, plan: StepPlan) -> InvalidOption:
    """Return the error for a policy that sends more away than its place holds."""
    assert planner.offload is not None
    limit = budgets.format_bytes(planner.offload.limit_bytes)
    return InvalidOption(
        f"the policy {planner.policy!r} sends away {budgets.format_bytes(plan.away_bytes)} of the "
        f"calls in flight, and {planner.offload!r} holds {limit}. Raise its limit, or let the "
        "policy prefer what it demands (PREFER_CPU_OFFLOAD)."
    )


def _infeasible(budget: budgets.Budget, plan: StepPlan, limit: int) -> BudgetInfeasible:
    """Return the error for a step that fits at no level."""
    floor = plan.floor_bytes
    asked, least = budgets.format_apart(limit, floor)
    fraction = budgets.least_fraction(budget, floor, plan.baseline_peak_bytes)
    enough = f"'{floor}B'" if fraction is None else f"{fraction} ('{floor}B')"
    return BudgetInfeasible(
        f"budget={budget!r} is {asked}, below the least peak found for this step of "
        f"{len(plan.calls)} calls, {least}, of which up to "
        f"{budgets.format_bytes(plan.outside_bytes)} are allocated outside of the graphs; its "
        f"uncheckpointed peak is {budgets.format_bytes(plan.baseline_peak_bytes)}. Raise the "
        f"budget to at least {enough}, or make the batch smaller.",
        floor_bytes=floor,
        budget_bytes=limit,
    )
