"""Planning for Inductor, a compiler that fuses: a model proposes, Inductor's lowering decides.

The search runs on a model of the kernels that Inductor will make
(:mod:`~fxckpt.passes.inductor.fusion_model`). Its plans are lowered before one is taken
(:mod:`~fxckpt.inductor.memory`): if the compiled peak is over the budget, the search is repeated
for less, by as much as the model was wrong. The choice of torch's default partitioner is always a
candidate, so that without a budget nothing gets worse.
"""

from __future__ import annotations

import copy
import itertools
import logging
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import fx

from fxckpt import budgets
from fxckpt.inductor.autotune import CompileHalf, step_seconds, unsafe_op
from fxckpt.inductor.memory import (
    Lower,
    backward_bytes,
    forward_bytes,
    lower_backward,
    optimistic_program,
    with_lowered_workspace,
)
from fxckpt.inductor.plan_cache import PlanCache, key_of
from fxckpt.passes.analysis.graph_snapshot import snapshot_of
from fxckpt.passes.analysis.joint import Facts, Workspace
from fxckpt.passes.graphs import Joint
from fxckpt.passes.inductor.fusion_model import FusionModel, is_extern_kernel
from fxckpt.passes.meta import ORDER
from fxckpt.planner.build_plan import build_plan
from fxckpt.planner.pipeline import EMIT_INDUCTOR, PREPARE_INDUCTOR, Emission, emit_halves, prepare
from fxckpt.planner.planner import (
    Planner,
    device_of,
    infeasible,
    is_of_graph,
    warn_of_unbounded_sizes,
)
from fxckpt.planner.ranks import Ranks
from fxckpt.plans.log import log_plan
from fxckpt.plans.snapshot import GraphSnapshot
from fxckpt.plans.types import Plan
from fxckpt.solver.cuts.saved_limits import exceeded
from fxckpt.solver.program import Program
from fxckpt.solver.schedule import Schedule, StageAssignment, emit
from fxckpt.solver.search import Candidate, SearchResult
from fxckpt.solver.simulate import simulate
from fxckpt.torch_private.inductor.default_partitioner import default_saved, fuses
from fxckpt.torch_private.inductor.execution_order import KeepExecutionOrder
from fxckpt.torch_private.inductor.layouts import changes_layout, channels_last, is_convolution
from fxckpt.torch_private.inductor.lowering import Lowerings, free_early
from fxckpt.utils.progress import tick

log = logging.getLogger("fxckpt")
Halves = tuple[fx.GraphModule, fx.GraphModule, Plan]
"""Forward, backward, and the plan they follow."""


@dataclass(frozen=True)
class InductorPlanner:
    """Plans joint graphs whose halves Inductor compiles."""

    planner: Planner
    """Budget, policy, cost model and search."""
    lower: Lower = field(default_factory=lambda: Lowerings(KeepExecutionOrder(ORDER)).lower)
    """Lowers a half to its kernels and buffers."""
    store: PlanCache | None = None
    """Cache of plans on disk; None plans in every process."""
    code: str = ""
    """Version of the planning code, part of the cache's key."""
    compile_half: CompileHalf | None = None
    """Compiles a half to be timed; None trusts the cost model about the fastest plan."""
    clock: Callable[[], float] = time.perf_counter
    """Clock that times steps, in seconds."""
    tie: float = 0.01
    """Largest relative difference between step times that count as equal."""
    attempts: int = 3
    """Most plans lowered for less and less memory, before those near the least peak."""
    retries: int = 2
    """Most searches for a faster plan once one fits."""
    slack: float = 0.03
    """Share of the budget that may be left over without a search for a faster plan."""
    worthwhile: float = 0.02
    """Least share of the step's time that a faster plan must save."""
    scarce: float = 0.2
    """Share of the step's time by which a plan over the budget must be faster than the one that
    fits, so that every byte counts and a faster plan is sought within the slack too."""
    margin: float = 0.001
    """Share of the budget that the first plan leaves over."""
    last_resorts: tuple[float, ...] = (1.03, 1.1, 1.25, 1.5)
    """Multiples of the model's least peak at which the last plans are searched."""

    def partition(self, joint: Joint, **given: Any) -> Halves:
        """Return the forward and the backward of a joint graph, and the plan they follow.

        ``joint`` is rewritten in place; ``given`` goes to torch's default partitioner. Raises
        :class:`~fxckpt.errors.BudgetInfeasible`.
        """
        planner = self.planner
        begin = time.perf_counter()
        prepare(joint, PREPARE_INDUCTOR)
        module = joint.module
        # The code that unpacks traced arguments is unused here, and torch warns when it is copied.
        module.graph.set_codegen(fx.graph.CodeGen())
        lines = planner.lines(module.graph)
        # Lines of regions tell apart what the graph does not.
        code = "\n".join((self.code, *(r.line for r in planner.regions(module.graph))))
        key = None if self.store is None else key_of(module, planner, code, given)
        kept = self.store.get(key) if self.store is not None and key is not None else None
        if kept is not None and kept.graph == lines:
            planner = replace(planner, known=(kept,))
        if planner.is_fixed or any(is_of_graph(plan, lines) for plan in planner.known):
            return self._applied(planner, joint)
        if planner.ranks is not None and planner.level is None:
            return self._planned_together(planner.ranks, joint, lines, given)
        halves = self._searched(joint, lines, given)
        if self.store is not None and key is not None:
            self.store.keep(key, halves[2])
        log_plan(halves[2], time.perf_counter() - begin)
        return halves

    def _applied(self, planner: Planner, joint: Joint) -> Halves:
        """Return the halves that follow a known plan."""
        facts, plan = planner.plan(joint)
        plan = replace(plan, step=snapshot_of(joint.module.graph, facts))
        return emitted(planner, joint, facts, plan)

    def _planned_together(
        self, ranks: Ranks, joint: Joint, lines: tuple[str, ...], given: Mapping[str, Any]
    ) -> Halves:
        """Return the halves that follow the plan of the first rank.

        A rank whose sizes are others cannot follow it, and has a plan of its own.
        """
        found: list[Halves] = []

        def choose(_: Sequence[None]) -> Plan:
            found.append(self._searched(joint, lines, given))
            return replace(found[0][2], step=None)

        plan = ranks.decide("the plan of a graph", None, choose)
        if found:
            return found[0]
        if is_of_graph(plan, lines):
            return self._applied(replace(self.planner, known=(plan,)), joint)
        return self._searched(joint, lines, given)

    def _searched(self, joint: Joint, lines: tuple[str, ...], given: Mapping[str, Any]) -> Halves:
        """Return the halves of the plan that a search finds."""
        planner, module = self.planner, joint.module
        if planner.budget is not None:
            warn_of_unbounded_sizes(module.graph, planner.budget)
        saved = default_saved(module, num_fwd_outputs=joint.num_fwd_outputs, **given)
        workspace = planner.measured()
        facts, cost = planner.read(
            joint,
            bind_preferences=planner.budget is None and planner.level is None,
            never_stored=FusionModel(fuses)(module.graph, saved),
            workspace=_expected_workspace(module, workspace),
        )
        return _LoweringSearch(self, joint, lines, facts, cost, workspace, saved).run()


def _expected_workspace(joint: fx.GraphModule, workspace: Workspace) -> Workspace:
    """Return the workspace of ops as Inductor is expected to run them.

    A fused kernel has none, and a convolution is likely called channels last.
    """
    is_relaid = changes_layout(joint)

    def of(node: fx.Node) -> int:
        if not is_extern_kernel(node):
            return 0
        return workspace(channels_last(node) if is_relaid and is_convolution(node) else node)

    return of


def emitted(planner: Planner, joint: Joint, facts: Facts, plan: Plan) -> Halves:
    """Return the halves that follow a plan; the joint graph is not modified."""
    # A graph remembers the names it once had, and a copy does not: new nodes get the same names in
    # every process, as the caches of compiled code require.
    module = fx.GraphModule(joint.module, copy.deepcopy(joint.module.graph))
    facts = facts.moved_to(module.graph)
    copied = replace(joint, module=module)
    emission = Emission(copied, facts, plan, exact=planner.exact)
    return (*emit_halves(emission, EMIT_INDUCTOR), plan)


@dataclass(frozen=True)
class Attempt:
    """A candidate schedule after Inductor lowered the halves that follow it."""

    candidate: Candidate
    """Schedule, and its simulation on the program that it was searched on."""
    halves: Halves
    """Forward, backward and plan."""
    program: Program
    """The program, calibrated by this lowering."""
    planned_bytes: int
    """Peak of the schedule on the calibrated program."""
    compiled_bytes: int
    """Peak of the lowered halves, or, over the limit, of the half that was lowered first."""

    @property
    def schedule(self) -> Schedule:
        """Schedule of the candidate."""
        return self.candidate.schedule

    @property
    def model_error(self) -> float:
        """Share by which the model was wrong about the compiled peak."""
        return abs(self.compiled_bytes / max(1, self.planned_bytes) - 1)

    def fits(self, limit: int | None) -> bool:
        """Return whether the compiled peak is within a limit in bytes."""
        return limit is None or self.compiled_bytes <= limit

    def overshoot_bytes(self, limit: int) -> int:
        """Return the bytes by which the compiled peak exceeds a limit."""
        return self.compiled_bytes - limit


@dataclass(frozen=True)
class _Lowering:
    """Peak of two lowered halves, and the facts that their lowering showed."""

    peak_bytes: int
    """Peak of both halves, or, over the limit, of the half that was lowered first."""
    frees_early: bool
    """Whether the backward must free each buffer after its last reader to be within the limit."""
    program: Program
    """The program, calibrated by the lowered backward."""


@dataclass
class _LoweringSearch:
    """Searches one joint graph for the fastest plan whose lowered halves fit the budget."""

    options: InductorPlanner
    joint: Joint
    """The prepared joint graph."""
    lines: tuple[str, ...]
    """Its fingerprint."""
    facts: Facts
    cost: str
    """Name of the cost model."""
    workspace: Workspace
    """Workspace of an op, called as it is."""
    default_saved: frozenset[str]
    """Names of the values that torch's default partitioner saves."""
    history: list[Attempt] = field(default_factory=list)
    """Attempts so far, in order."""

    def __post_init__(self) -> None:
        planner, graph = self.options.planner, self.joint.module.graph
        self.snapshot = snapshot_of(graph, self.facts)
        self.default = (
            default_candidate(self.snapshot, self.default_saved) if planner.policy is None else None
        )
        schedule = None if self.default is None else self.default.schedule
        self.facts = planner.limited(graph, self.facts, schedule)
        self.snapshot = replace(self.snapshot, program=self.facts.program)
        if self.default is not None and exceeded(self.facts.program, self.default.schedule.saved):
            self.default = None

    def run(self) -> Halves:
        """Return the halves of the plan expected, or timed, to be fastest within the budget.

        Raises :class:`BudgetInfeasible`.
        """
        planner, device = self.options.planner, device_of(self.joint.module.graph)
        if planner.level is not None:
            found = planner.level(self.facts.program)
            assert found.best is not None
            return self.attempt(found, found.best, None, is_whole=True).halves
        asked = budgets.parse(planner.budget)
        if isinstance(asked, budgets.LeastMemory):
            return self.least_memory(asked.max_slowdown, device)
        limit: int | None = None

        def aim(peak: int) -> int | None:
            nonlocal limit
            limit = planner.limit(planner.budget, peak, device)
            return None if limit is None else int((1 - self.options.margin) * limit)

        found = planner.search(self.facts.program, aim)
        first = self.first_fit(found, limit)
        if self.options.compile_half is None:
            return first.halves
        finalists = [first, *self.alternatives(found, first, limit)]
        return self.fastest([attempt.halves for attempt in finalists])

    def first_fit(self, found: SearchResult, limit: int | None) -> Attempt:
        """Return the first attempt that fits, refined. Raises :class:`BudgetInfeasible`.

        In order: the default partitioner's choice if it may fit, plans for less and less, plans
        near the least peak, and the default partitioner's choice otherwise. The plans near the
        least peak do not depend on the budget, so that a budget of the least peak that an error
        names is feasible. They and the default choice are lowered in full, as their peaks may
        become that number.
        """
        if limit is None:
            return self.attempt(found, self.default or found.best or found.baseline, None)
        full: list[Attempt] = []
        is_default_early = self.default is not None and self._optimistic_peak() <= limit
        if self.default is not None and is_default_early:
            full.append(self.attempt(found, self.default, limit, is_whole=True))
            if full[-1].fits(limit):
                return full[-1]
        descent = self.descend(found, limit)
        if descent and descent[-1].fits(limit):
            return self.refine(descent[-1], limit, descent[-2] if len(descent) > 1 else None)
        full += self.near_least_peak(found, limit)
        if full[-1].fits(limit):
            return self.refine(full[-1], limit, descent[-1] if descent else None)
        if self.default is not None and not is_default_early:
            full.append(self.attempt(found, self.default, limit, is_whole=True))
            if full[-1].fits(limit):
                return full[-1]
        least = min(attempt.compiled_bytes for attempt in full)
        baseline = max(least, found.baseline.simulation.peak_bytes)
        raise infeasible(self.options.planner.budget, limit, least, baseline)

    def least_memory(self, max_slowdown: float, device: torch.device) -> Halves:
        """Return the halves of the least compiled peak among plans of at most that extra time.

        They are the model's plan, its plans once a lowering calibrated it, and the default
        partitioner's choice, all lowered in full.
        """
        planner = self.options.planner
        found = planner.searched(self.facts.program, device)
        if math.isinf(max_slowdown):
            attempts = self.near_least_peak(found, 0)
        else:
            assert found.best is not None
            attempts = [self.attempt(found, found.best, 0, is_whole=True)]
            again = planner.searched(self.program, device)
            if again.best is not None and again.best.schedule != found.best.schedule:
                attempts.append(self.attempt(again, again.best, 0, is_whole=True))
        if self.default is not None:
            spent = simulate(self.program, self.default.schedule).extra_seconds
            if math.isinf(max_slowdown) or spent <= max_slowdown * self.program.step_seconds:
                attempts.append(self.attempt(found, self.default, 0, is_whole=True))
        forward, backward, plan = min(attempts, key=lambda each: each.compiled_bytes).halves
        return forward, backward, replace(plan, budget_bytes=plan.compiled_peak_bytes)

    def descend(self, found: SearchResult, limit: int) -> list[Attempt]:
        """Return attempts at plans for less and less memory; only the last may fit."""
        attempts: list[Attempt] = []
        aim = found.limit or limit
        # What kernels write over is known to the model only from a lowering.
        is_calibrated = self.program is not self.facts.program
        best = self.search(self.program, aim).best if is_calibrated else found.best
        for _ in range(self.options.attempts):
            if best is None or best.schedule in {each.schedule for each in attempts}:
                break
            latest = self.attempt(found, best, limit)
            attempts.append(latest)
            if latest.fits(limit):
                break
            # As much less as the model was wrong, and a little more.
            aim = min(aim, latest.planned_bytes) - int(1.1 * latest.overshoot_bytes(limit))
            best = self.search(latest.program, aim).best
        return attempts

    def near_least_peak(self, found: SearchResult, limit: int) -> list[Attempt]:
        """Return attempts at plans of about the least peak; only the last may fit.

        A candidate planned to take more than another was compiled to is skipped, unless the model
        may be wrong by that much: about one this way, about the other that way.
        """
        attempts = [self.attempt(found, found.least_peak, limit, is_whole=True)]
        program = attempts[0].program
        if attempts[0].fits(limit):
            return attempts
        for candidate in self._near_least(found.least_peak, program):
            error = max(each.model_error for each in attempts)
            least = min(each.compiled_bytes for each in attempts)
            if peak_bytes(program, candidate.schedule) <= (1 + 2 * error) * least:
                attempts.append(self.attempt(found, candidate, limit, is_whole=True))
                if attempts[-1].fits(limit):
                    break
        return attempts

    def _near_least(self, least: Candidate, program: Program) -> Iterator[Candidate]:
        """Yield candidates of the least peak on a calibrated program, and of a little more."""
        if program is not self.facts.program:
            better = self.search(program, peak_bytes(program, least.schedule)).least_peak
            if better.schedule != least.schedule:
                least = better
                yield least
        for factor in self.options.last_resorts:
            limit = int(factor * peak_bytes(program, least.schedule))
            if (best := self.search(program, limit).best) is not None:
                yield best

    def refine(self, fit: Attempt, limit: int, refused: Attempt | None) -> Attempt:
        """Return an attempt that fits, or a faster one that fits too, where budget is left over.

        ``refused`` was over the budget: plans between the two are expected in between.
        """
        options, step_seconds = self.options, self.facts.program.step_seconds
        gain = options.worthwhile * step_seconds
        share = 1 - options.margin
        for _ in range(options.retries):
            planned = peak_bytes(self.program, fit.schedule)
            left = limit - fit.compiled_bytes
            spent = fit.candidate.simulation.extra_seconds
            if refused is None:
                faster_by, rate = 0.0, 1.0
            else:
                over = simulate(self.program, refused.schedule)
                faster_by = spent - over.extra_seconds
                rate = (over.peak_bytes - planned) / (refused.compiled_bytes - fit.compiled_bytes)
            is_scarce = faster_by > options.scarce * step_seconds
            if spent <= gain or (left <= options.slack * limit and not is_scarce):
                break
            more = self.search(self.program, planned + int(max(rate, 0.0) * share * left))
            better = self._fastest_new(more, limit)
            if better is None or better.simulation.extra_seconds > spent - gain:
                break
            latest = self.attempt(more, better, limit)
            if latest.fits(limit):
                fit = latest
            else:
                refused, share = latest, share / 2
        return fit

    def _fastest_new(self, found: SearchResult, limit: int) -> Candidate | None:
        """Return the fastest candidate within a search's limit that was not lowered yet."""
        lowered = {attempt.schedule for attempt in self.history}
        new = (
            candidate
            for candidate in (self.default, found.best)
            if candidate is not None
            and candidate.schedule not in lowered
            and peak_bytes(self.program, candidate.schedule) <= (found.limit or limit)
        )
        return min(new, key=lambda candidate: candidate.simulation.extra_seconds, default=None)

    def alternatives(
        self, found: SearchResult, first: Attempt, limit: int | None
    ) -> Iterator[Attempt]:
        """Yield other attempts that fit, to be timed against the first.

        They are the default partitioner's choice, and the model's fastest plans within the first
        one's peak and within a little less.
        """
        peak = first.halves[2].compiled_peak_bytes or first.halves[2].peak_bytes
        at_less = (
            self.search(self.program, int((1 - less) * peak)) for less in (0.0, self.options.slack)
        )
        candidates = itertools.chain(
            [(found, self.default)], ((each, each.best) for each in at_less)
        )
        seen = {first.halves[2].digest}
        for search, candidate in candidates:
            if candidate is None:
                continue
            digest = self.plan_of(search, candidate, limit).digest
            if digest not in seen:
                seen.add(digest)
                attempt = self.attempt(search, candidate, limit)
                if attempt.fits(limit):
                    yield attempt

    def fastest(self, finalists: Sequence[Halves]) -> Halves:
        """Return the fastest finalist on synthetic inputs; among equals, that of the least peak.

        If the step cannot be timed, return the first finalist.
        """
        if len(finalists) == 1:
            return finalists[0]
        seconds = self._timed(finalists)
        if seconds is None:
            return finalists[0]
        for (_, _, plan), took in zip(finalists, seconds, strict=True):
            log.info(
                "plan %s takes %.2f ms a step, its peak is %s bytes",
                plan.digest,
                1e3 * took,
                plan.compiled_peak_bytes,
            )
        longest = (1 + self.options.tie) * min(seconds)
        fast = [halves for halves, took in zip(finalists, seconds, strict=True) if took <= longest]
        return min(fast, key=lambda halves: halves[2].compiled_peak_bytes or 0)

    def _timed(self, finalists: Sequence[Halves]) -> list[float] | None:
        """Return the seconds a step of each finalist takes; None if the step cannot be timed."""
        options = self.options
        assert options.compile_half is not None
        if (op := unsafe_op(finalists[0][:2])) is not None:
            log.warning(
                "plans are not timed, as %s is not torch's own, or talks to other ranks: "
                "the one expected to be fastest is taken.",
                op,
            )
            return None
        halves = [finalist[:2] for finalist in finalists]
        device = device_of(self.joint.module.graph)
        try:
            return step_seconds(halves, options.compile_half, device, options.clock)
        except Exception as error:  # On synthetic inputs a step may raise anything.
            log.warning(
                "plans cannot be timed, as the step does not run on synthetic inputs (%s: %s): "
                "the one expected to be fastest is taken.",
                type(error).__name__,
                error,
            )
            return None

    def attempt(
        self,
        found: SearchResult,
        candidate: Candidate,
        limit: int | None,
        *,
        is_whole: bool = False,
    ) -> Attempt:
        """Emit and lower the halves of a candidate, and record the attempt.

        Unless ``is_whole``, the lowering ends with the first half that is over the limit.
        """
        tick(f"compiled peak of attempt {len(self.history) + 1}")
        plan = self.plan_of(found, candidate, limit)
        forward, backward, plan = emitted(self.options.planner, self.joint, self.facts, plan)
        lowering = self._lower_halves(
            forward, backward, limit, is_whole=is_whole, may_free_early=plan.keeps_order
        )
        if lowering.frees_early:
            free_early(backward)
        log.debug(
            "planned %d bytes, compiled %d, budget %s",
            candidate.simulation.peak_bytes,
            lowering.peak_bytes,
            limit,
        )
        plan = replace(plan, compiled_peak_bytes=lowering.peak_bytes, lets_go=lowering.frees_early)
        attempt = Attempt(
            candidate,
            (forward, backward, plan),
            lowering.program,
            peak_bytes(lowering.program, candidate.schedule),
            lowering.peak_bytes,
        )
        self.history.append(attempt)
        return attempt

    def _lower_halves(
        self,
        forward: fx.GraphModule,
        backward: fx.GraphModule,
        limit: int | None,
        *,
        is_whole: bool,
        may_free_early: bool,
    ) -> _Lowering:
        """Lower two halves.

        Lowered halves are kept for the compile, so that only those of refused plans cost time.
        """
        facts, workspace, lower = self.facts, self.workspace, self.options.lower
        num_fwd_outputs = self.joint.num_fwd_outputs
        # The backward is likelier to be over the limit: it is lowered first, unless the layouts of
        # its inputs follow from the lowered forward.
        lowered = lower(forward, None, {}) if changes_layout(forward) else None
        lowered_backward = lower_backward(
            forward, backward, lower, num_fwd_outputs=num_fwd_outputs, lowered_forward=lowered
        )
        program = with_lowered_workspace(facts, lowered_backward, backward, workspace)

        def backward_peak() -> tuple[int, bool]:
            keeping, freeing = (
                int(
                    backward_bytes(
                        half,
                        forward,
                        backward,
                        facts,
                        workspace,
                        num_fwd_outputs=num_fwd_outputs,
                        lowered_forward=lowered,
                    ).max()
                )
                for half in (lowered_backward, lowered_backward.freeing_early or lowered_backward)
            )
            frees_early = may_free_early and limit is not None and freeing < keeping > limit
            return freeing if frees_early else keeping, frees_early

        peak, frees_early = backward_peak()
        if limit is not None and peak > limit and not is_whole:
            return _Lowering(peak, frees_early, program)
        if lowered is None:
            # The lowered forward tells which saved values share a buffer.
            lowered = lower(forward, None, {})
            peak, frees_early = backward_peak()
        peak = max(peak, int(forward_bytes(lowered, forward, facts, workspace).max()))
        return _Lowering(peak, frees_early, program)

    @property
    def program(self) -> Program:
        """The program, calibrated by the latest lowering."""
        return self.history[-1].program if self.history else self.facts.program

    def search(self, program: Program, limit: int) -> SearchResult:
        """Search a program for plans within a limit in bytes."""
        return self.options.planner.search(program, lambda peak: limit)

    def _optimistic_peak(self) -> int:
        """Return the peak of the default partitioner's choice if the compiler does its best."""
        assert self.default is not None
        program = optimistic_program(self.facts, is_extern_kernel, self.workspace)
        return peak_bytes(program, self.default.schedule)

    def plan_of(self, found: SearchResult, candidate: Candidate, limit: int | None) -> Plan:
        """Return the plan of a candidate."""
        plan = build_plan(self.snapshot, found, candidate, budget_bytes=limit, cost=self.cost)
        graph = self.joint.module.graph
        fused = tuple(node.name for node in graph.nodes if node in self.facts.never_stored)
        # Held to our order, the default partitioner's choice might take more than in Inductor's.
        keeps_order = candidate is not self.default
        return replace(plan, graph=self.lines, never_stored=fused, keeps_order=keeps_order)


def peak_bytes(program: Program, schedule: Schedule) -> int:
    """Return the simulated peak of a schedule."""
    return simulate(program, schedule).peak_bytes


def default_candidate(snapshot: GraphSnapshot, saved: frozenset[str]) -> Candidate | None:
    """Return the candidate that saves the default partitioner's choice.

    Everything else is recomputed just in time. None if the choice may not be saved.
    """
    program = snapshot.program
    storages = frozenset(
        s for name in saved if name in snapshot.by_name for s in snapshot.by_name[name].storages
    )
    recomputable = frozenset(i for i, op in enumerate(program.ops) if op.no_recompute is None)
    schedule = emit(program, StageAssignment((0,), (storages,), (recomputable,)))
    if not program.tables.is_savable[list(schedule.saved)].all():
        return None
    return Candidate(schedule, simulate(program, schedule))
