"""Planning for a compiler that fuses: the model proposes, the compiler's own lowering disposes.

The search works on the kernel graph (:mod:`~fxckpt.passes.kernels`), a model. What comes out is lowered (:mod:`~fxckpt.lowering`) before it is
taken: a plan whose compiled peak is over the budget is planned again within less, as much less as the model was wrong. The choice of torch's own
partitioner is always a candidate, so that without a budget nothing gets worse.
"""

from __future__ import annotations

import copy
import logging
from dataclasses import dataclass, replace
from typing import Any

from torch import fx

from fxckpt import budget as budgets
from fxckpt.lowering import CompiledStep, Lower, compiled_step
from fxckpt.passes.describe import describe
from fxckpt.passes.facts import Facts
from fxckpt.passes.fingerprint import fingerprint
from fxckpt.passes.kernels import KernelGraph, is_reduction
from fxckpt.passes.normalize import normalize
from fxckpt.passes.price_search import Candidate, Found
from fxckpt.passes.schedule import Decisions, emit
from fxckpt.passes.simulate import simulate
from fxckpt.passes.step import Step, step_of
from fxckpt.pipeline import Planner, device_of, infeasible
from fxckpt.plan import Plan
from fxckpt.torch_private.inductor import fuses, lower, stock_saved

log = logging.getLogger("fxckpt")
Halves = tuple[fx.GraphModule, fx.GraphModule, Plan]


def lower_half(half: fx.GraphModule, is_backward: bool) -> Any:
    """Ask Inductor."""
    return lower(half, is_backward=is_backward)


@dataclass(frozen=True)
class FusedPlanner:
    """Plans as ``planner`` says, for halves that Inductor compiles."""

    planner: Planner
    lower: Lower = lower_half
    attempts: int = 4
    """How often a plan is made anew because the compiled peak is over the budget."""

    def partition(self, joint: fx.GraphModule, *, num_fwd_outputs: int, **given: Any) -> Halves:
        """Turn a joint graph into forward, backward and the plan they follow. ``joint`` is used up; raises :class:`BudgetInfeasible`."""
        planner = self.planner
        if planner.is_fixed:
            return planner.partition(joint, num_fwd_outputs=num_fwd_outputs)
        normalize(joint)
        stored = stock_saved(joint, num_fwd_outputs=num_fwd_outputs, **given)
        kernels = KernelGraph(fuses)(joint.graph, stored)
        facts, cost = planner.read(joint, num_fwd_outputs, bind_preferences=planner.budget is None, never_stored=kernels, has_scratch=_is_library_call)
        return _Fit(self, joint, facts, cost, stored, num_fwd_outputs).run()


def _is_library_call(node: fx.Node) -> bool:
    return not fuses(node) and not is_reduction(node)


class _Fit:
    """One joint graph on its way to two halves."""

    def __init__(
        self, options: FusedPlanner, joint: fx.GraphModule, facts: Facts, cost: str, stored: frozenset[str], num_fwd_outputs: int
    ) -> None:
        self.planner, self.lower, self.attempts = options.planner, options.lower, options.attempts
        self.joint, self.facts, self.cost, self.num_fwd_outputs = joint, facts, cost, num_fwd_outputs
        self.step = step_of(joint.graph, facts)
        self.stock = stock_candidate(self.step, stored) if options.planner.policy is None else None
        self.lines = fingerprint(joint.graph)

    def run(self) -> Halves:
        budget, device = self.planner.budget, device_of(self.joint.graph)
        found = self.search(lambda peak: budgets.resolve(budget, baseline_peak_bytes=peak, device=device))
        if found.limit is None:
            return self.emit(self.describe(found, self.stock or found.best or found.baseline, None))
        limit = found.limit
        aim, lowest = limit, None
        for _ in range(self.attempts):
            chosen = self.choose(found, aim)
            plan = self.describe(found, chosen, limit)
            halves = self.emit(plan, keep_joint=True)
            compiled = self.judge(halves)
            log.debug("aimed at %d bytes, planned %d, compiled %d", aim, chosen.simulation.peak_bytes, compiled.peak_bytes)
            if compiled.peak_bytes <= limit:
                return (*halves[:2], replace(halves[2], compiled_peak_bytes=compiled.peak_bytes))
            lowest = min(lowest or compiled.peak_bytes, compiled.peak_bytes)
            if chosen is found.floor:
                break
            # As much less as the model was wrong, and a little more.
            aim = min(aim, chosen.simulation.peak_bytes) - int(1.1 * (compiled.peak_bytes - limit))
            found = self.search(lambda peak: aim)
        raise infeasible(budget, limit, lowest or found.floor.simulation.peak_bytes, found.baseline.simulation.peak_bytes)

    def search(self, limit: Any) -> Found:
        return self.planner.search(self.facts.program, limit)

    def choose(self, found: Found, aim: int) -> Candidate:
        """Return torch's own choice where it fits, else the best that was found, else the floor: what the compiler makes of it may yet fit."""
        if self.stock is not None and self.stock.simulation.peak_bytes <= aim:
            return self.stock
        return found.best or found.floor

    def describe(self, found: Found, chosen: Candidate, limit: int | None) -> Plan:
        plan = describe(self.step, found, chosen, budget_bytes=limit, cost=self.cost)
        fused = tuple(n.name for n in self.joint.graph.nodes if n in self.facts.views and n in self.facts.never_stored)
        return replace(plan, graph=self.lines, never_stored=fused)

    def emit(self, plan: Plan, *, keep_joint: bool = False) -> Halves:
        """Return the halves that follow ``plan``; the joint graph is used up, unless it is to be kept."""
        joint, facts = self.joint, self.facts
        if keep_joint:
            joint = fx.GraphModule(self.joint, copy.deepcopy(self.joint.graph))
            facts = facts.moved_to(joint.graph)
        return (*self.planner.emit(joint, facts, plan, num_fwd_outputs=self.num_fwd_outputs), plan)

    def judge(self, halves: Halves) -> CompiledStep:
        forward, backward, _ = halves
        return compiled_step(forward, backward, self.facts, self.lower, num_fwd_outputs=self.num_fwd_outputs)


def stock_candidate(step: Step, stored: frozenset[str]) -> Candidate | None:
    """Return the schedule that saves what torch's own partitioner saves and runs the rest again just in time; None if that may not be saved."""
    program = step.program
    saved = frozenset(s for name in stored if name in step.by_name for s in step.by_name[name].storages)
    again = frozenset(i for i, op in enumerate(program.ops) if op.pinned is None)
    schedule = emit(program, Decisions((0,), (saved,), (again,)))
    if not program.tables.is_savable[list(schedule.saved)].all():
        return None
    return Candidate(schedule, simulate(program, schedule))
