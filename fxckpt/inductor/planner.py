"""Planning for Inductor, a compiler that fuses: a model proposes, Inductor's lowering decides.

A joint graph is prepared and read into a program, as Inductor is expected to fuse it
(:mod:`~fxckpt.passes.inductor.fusion_model`). A search finds plans whose lowered halves are within
the budget (:mod:`~fxckpt.inductor.lowering_search`), and the fastest of them is taken
(:mod:`~fxckpt.inductor.autotune`). Plans that are known, cached or another rank's are applied
without a search.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torch import fx

from fxckpt import budgets
from fxckpt.inductor.attempt import CandidateLowerer, copied_emission
from fxckpt.inductor.autotune import CompileHalf, PlannedHalves, fastest
from fxckpt.inductor.lowering_search import LoweringSearch
from fxckpt.inductor.memory import Lower
from fxckpt.inductor.plan_cache import PlanCache, key_of
from fxckpt.inductor.tiles import TileSearch
from fxckpt.passes.analysis.graph_snapshot import snapshot_of
from fxckpt.passes.analysis.joint import Facts, Workspace
from fxckpt.passes.graphs import Joint
from fxckpt.passes.inductor.fusion_model import FusionModel, is_extern_kernel
from fxckpt.passes.meta import LAST_READER, ORDER
from fxckpt.planner.pipeline import EMIT_INDUCTOR, PREPARE_INDUCTOR, emit_halves, prepare
from fxckpt.planner.planner import Planner, device_of, is_of_graph
from fxckpt.planner.ranks import Ranks
from fxckpt.planner.refusals import warn_of_unbounded_sizes
from fxckpt.planner.tiles import tiled_as
from fxckpt.plans.log import log_plan
from fxckpt.plans.types import Plan
from fxckpt.tiers.ops import send, sent
from fxckpt.torch_private.inductor.default_partitioner import default_saved, fuses
from fxckpt.torch_private.inductor.execution_order import KeepExecutionOrder
from fxckpt.torch_private.inductor.layouts import (
    changes_layout,
    channels_last,
    is_convolution,
    lay_out_as_output,
)
from fxckpt.torch_private.inductor.lowering import Lowerings


@dataclass(frozen=True)
class InductorPlanner:
    """Plans joint graphs whose halves Inductor compiles."""

    planner: Planner
    """Budget, policy, cost model and search."""
    lower: Lower = field(
        default_factory=lambda: Lowerings(KeepExecutionOrder(ORDER, last=LAST_READER)).lower
    )
    """Lowers a half to its kernels and buffers."""
    store: PlanCache | None = None
    """Cache of plans on disk; None plans in every process."""
    code: str = ""
    """Version of the planning code, part of the cache's key."""
    compile_half: CompileHalf | None = None
    """Compiles a half to be timed; None trusts the cost model about the fastest plan."""
    clock: Callable[[], float] = time.perf_counter
    """Clock that times steps, in seconds."""

    def partition(self, joint: Joint, **given: Any) -> PlannedHalves:
        """Return the forward and the backward of a joint graph, and the plan they follow.

        ``joint`` is rewritten in place; ``given`` goes to torch's default partitioner. Raises
        :class:`~fxckpt.errors.BudgetInfeasible`.
        """
        planner = self.planner
        begin = time.perf_counter()
        if planner.offload is not None:
            lay_out_as_output(send, sent)
        prepare(joint, PREPARE_INDUCTOR)
        # The code that unpacks traced arguments is unused here, and torch warns when it is copied.
        joint.module.graph.set_codegen(fx.graph.CodeGen())
        # Lines of regions tell apart what the graph does not.
        code = "\n".join((self.code, *(r.line for r in planner.regions(joint.module.graph))))
        key = None if self.store is None else key_of(joint.module, planner, code, given)
        kept = self.store.get(key) if self.store is not None and key is not None else None
        if kept is not None and (found := tiled_as(joint, kept)) is not None:
            if kept.graph == planner.lines(found.module.graph):
                return self._applied(replace(planner, known=(kept,)), found)
        joint = planner.as_fixed(joint)
        lines = planner.lines(joint.module.graph)
        if planner.is_fixed or any(is_of_graph(plan, lines) for plan in planner.known):
            return self._applied(planner, joint)
        if planner.ranks is not None and planner.choose_level is None:
            return self._planned_together(planner.ranks, joint, lines, given)
        halves = (
            self._halves_by_search(joint, lines, given)
            if planner.tile is None
            else self._halves_with_tiles(joint, given)
        )
        if self.store is not None and key is not None:
            self.store.keep(key, halves[2])
        is_level = planner.choose_level is not None
        log_plan(halves[2], time.perf_counter() - begin, is_level=is_level)
        return halves

    def _applied(self, planner: Planner, joint: Joint) -> PlannedHalves:
        """Return the halves that follow a known plan."""
        facts, plan = planner.plan(joint)
        plan = replace(plan, snapshot=snapshot_of(joint.module.graph, facts))
        emission = copied_emission(planner, joint, facts, plan)
        return (*emit_halves(emission, EMIT_INDUCTOR), plan)

    def _planned_together(
        self, ranks: Ranks, joint: Joint, lines: tuple[str, ...], given: Mapping[str, Any]
    ) -> PlannedHalves:
        """Return the halves that follow the plan of the first rank.

        A rank whose sizes are others cannot follow it, and has a plan of its own.
        """
        found: list[PlannedHalves] = []

        def choose(_: Sequence[None]) -> Plan:
            found.append(self._halves_by_search(joint, lines, given))
            return replace(found[0][2], snapshot=None)

        plan = ranks.decide("the plan of a graph", None, choose)
        if found:
            return found[0]
        if is_of_graph(plan, lines):
            return self._applied(replace(self.planner, known=(plan,)), joint)
        return self._halves_by_search(joint, lines, given)

    def _halves_with_tiles(self, joint: Joint, given: Mapping[str, Any]) -> PlannedHalves:
        """Return the halves of the fastest plan of the graph, with tiles or without."""
        planner = self.planner

        def search(graph: Joint, budget: budgets.Budget) -> PlannedHalves:
            within = replace(self, planner=replace(planner, budget=budget))
            return within._halves_by_search(graph, planner.lines(graph.module.graph), given)

        def plan(graph: Joint, budget: budgets.Budget) -> tuple[Facts, Plan]:
            facts, cost, _, _ = self._read(graph, given)
            return replace(planner, budget=budget).plan_of(graph, facts, cost)

        pricer = planner.tile_pricer(plan, lambda graph: self._read(graph, given)[0].program)
        return TileSearch(pricer, search)(joint)

    def _read(self, joint: Joint, given: Mapping[str, Any]) -> tuple[Facts, str, Workspace, Any]:
        """Return the facts of a joint graph as it is expected to be fused, and what they rest on.

        That is the name of the cost model, the workspace of ops, and what torch's default
        partitioner saves.
        """
        planner, module = self.planner, joint.module
        saved = default_saved(module, num_fwd_outputs=joint.num_fwd_outputs, **given)
        workspace = planner.measured()
        facts, cost = planner.read(
            joint,
            bind_preferences=planner.budget is None and planner.choose_level is None,
            never_stored=FusionModel(fuses)(module.graph, saved),
            workspace=_expected_workspace(module, workspace),
        )
        return facts, cost, workspace, saved

    def _halves_by_search(
        self, joint: Joint, lines: tuple[str, ...], given: Mapping[str, Any]
    ) -> PlannedHalves:
        """Return the halves of the plan that a search finds."""
        planner, module = self.planner, joint.module
        if planner.budget is not None:
            warn_of_unbounded_sizes(module.graph, planner.budget)
        facts, cost, workspace, saved = self._read(joint, given)
        lowerer = CandidateLowerer.of(
            planner, self.lower, joint, lines, facts, cost, workspace, saved
        )
        attempts = LoweringSearch(lowerer).finalists(is_timed=self.compile_half is not None)
        finalists = [attempt.halves for attempt in attempts]
        if self.compile_half is None or len(finalists) == 1:
            return finalists[0]
        return fastest(finalists, self.compile_half, device_of(module.graph), self.clock)


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
