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
    """Run each distinct CPU op once on made-up values to learn its kernel's workspace."""
    search: PriceSearch = field(default_factory=PriceSearch)

    def plan(self, joint: fx.GraphModule, *, num_fwd_outputs: int) -> tuple[Facts, Plan]:
        """Plan a normalized joint graph without changing it. Raises :class:`BudgetInfeasible`."""
        device = device_of(joint.graph)
        facts, cost = self._read(joint, num_fwd_outputs, device, bind_preferences=self.budget is None)
        found = self.search(facts.program, lambda peak: budgets.resolve(self.budget, baseline_peak_bytes=peak, device=device))
        budget_bytes, floor = found.limit, found.floor.simulation.peak_bytes
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
        return facts, describe(facts, found, found.best, budget_bytes=budget_bytes, cost=cost)

    def frontier(
        self, joint: fx.GraphModule, *, num_fwd_outputs: int, points: int, tick: Callable[[], object] = lambda: None
    ) -> tuple[Plan, ...]:
        """Plan a normalized joint graph at ``points`` budgets from the floor to the uncheckpointed peak; ``tick`` is called once a point."""
        facts, cost = self._read(joint, num_fwd_outputs, device_of(joint.graph), bind_preferences=False)
        found = self.search.frontier(facts.program, points, tick)
        return tuple(describe(facts, f, f.best, budget_bytes=f.limit, cost=cost) for f in found if f.best is not None)

    def _read(self, joint: fx.GraphModule, num_fwd_outputs: int, device: torch.device, *, bind_preferences: bool) -> tuple[Facts, str]:
        """Return the graph's facts and the name of the cost model they were made with."""
        cost = checked(resolve(self.cost, device))
        measured = MeasuredScratch() if self.measure_scratch else no_scratch
        facts = collect(
            joint,
            num_fwd_outputs=num_fwd_outputs,
            cost=cost,
            policy=self.policy,
            scratch=lambda node: measured(node) + inner_bytes(node),
            bind_preferences=bind_preferences,
        )
        return facts, cost.name

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
