"""Planning for a compiler that fuses: the model proposes, the compiler's own lowering disposes.

The search works on the kernel graph (:mod:`~fxckpt.passes.kernels`), a model. What comes out is lowered (:mod:`~fxckpt.lowering`) before it is
taken: a plan whose compiled peak is over the budget is planned again within less, as much less as the model was wrong. The choice of torch's own
partitioner is always a candidate, so that without a budget nothing gets worse.
"""

from __future__ import annotations

import copy
import logging
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from torch import fx

from fxckpt import budget as budgets
from fxckpt.lowering import Lower, compiled_backward, compiled_forward
from fxckpt.passes.describe import describe
from fxckpt.passes.facts import Facts
from fxckpt.passes.fingerprint import fingerprint
from fxckpt.passes.kernels import KernelGraph, is_reduction
from fxckpt.passes.normalize import normalize
from fxckpt.passes.order import ORDER, mark_order
from fxckpt.passes.price_search import Candidate, Found
from fxckpt.passes.program import Program
from fxckpt.passes.schedule import Decisions, Schedule, emit
from fxckpt.passes.simulate import simulate
from fxckpt.passes.step import Step, step_of
from fxckpt.pipeline import Planner, device_of, infeasible, warn_of_unbounded_sizes
from fxckpt.plan import Plan
from fxckpt.plan_log import log_plan
from fxckpt.torch_private.inductor import KeepOrder, fuses, stock_saved
from fxckpt.torch_private.lowerings import Lowerings

log = logging.getLogger("fxckpt")
Halves = tuple[fx.GraphModule, fx.GraphModule, Plan]


@dataclass(frozen=True)
class FusedPlanner:
    """Plans as ``planner`` says, for halves that Inductor compiles."""

    planner: Planner
    lower: Lower = field(default_factory=lambda: Lowerings(KeepOrder(ORDER)).lower)
    attempts: int = 3
    """How often a plan is made for less than the budget because the compiled peak of the one before is over it."""
    slack: float = 0.07
    """Share of the budget that may be left over before a faster plan is looked for,"""
    worthwhile: float = 0.01
    """if that may save this share of the step."""
    far: float = 0.75
    """A backward is lowered first up to where the model sees it above this share of the budget for the last time,"""
    early: float = 0.5
    """if that is within this share of its ops: where it is over the budget there, the rest need not be lowered."""
    margin: float = 0.004
    """Share of the budget that a first plan leaves over."""
    last_resorts: tuple[float, ...] = (1.0, 1.1, 1.25, 1.5)
    """Multiples of the model's least peak whose plans are tried in the end."""

    def partition(self, joint: fx.GraphModule, *, num_fwd_outputs: int, **given: Any) -> Halves:
        """Turn a joint graph into forward, backward and the plan they follow. ``joint`` is normalized; raises :class:`BudgetInfeasible`."""
        planner = self.planner
        begin = time.perf_counter()
        normalize(joint)
        lines = fingerprint(joint.graph)
        if planner.is_fixed or any(plan.graph == lines for plan in planner.known):
            facts, plan = planner.plan(joint, num_fwd_outputs=num_fwd_outputs)
            forward, backward = planner.emit(joint, facts, plan, num_fwd_outputs=num_fwd_outputs)
            mark_order(backward)
            return forward, backward, plan
        if planner.budget is not None:
            warn_of_unbounded_sizes(joint.graph, planner.budget)
        stored = stock_saved(joint, num_fwd_outputs=num_fwd_outputs, **given)
        kernels = KernelGraph(fuses)(joint.graph, stored)
        facts, cost = planner.read(
            joint, num_fwd_outputs, bind_preferences=planner.budget is None, never_stored=kernels, has_scratch=_is_library_call
        )
        halves = _Fit(self, joint, lines, facts, cost, stored, num_fwd_outputs).run()
        log_plan(halves[2], time.perf_counter() - begin)
        return halves


def _is_library_call(node: fx.Node) -> bool:
    return not fuses(node) and not is_reduction(node)


class _Fit:
    """One joint graph on its way to two halves."""

    def __init__(
        self,
        options: FusedPlanner,
        joint: fx.GraphModule,
        lines: tuple[str, ...],
        facts: Facts,
        cost: str,
        stored: frozenset[str],
        num_fwd_outputs: int,
    ) -> None:
        self.planner, self.options = options.planner, options
        self.wrong_by = 0
        self.joint, self.lines, self.facts, self.cost, self.num_fwd_outputs = joint, lines, facts, cost, num_fwd_outputs
        self.step = step_of(joint.graph, facts)
        self.stock = stock_candidate(self.step, stored) if options.planner.policy is None else None

    def run(self) -> Halves:
        budget, device = self.planner.budget, device_of(self.joint.graph)
        limit: int | None = None

        def aim(peak: int) -> int | None:
            nonlocal limit
            limit = budgets.resolve(budget, baseline_peak_bytes=peak, device=device)
            return None if limit is None else int((1 - self.options.margin) * limit)

        found = self.planner.search(self.facts.program, aim)
        if limit is None:
            chosen = self.stock or found.best or found.baseline
            return self.lowered(found, chosen, None)[0]
        least: int | None = None
        for chosen, is_last_resort in self.candidates(found, limit):
            halves, compiled = self.lowered(found, chosen, limit)
            if compiled <= limit:
                return halves if chosen is self.stock else self.with_more(found, chosen, halves, limit)
            self.wrong_by = compiled - limit
            if is_last_resort:
                least = min(least or compiled, compiled)
        raise infeasible(budget, limit, least or found.floor.simulation.peak_bytes, found.baseline.simulation.peak_bytes)

    def lowered(self, found: Found, chosen: Candidate, limit: int | None) -> tuple[Halves, int]:
        """Return the halves of a candidate, with the peak of what the compiler makes of them."""
        halves = self.emit(self.describe(found, chosen, limit))
        compiled = self.judge(halves, chosen, limit)
        log.debug("planned %d bytes, compiled %d, budget %s", chosen.simulation.peak_bytes, compiled, limit)
        return (*halves[:2], replace(halves[2], compiled_peak_bytes=compiled)), compiled

    def with_more(self, found: Found, chosen: Candidate, halves: Halves, limit: int) -> Halves:
        """Return what fits, or what is faster and fits too where the model took the peak for much higher than it is."""
        compiled, spent = halves[2].compiled_peak_bytes or limit, chosen.simulation.extra_seconds
        if limit - compiled <= self.options.slack * limit or spent <= self.options.worthwhile * self.facts.program.step_seconds:
            return halves
        more = self.search(2 * limit - compiled)
        if more.best is None or more.best.simulation.extra_seconds > spent - self.options.worthwhile * self.facts.program.step_seconds:
            return halves
        faster, compiled = self.lowered(more, more.best, limit)
        return faster if compiled <= limit else halves

    def candidates(self, found: Found, limit: int) -> Iterator[tuple[Candidate, bool]]:
        """Yield what may fit, the fastest first; after each, :attr:`wrong_by` says by how much it did not.

        The last resorts do not depend on the budget, so that the least peak that an error names can be had by asking for it.
        """
        if self.stock is not None and self.stock.simulation.peak_bytes <= limit:
            yield self.stock, False
        aim = found.limit or limit
        seen: set[Schedule] = set()
        for _ in range(self.options.attempts):
            best = found.best
            if best is None or best.schedule in seen:
                break
            seen.add(best.schedule)
            yield best, False
            # As much less as the model was wrong, and a little more.
            aim = min(aim, best.simulation.peak_bytes) - int(1.1 * self.wrong_by)
            found = self.search(aim)
        for factor in self.options.last_resorts:
            least = found.floor if factor == 1.0 else self.search(int(factor * found.floor.simulation.peak_bytes)).best
            if least is not None:
                yield least, True

    def search(self, limit: int) -> Found:
        return self.planner.search(self.facts.program, lambda peak: limit)

    def describe(self, found: Found, chosen: Candidate, limit: int | None) -> Plan:
        plan = describe(self.step, found, chosen, budget_bytes=limit, cost=self.cost)
        fused = tuple(n.name for n in self.joint.graph.nodes if n in self.facts.never_stored)
        return replace(plan, graph=self.lines, never_stored=fused)

    def emit(self, plan: Plan) -> Halves:
        """Return the halves that follow ``plan``. The joint graph is left alone: the next candidate may need it."""
        joint = fx.GraphModule(self.joint, copy.deepcopy(self.joint.graph))
        facts = self.facts.moved_to(joint.graph)
        forward, backward = self.planner.emit(joint, facts, plan, num_fwd_outputs=self.num_fwd_outputs)
        mark_order(backward)
        return forward, backward, plan

    def judge(self, halves: Halves, chosen: Candidate, limit: int | None) -> int:
        """Return the peak of what the compiler makes of the halves, or a part of it that is over the limit.

        What comes to be compiled is not lowered twice, so that only the lowering of what is refused takes time.
        """
        forward, backward, _ = halves
        facts, lower, count = self.facts, self.options.lower, self.num_fwd_outputs
        if limit is not None and (until := self.early_end(chosen, limit)) is not None:
            part = int(compiled_backward(forward, backward, facts, lower, num_fwd_outputs=count, until=until).max())
            if part > limit:
                return part
        peak = int(compiled_backward(forward, backward, facts, lower, num_fwd_outputs=count).max())
        if limit is not None and peak > limit:
            return peak
        return max(peak, int(compiled_forward(forward, facts, lower).max()))

    def early_end(self, chosen: Candidate, limit: int) -> str | None:
        """Return the backward's own op up to which a candidate comes near the limit; None if that is late."""
        program, options = self.facts.program, self.options
        own_op = last_above(program, chosen, int(options.far * limit))
        return program.backward[own_op].name if own_op < options.early * len(program.backward) else None


def last_above(program: Program, chosen: Candidate, nbytes: int) -> int:
    """Return the backward's own op that runs when the live bytes of a candidate are above ``nbytes`` for the last time, or next."""
    backward = chosen.simulation.live[chosen.simulation.forward_ops :]
    above, own_ops = np.flatnonzero(backward > nbytes), np.arange(len(program.backward))
    place = own_ops + np.searchsorted(np.asarray(chosen.schedule.before, dtype=np.int64), own_ops, side="right")
    return int(np.searchsorted(place, above[-1] if len(above) else 0))


def stock_candidate(step: Step, stored: frozenset[str]) -> Candidate | None:
    """Return the schedule that saves what torch's own partitioner saves and runs the rest again just in time; None if that may not be saved."""
    program = step.program
    saved = frozenset(s for name in stored if name in step.by_name for s in step.by_name[name].storages)
    again = frozenset(i for i, op in enumerate(program.ops) if op.pinned is None)
    schedule = emit(program, Decisions((0,), (saved,), (again,)))
    if not program.tables.is_savable[list(schedule.saved)].all():
        return None
    return Candidate(schedule, simulate(program, schedule))
