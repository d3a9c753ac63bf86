"""Planning for a compiler that fuses: the model proposes, the compiler's own lowering disposes.

The search works on the kernel graph (:mod:`~fxckpt.passes.inductor.fusion_model`), a model. What comes out is lowered (:mod:`~fxckpt.inductor.memory`) before it is
taken: a plan whose compiled peak is over the budget is planned again within less, as much less as the model was wrong. The choice of torch's own
partitioner is always a candidate, so that without a budget nothing gets worse.
"""

from __future__ import annotations

import copy
import itertools
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torch import fx

from fxckpt import budget as budgets
from fxckpt.inductor.autotune import CompileHalf, step_seconds, unsafe_op
from fxckpt.inductor.memory import (
    Lower,
    at_best,
    backward_bytes,
    forward_bytes,
    learned,
    lower_backward,
)
from fxckpt.inductor.plan_cache import PlanCache, key_of
from fxckpt.passes.analysis.fingerprint import fingerprint
from fxckpt.passes.analysis.graph_snapshot import snapshot_of
from fxckpt.passes.analysis.joint import Facts, Workspace
from fxckpt.passes.graphs import Joint
from fxckpt.passes.inductor.fusion_model import KernelGraph, is_extern_kernel
from fxckpt.passes.meta import ORDER
from fxckpt.planner.build_plan import build_plan
from fxckpt.planner.pipeline import EMIT_INDUCTOR, PREPARE_INDUCTOR, Emission, emit_halves, prepare
from fxckpt.planner.planner import Planner, device_of, infeasible, warn_of_unbounded_sizes
from fxckpt.plans.log import log_plan
from fxckpt.plans.snapshot import GraphSnapshot
from fxckpt.plans.types import Plan
from fxckpt.solver.schedule import Schedule, StageAssignment, emit
from fxckpt.solver.search import Candidate, SearchResult
from fxckpt.solver.simulate import simulate
from fxckpt.torch_private.inductor.default_partitioner import default_saved, fuses
from fxckpt.torch_private.inductor.execution_order import KeepExecutionOrder
from fxckpt.torch_private.inductor.layouts import changes_layout, channels_last, is_convolution
from fxckpt.torch_private.inductor.lowering import Lowerings, free_early

log = logging.getLogger("fxckpt")
Halves = tuple[fx.GraphModule, fx.GraphModule, Plan]


@dataclass(frozen=True)
class InductorPlanner:
    """Plans as ``planner`` says, for halves that Inductor compiles."""

    planner: Planner
    lower: Lower = field(default_factory=lambda: Lowerings(KeepExecutionOrder(ORDER)).lower)
    store: PlanCache | None = None
    """Where plans are kept for the next process,"""
    code: str = ""
    """by this version of what plans."""
    compile_half: CompileHalf | None = None
    """Compiles a half for it to be timed; without, the model's word is taken for what is fastest."""
    clock: Callable[[], float] = time.perf_counter
    tie: float = 0.01
    """Times that differ by less than this share are equal."""
    attempts: int = 3
    """How often a plan is made for less than the budget because the compiled peak of the one before is over it."""
    retries: int = 2
    """How often a faster plan is looked for where more than"""
    slack: float = 0.03
    """this share of the budget is left over, and more than"""
    worthwhile: float = 0.02
    """this share of the step may be saved; or where a plan that was a little over the budget is faster by more than"""
    dear: float = 0.2
    """this share of the step: near the least peak every byte is dear."""
    margin: float = 0.001
    """Share of the budget that a first plan leaves over."""
    last_resorts: tuple[float, ...] = (1.03, 1.1, 1.25, 1.5)
    """Multiples of the model's least peak whose plans are tried in the end, after that of the least peak."""

    def partition(self, joint: fx.GraphModule, *, num_fwd_outputs: int, **given: Any) -> Halves:
        """Turn a joint graph into forward, backward and the plan they follow. ``joint`` is normalized; raises :class:`BudgetInfeasible`."""
        planner = self.planner
        begin = time.perf_counter()
        prepare(Joint(joint, num_fwd_outputs), PREPARE_INDUCTOR)
        # What the trace unpacked its arguments by is not needed here, and torch warns when it is copied.
        joint.graph.set_codegen(fx.graph.CodeGen())
        lines = fingerprint(joint.graph)
        key = None if self.store is None else key_of(joint, planner, self.code, given)
        kept = self.store.get(key) if self.store is not None and key is not None else None
        if kept is not None and kept.graph == lines:
            planner = replace(planner, known=(kept,))
        if planner.is_fixed or any(plan.graph == lines for plan in planner.known):
            facts, plan = planner.plan(joint, num_fwd_outputs=num_fwd_outputs)
            plan = replace(plan, step=snapshot_of(joint.graph, facts))
            return emitted(planner, joint, facts, plan, num_fwd_outputs)
        if planner.budget is not None:
            warn_of_unbounded_sizes(joint.graph, planner.budget)
        stored = default_saved(joint, num_fwd_outputs=num_fwd_outputs, **given)
        kernels = KernelGraph(fuses)(joint.graph, stored)
        workspace = planner.measured()
        facts, cost = planner.read(
            joint,
            num_fwd_outputs,
            bind_preferences=planner.budget is None,
            never_stored=kernels,
            workspace=_as_run(joint, workspace),
        )
        halves = _Fit(self, joint, lines, facts, cost, workspace, stored, num_fwd_outputs).run()
        if self.store is not None and key is not None:
            self.store.keep(key, halves[2])
        log_plan(halves[2], time.perf_counter() - begin)
        return halves


def _as_run(joint: fx.GraphModule, workspace: Workspace) -> Workspace:
    """Return the workspace of ops as Inductor is expected to run them: a loop has none, a convolution is likely laid out anew."""
    is_relaid = changes_layout(joint)

    def of(node: fx.Node) -> int:
        if not is_extern_kernel(node):
            return 0
        return workspace(channels_last(node) if is_relaid and is_convolution(node) else node)

    return of


def emitted(
    planner: Planner, joint: fx.GraphModule, facts: Facts, plan: Plan, num_fwd_outputs: int
) -> Halves:
    """Return the halves that follow a plan; the joint graph is left alone."""
    # A graph remembers the names it once had, and a copy does not: in every process new nodes get the same names, by which caches know them.
    joint = fx.GraphModule(joint, copy.deepcopy(joint.graph))
    facts = facts.moved_to(joint.graph)
    emission = Emission(Joint(joint, num_fwd_outputs), facts, plan, exact=planner.exact)
    return (*emit_halves(emission, EMIT_INDUCTOR), plan)


class _Fit:
    """One joint graph on its way to two halves."""

    def __init__(
        self,
        options: InductorPlanner,
        joint: fx.GraphModule,
        lines: tuple[str, ...],
        facts: Facts,
        cost: str,
        workspace: Workspace,
        stored: frozenset[str],
        num_fwd_outputs: int,
    ) -> None:
        self.planner, self.options = options.planner, options
        self.workspace = workspace
        self.wrong_by = 0
        self.least: int | None = None
        self.doubt = 0.0
        self.judged: set[Schedule] = set()
        self.program = facts.program
        """What plans are searched on: with what the last plan that was judged turned out to write over."""
        self.joint, self.lines, self.facts, self.cost, self.num_fwd_outputs = (
            joint,
            lines,
            facts,
            cost,
            num_fwd_outputs,
        )
        self.step = snapshot_of(joint.graph, facts)
        self.stock = (
            default_candidate(self.step, stored) if options.planner.policy is None else None
        )

    def run(self) -> Halves:
        """Return the halves of the plan that is expected to be fastest within the budget, or was timed to be."""
        budget, device = self.planner.budget, device_of(self.joint.graph)
        limit: int | None = None

        def aim(peak: int) -> int | None:
            nonlocal limit
            limit = budgets.resolve(budget, baseline_peak_bytes=peak, device=device)
            return None if limit is None else int((1 - self.options.margin) * limit)

        found = self.planner.search(self.facts.program, aim)
        first = self.first(found, limit)
        return (
            self.fastest([first, *self.others(found, first, limit)])
            if self.options.compile_half is not None
            else first
        )

    def first(self, found: SearchResult, limit: int | None) -> Halves:
        """Return the halves of the first candidate that fits. Raises :class:`BudgetInfeasible`."""
        if limit is None:
            return self.lowered(found, self.stock or found.best or found.baseline, None)[0]
        refused: tuple[Schedule, int] | None = None
        for chosen, is_last_resort in self.candidates(found, limit):
            # Of a last resort, and of torch's own choice, the whole is looked at, as its peak may come to be named as the least.
            halves, compiled = self.lowered(found, chosen, limit, is_whole=is_last_resort)
            if compiled <= limit:
                return (
                    halves
                    if chosen is self.stock
                    else self.with_more(chosen, halves, limit, refused)
                )
            self.wrong_by = compiled - limit
            self.doubt = max(self.doubt, abs(compiled / max(1, self.planned(chosen.schedule)) - 1))
            if is_last_resort:
                self.least = min(self.least or compiled, compiled)
            else:
                refused = chosen.schedule, compiled
        floor, baseline = found.floor.simulation.peak_bytes, found.baseline.simulation.peak_bytes
        least = self.least or floor
        raise infeasible(self.planner.budget, limit, least, max(least, baseline))

    def others(self, found: SearchResult, first: Halves, limit: int | None) -> Iterator[Halves]:
        """Yield other plans that fit: torch's own choice, the model's fastest at as much memory as the first plan takes, and at less."""
        peak = first[2].compiled_peak_bytes or first[2].peak_bytes
        at_less = (self.search(int((1 - less) * peak)) for less in (0.0, self.options.slack))
        seen = {first[2].digest}
        for search, chosen in itertools.chain(
            [(found, self.stock)], ((search, search.best) for search in at_less)
        ):
            if (
                chosen is not None
                and (digest := self.plan_of(search, chosen, limit).digest) not in seen
            ):
                seen.add(digest)
                halves, compiled = self.lowered(search, chosen, limit)
                if limit is None or compiled <= limit:
                    yield halves

    def fastest(self, finalists: Sequence[Halves]) -> Halves:
        """Compile the finalists, run them on made-up values and return the one that takes least time, of equals the one that takes least memory."""
        compile_half, device = self.options.compile_half, device_of(self.joint.graph)
        if compile_half is None or len(finalists) == 1:
            return finalists[0]
        if (op := unsafe_op(finalists[0][:2])) is not None:
            log.warning(
                "plans are not timed, as %s is not torch's own, or talks to others: the one expected to be fastest is taken.",
                op,
            )
            return finalists[0]
        try:
            seconds = step_seconds(
                [halves[:2] for halves in finalists], compile_half, device, self.options.clock
            )
        except (
            Exception
        ) as error:  # what a step raises on values that are not its own may be anything
            log.warning(
                "plans cannot be timed, as the step does not run on made-up values (%s: %s): the one expected to be fastest is taken.",
                type(error).__name__,
                error,
            )
            return finalists[0]
        for halves, took in zip(finalists, seconds, strict=True):
            log.info(
                "plan %s takes %.2f ms a step, its peak is %s bytes",
                halves[2].digest,
                1e3 * took,
                halves[2].compiled_peak_bytes,
            )
        fast = [
            halves
            for halves, took in zip(finalists, seconds, strict=True)
            if took <= (1 + self.options.tie) * min(seconds)
        ]
        return min(fast, key=lambda halves: halves[2].compiled_peak_bytes or 0)

    def lowered(
        self, found: SearchResult, chosen: Candidate, limit: int | None, *, is_whole: bool = False
    ) -> tuple[Halves, int]:
        """Return the halves of a candidate, with the peak of what the compiler makes of them, or unless ``is_whole`` a part of it over the limit."""
        self.judged.add(chosen.schedule)
        forward, backward, plan = emitted(
            self.planner,
            self.joint,
            self.facts,
            self.plan_of(found, chosen, limit),
            self.num_fwd_outputs,
        )
        compiled, lets_go = self.judge(
            forward, backward, limit, is_whole=is_whole, may_let_go=plan.keeps_order
        )
        if lets_go:
            free_early(backward)
        log.debug(
            "planned %d bytes, compiled %d, budget %s",
            chosen.simulation.peak_bytes,
            compiled,
            limit,
        )
        return (
            forward,
            backward,
            replace(plan, compiled_peak_bytes=compiled, lets_go=lets_go),
        ), compiled

    def with_more(
        self, chosen: Candidate, halves: Halves, limit: int, refused: tuple[Schedule, int] | None
    ) -> Halves:
        """Return what fits, or what is faster and fits too where much of the budget is left over.

        ``refused`` is a plan that was over the budget, and its compiled bytes: what lies between is expected in between.
        """
        options, gain = self.options, self.options.worthwhile * self.facts.program.step_seconds
        share = 1 - options.margin
        for _ in range(options.retries):
            planned, compiled = (
                self.planned(chosen.schedule),
                halves[2].compiled_peak_bytes or limit,
            )
            left, spent = limit - compiled, chosen.simulation.extra_seconds
            over = spent if refused is None else simulate(self.program, refused[0]).extra_seconds
            is_dear = spent - over > options.dear * self.facts.program.step_seconds
            if spent <= gain or (left <= options.slack * limit and not is_dear):
                break
            rate = (
                1.0
                if refused is None
                else (self.planned(refused[0]) - planned) / (refused[1] - compiled)
            )
            more = self.search(planned + int(max(rate, 0.0) * share * left))
            new = [
                c
                for c in (self.stock, more.best)
                if c is not None and c.schedule not in self.judged
            ]
            found = [c for c in new if self.planned(c.schedule) <= (more.limit or limit)]
            better = min(found, key=lambda c: c.simulation.extra_seconds, default=None)
            if better is None or better.simulation.extra_seconds > spent - gain:
                break
            faster, compiled = self.lowered(more, better, limit)
            if compiled <= limit:
                chosen, halves = better, faster
            else:
                refused, share = (better.schedule, compiled), share / 2
        return halves

    def candidates(self, found: SearchResult, limit: int) -> Iterator[tuple[Candidate, bool]]:
        """Yield what may fit, the fastest first; after each, :attr:`wrong_by` says by how much it did not, :attr:`doubt` by what share the
        model was wrong at most.

        The last resorts do not depend on the budget, so that the least peak that an error names can be had by asking for it.
        """
        aim, floor = found.limit or limit, found.floor
        # Of what is written over the model only learns from what is lowered.
        is_early = self.stock is not None and self._least_peak(self.stock) <= limit
        if self.stock is not None and is_early:
            yield self.stock, True
            if self.program is not self.facts.program:
                found = self.search(aim)
        seen: set[Schedule] = set()
        for _ in range(self.options.attempts):
            best = found.best
            if best is None or best.schedule in seen:
                break
            seen.add(best.schedule)
            yield best, False
            # As much less as the model was wrong, and a little more.
            aim = min(aim, self.planned(best.schedule)) - int(1.1 * self.wrong_by)
            found = self.search(aim)
        self.doubt, taken = 0.0, None
        for least in self.last_resorts(floor):
            # What is planned to take more than another was compiled to takes less only where the model is as wrong, here that way and there this way.
            if taken is None or self.planned(least.schedule) <= (1 + 2 * self.doubt) * taken:
                yield least, True
                compiled = limit + self.wrong_by
                taken = compiled if taken is None else min(taken, compiled)
        if self.stock is not None and not is_early:
            yield self.stock, True

    def last_resorts(self, floor: Candidate) -> Iterator[Candidate]:
        """Yield plans of the least peak, by the model as it is, by what it learns from that, and of a little more."""
        self.program = self.facts.program
        yield floor
        learned = self.program
        if (
            learned is not self.facts.program
            and (better := self.search(self.planned(floor.schedule)).floor).schedule
            != floor.schedule
        ):
            floor = better
            yield floor
        for factor in self.options.last_resorts:
            self.program = learned
            if (least := self.search(int(factor * self.planned(floor.schedule))).best) is not None:
                yield least

    def search(self, limit: int) -> SearchResult:
        return self.planner.search(self.program, lambda peak: limit)

    def planned(self, schedule: Schedule) -> int:
        """Return the peak of a schedule by what is known by now."""
        return simulate(self.program, schedule).peak_bytes

    def _least_peak(self, chosen: Candidate) -> int:
        """Return what a candidate takes if the compiler does its best."""
        return simulate(
            at_best(self.facts, is_extern_kernel, self.workspace), chosen.schedule
        ).peak_bytes

    def plan_of(self, found: SearchResult, chosen: Candidate, limit: int | None) -> Plan:
        plan = build_plan(self.step, found, chosen, budget_bytes=limit, cost=self.cost)
        fused = tuple(n.name for n in self.joint.graph.nodes if n in self.facts.never_stored)
        # Held to our order, torch's own choice might take more than torch makes of it.
        return replace(
            plan, graph=self.lines, never_stored=fused, keeps_order=chosen is not self.stock
        )

    def judge(
        self,
        forward: fx.GraphModule,
        backward: fx.GraphModule,
        limit: int | None,
        *,
        is_whole: bool,
        may_let_go: bool,
    ) -> tuple[int, bool]:
        """Return the peak of what the compiler makes of the halves, or unless ``is_whole`` a part of it that is over the limit; and whether
        the backward lets go of memory for that, as it is over the limit otherwise.

        What comes to be compiled is not lowered twice, so that only the lowering of what is refused takes time.
        """
        facts, lower = self.facts, self.options.lower
        # The backward knows what the forward leaves, and is the likelier to be over: it is lowered first wherever that may be known without.
        lowered = lower(forward, None, {}) if changes_layout(forward) else None
        num, of = self.num_fwd_outputs, (forward, backward, facts, self.workspace)
        lowered_backward = lower_backward(
            forward, backward, lower, num_fwd_outputs=num, lowered_forward=lowered
        )
        self.program = learned(facts, lowered_backward, backward, self.workspace)

        def backward_peak() -> tuple[int, bool]:
            ways = lowered_backward, lowered_backward.letting_go or lowered_backward
            keeping, letting_go = (
                int(backward_bytes(way, *of, num_fwd_outputs=num, lowered_forward=lowered).max())
                for way in ways
            )
            lets_go = may_let_go and limit is not None and letting_go < keeping > limit
            return letting_go if lets_go else keeping, lets_go

        peak, lets_go = backward_peak()
        if limit is not None and peak > limit and not is_whole:
            return peak, lets_go
        if lowered is None:
            # Only now is it known which of what is saved lies in one buffer.
            lowered = lower(forward, None, {})
            peak, lets_go = backward_peak()
        return max(peak, int(forward_bytes(lowered, forward, facts, self.workspace).max())), lets_go


def default_candidate(step: GraphSnapshot, stored: frozenset[str]) -> Candidate | None:
    """Return the schedule that saves what torch's own partitioner saves and runs the rest again just in time; None if that may not be saved."""
    program = step.program
    saved = frozenset(
        s for name in stored if name in step.by_name for s in step.by_name[name].storages
    )
    again = frozenset(i for i, op in enumerate(program.ops) if op.no_recompute is None)
    schedule = emit(program, StageAssignment((0,), (saved,), (again,)))
    if not program.tables.is_savable[list(schedule.saved)].all():
        return None
    return Candidate(schedule, simulate(program, schedule))
