"""A compile in plain sight: joint graph in; forward graph, backward graph and plan out."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import fx

from fxckpt import budget as budgets
from fxckpt.cost import CostModel, checked, resolve
from fxckpt.errors import BudgetInfeasible
from fxckpt.passes.describe import describe
from fxckpt.passes.facts import Facts, NodePolicy, collect, no_scratch, tensors
from fxckpt.passes.liveness import inner_bytes
from fxckpt.passes.normalize import normalize
from fxckpt.passes.partition import partition
from fxckpt.passes.price_search import PriceSearch
from fxckpt.passes.rematerialize import rematerialize
from fxckpt.passes.verify import verify
from fxckpt.plan import Plan
from fxckpt.scratch import MeasuredScratch


@dataclass(frozen=True)
class Planner:
    """Everything a user chose, in one immutable value."""

    budget: budgets.Budget = None
    policy: NodePolicy | None = None
    cost: str | CostModel = "roofline"
    measure_scratch: bool = True
    """Run each distinct CPU op once on zeros to learn its kernel's workspace."""
    search: PriceSearch = field(default_factory=PriceSearch)

    def plan(self, joint: fx.GraphModule, *, num_fwd_outputs: int) -> tuple[Facts, Plan]:
        """Plan a normalized joint graph without changing it. Raises :class:`BudgetInfeasible`."""
        device = device_of(joint.graph)
        cost = checked(resolve(self.cost, device))
        measured = MeasuredScratch() if self.measure_scratch else no_scratch
        facts = collect(
            joint,
            num_fwd_outputs=num_fwd_outputs,
            cost=cost,
            policy=self.policy,
            scratch=lambda node: measured(node) + inner_bytes(node),
            bind_preferences=self.budget is None,
        )
        limit: Callable[[int], int | None] = lambda baseline: budgets.resolve(  # noqa: E731
            self.budget, baseline_peak_bytes=baseline, device=device
        )
        found = self.search(facts.program, limit)
        budget_bytes = limit(found.baseline.simulation.peak_bytes)
        floor = found.floor.simulation.peak_bytes
        if found.best is None:
            assert budget_bytes is not None
            raise BudgetInfeasible(
                f"budget={self.budget!r} is {budget_bytes} bytes ({budgets.format_bytes(budget_bytes)}), below the least peak "
                f"of this graph, {floor} bytes ({budgets.format_bytes(floor)}); its uncheckpointed peak is "
                f"{budgets.format_bytes(found.baseline.simulation.peak_bytes)}. "
                f"Raise the budget to at least '{floor}B', or make the batch smaller.",
                floor_bytes=floor,
                budget_bytes=budget_bytes,
            )
        return facts, describe(facts, found, found.best, budget_bytes=budget_bytes, cost=cost.name)

    def partition(self, joint: fx.GraphModule, *, num_fwd_outputs: int) -> tuple[fx.GraphModule, fx.GraphModule, Plan]:
        """Turn a joint graph into forward, backward and the plan they follow. ``joint`` is used up."""
        normalize(joint)
        facts, plan = self.plan(joint, num_fwd_outputs=num_fwd_outputs)
        result = rematerialize(joint, facts, plan, num_fwd_outputs=num_fwd_outputs)
        forward, backward = partition(joint, result, num_fwd_outputs=num_fwd_outputs)
        verify(forward, backward, plan)
        return forward, backward, plan


def device_of(graph: fx.Graph) -> torch.device:
    """Return the device a graph computes on: the first accelerator among its values, else the CPU."""
    first = torch.device("cpu")
    for node in graph.nodes:
        for tensor in tensors(node.meta.get("val")):
            if tensor.device.type != "cpu":
                return tensor.device
    return first
