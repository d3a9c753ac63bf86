"""Attempt: one candidate schedule, emitted as two halves and lowered by Inductor."""

from __future__ import annotations

import copy
import logging
from dataclasses import dataclass, replace

from torch import fx

from fxckpt.inductor.autotune import PlannedHalves
from fxckpt.inductor.memory import (
    Lower,
    backward_bytes,
    forward_bytes,
    held_bytes,
    lower_backward,
    lower_forward,
    optimistic_program,
    with_lowered_workspace,
)
from fxckpt.passes.analysis.graph_snapshot import snapshot_of
from fxckpt.passes.analysis.joint import Facts, Workspace
from fxckpt.passes.graphs import Joint
from fxckpt.passes.inductor.fusion_model import is_extern_kernel
from fxckpt.planner.build_plan import build_plan
from fxckpt.planner.pipeline import EMIT_INDUCTOR, FREE_EARLY, Emission, emit_halves
from fxckpt.planner.planner import Planner
from fxckpt.plans.snapshot import GraphSnapshot
from fxckpt.plans.types import Plan
from fxckpt.solver.cuts.saved_limits import exceeded
from fxckpt.solver.program import Program
from fxckpt.solver.schedule import Schedule, StageAssignment, emit
from fxckpt.solver.search.candidates import Candidate, SearchResult
from fxckpt.solver.simulate import simulate
from fxckpt.torch_private.inductor.layouts import changes_layout
from fxckpt.utils.progress import tick

log = logging.getLogger("fxckpt")


@dataclass(frozen=True)
class Attempt:
    """A candidate schedule after Inductor lowered the halves that follow it."""

    candidate: Candidate
    """Schedule, and its simulation on the program that it was searched on."""
    halves: PlannedHalves
    """Forward, backward and plan."""
    program: Program
    """The program, calibrated by this lowering."""
    planned_bytes: int
    """Peak of the schedule on the calibrated program."""
    compiled_bytes: int
    """Peak of the lowered halves, or, over the limit, of the half that was lowered first."""
    is_whole: bool
    """Whether both halves were lowered, over the limit too."""

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

    def with_its_peak_as_budget(self) -> Attempt:
        """Return the attempt whose plan has its own compiled peak for its budget."""
        return self.with_budget(self.halves[2].compiled_peak_bytes)

    def with_budget(self, limit: int | None) -> Attempt:
        """Return the attempt whose plan has a limit in bytes for its budget."""
        forward, backward, plan = self.halves
        return replace(self, halves=(forward, backward, replace(plan, budget_bytes=limit)))


@dataclass(frozen=True)
class _Lowering:
    """Peak of two lowered halves, and the facts that their lowering showed."""

    peak_bytes: int
    """Peak of both halves, or, over the limit, of the half that was lowered first."""
    halves_bytes: tuple[int, int] | None
    """Peaks of the forward and of the backward; None if the forward was not lowered."""
    held_bytes: int | None
    """Bytes held for the backward alone; None if the forward was not lowered."""
    frees_early: bool
    """Whether the backward must free each buffer after its last reader to be within the limit."""
    program: Program
    """The program, calibrated by the lowered backward."""


@dataclass(frozen=True)
class CandidateLowerer:
    """Makes attempts at the candidates of one joint graph."""

    planner: Planner
    """Budget, policy, cost model and search."""
    lower: Lower
    """Lowers a half to its kernels and buffers."""
    joint: Joint
    """The prepared joint graph, which no attempt modifies."""
    lines: tuple[str, ...]
    """Its fingerprint."""
    facts: Facts
    """Its program, and the nodes behind it."""
    cost: str
    """Name of the cost model."""
    workspace: Workspace
    """Workspace of an op, called as it is."""
    snapshot: GraphSnapshot
    """The graph as plain data, kept in each plan."""
    default: Candidate | None
    """Choice of torch's default partitioner; None if the policy or a limit rules it out."""

    @staticmethod
    def of(
        planner: Planner,
        lower: Lower,
        joint: Joint,
        lines: tuple[str, ...],
        facts: Facts,
        cost: str,
        workspace: Workspace,
        default_saved: frozenset[str],
    ) -> CandidateLowerer:
        """Return the lowerer of a joint graph.

        ``default_saved`` are the names of the values that torch's default partitioner saves.
        """
        graph = joint.module.graph
        snapshot = snapshot_of(graph, facts)
        default = default_candidate(snapshot, default_saved) if planner.policy is None else None
        facts = planner.with_region_limits(
            graph, facts, None if default is None else default.schedule
        )
        snapshot = replace(snapshot, program=facts.program)
        if default is not None and exceeded(facts.program, default.schedule.saved):
            default = None
        return CandidateLowerer(
            planner, lower, joint, lines, facts, cost, workspace, snapshot, default
        )

    def attempt(
        self,
        found: SearchResult,
        candidate: Candidate,
        limit: int | None,
        *,
        number: int,
        is_whole: bool = False,
    ) -> Attempt:
        """Emit and lower the halves of a candidate, the ``number``-th of its search.

        Unless ``is_whole``, the lowering ends with the first half that is over the limit.
        """
        tick(f"compiled peak of attempt {number}")
        plan = self.plan_of(found, candidate, limit)
        emission = copied_emission(self.planner, self.joint, self.facts, plan)
        forward, backward = emit_halves(emission, EMIT_INDUCTOR)
        lowering = self._lower_halves(
            forward, backward, limit, is_whole=is_whole, may_free_early=plan.keeps_order
        )
        plan = replace(
            plan,
            compiled_peak_bytes=lowering.peak_bytes,
            compiled_halves_bytes=lowering.halves_bytes,
            compiled_held_bytes=lowering.held_bytes,
            frees_early=lowering.frees_early,
        )
        emission = replace(emission, halves=(forward, backward), plan=plan)
        halves = emit_halves(emission, FREE_EARLY)
        log.debug(
            "planned %d bytes, compiled %d, budget %s",
            candidate.simulation.peak_bytes,
            lowering.peak_bytes,
            limit,
        )
        return Attempt(
            candidate,
            (*halves, plan),
            lowering.program,
            simulate(lowering.program, candidate.schedule).peak_bytes,
            lowering.peak_bytes,
            is_whole,
        )

    def plan_of(self, found: SearchResult, candidate: Candidate, limit: int | None) -> Plan:
        """Return the plan of a candidate."""
        plan = build_plan(self.snapshot, found, candidate, budget_bytes=limit, cost=self.cost)
        graph = self.joint.module.graph
        fused = tuple(node.name for node in graph.nodes if node in self.facts.never_stored)
        # Held to our order, the default partitioner's choice might take more than in Inductor's.
        keeps_order = candidate is not self.default
        return replace(plan, graph=self.lines, never_stored=fused, keeps_order=keeps_order)

    def optimistic_default_peak(self) -> int:
        """Return the peak of the default partitioner's choice if the compiler does its best."""
        assert self.default is not None
        program = optimistic_program(self.facts, is_extern_kernel, self.workspace)
        return simulate(program, self.default.schedule).peak_bytes

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
        facts, workspace, lower = self.facts, self.workspace, self.lower
        num_fwd_outputs = self.joint.num_fwd_outputs
        # The backward is likelier to be over the limit: it is lowered first, unless the layouts of
        # its inputs follow from the lowered forward.
        lowered = lower_forward(forward, lower) if changes_layout(forward) else None
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
            return _Lowering(peak, None, None, frees_early, program)
        if lowered is None:
            # The lowered forward tells which saved values share a buffer.
            lowered = lower_forward(forward, lower)
            peak, frees_early = backward_peak()
        halves = int(forward_bytes(lowered, forward, facts, workspace).max()), peak
        held = held_bytes(lowered, num_fwd_outputs=num_fwd_outputs)
        return _Lowering(max(halves), halves, held, frees_early, program)


def copied_emission(planner: Planner, joint: Joint, facts: Facts, plan: Plan) -> Emission:
    """Return a copy of a planned joint graph, ready to be emitted."""
    # A graph remembers the names it once had, and a copy does not: new nodes get the same names in
    # every process, as the caches of compiled code require.
    module = fx.GraphModule(joint.module, copy.deepcopy(joint.module.graph))
    facts = facts.moved_to(module.graph)
    return planner.emission(replace(joint, module=module), facts, plan)


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
