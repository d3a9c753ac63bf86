"""Planner: joint graph in; forward half, backward half and plan out."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import fx
from torch.utils.checkpoint import CheckpointPolicy

from fxckpt import budgets
from fxckpt.costs.devices import Device
from fxckpt.costs.models import CostModel, FlopCost, checked, resolve
from fxckpt.costs.workspace import MeasuredWorkspace, stated_workspace
from fxckpt.errors import BudgetInfeasible, InvalidBudget, InvalidOption
from fxckpt.ops.properties import tensors
from fxckpt.passes.analysis.budget_regions import (
    BudgetRegion,
    budget_regions,
    saved_limits,
    without_regions,
)
from fxckpt.passes.analysis.eager_liveness import held_by_nodes, held_by_region
from fxckpt.passes.analysis.fingerprint import fingerprint, refuse_another_graph, refuse_unknown_ops
from fxckpt.passes.analysis.graph_memory import inner_bytes
from fxckpt.passes.analysis.graph_snapshot import snapshot_of
from fxckpt.passes.analysis.joint import Facts, Workspace, read_facts
from fxckpt.passes.analysis.policy_values import values_of
from fxckpt.passes.graphs import Joint
from fxckpt.planner.build_plan import build_plan
from fxckpt.planner.pipeline import Emission, emit_halves, prepare
from fxckpt.planner.ranks import Ranks
from fxckpt.planner.refusals import (
    infeasible,
    infeasible_region,
    leaving_out,
    refuse_tiles,
    too_slow,
    warn_of_unbounded_sizes,
)
from fxckpt.planner.tier_link import check_fits, offload_hint, sender, with_link
from fxckpt.planner.tiles import (
    PlanWithin,
    Read,
    TilePricer,
    asks_for_tiles,
    check_tile,
    offering_tiles,
    reach,
    tiled_as,
)
from fxckpt.planner.together import search_together
from fxckpt.plans.log import log_frontier, log_known, log_plan
from fxckpt.plans.types import Plan
from fxckpt.policies import as_policy
from fxckpt.policies.base import OFFLOAD, Policy, TilePattern, decide_all
from fxckpt.solver.program import Program
from fxckpt.solver.schedule import Schedule, save_all
from fxckpt.solver.search.candidates import Candidate, SearchResult
from fxckpt.solver.search.price_search import PriceSearch, evenly_spaced
from fxckpt.tiers import Tier
from fxckpt.torch_private import graph_budget, outside_trace

log = logging.getLogger("fxckpt")

LevelChooser = Callable[[Program], SearchResult]
"""Chooses the schedule of a program, as the best candidate of a search's result."""


@dataclass(frozen=True)
class Planner:
    """Options of a user, and the planning that follows them."""

    budget: budgets.Budget = None
    policy: Policy | None = None
    cost: str | CostModel = "roofline"
    measure_workspace: bool = True
    """Whether each distinct CPU op runs once, on synthetic inputs, to measure its workspace."""
    known: tuple[Plan, ...] = ()
    """Plans that are applied to the graphs they were made for."""
    is_fixed: bool = False
    """Whether a graph without a known plan is an error."""
    is_eager: bool = False
    """Whether autograd runs the backward, in place of a compiled graph."""
    device: Device | None = None
    """The device, elsewhere, that is planned for; None for the one the graph's values are on."""
    replays: bool = False
    """Whether CUDA graphs replay the kernels, so that launches take no time."""
    exact: bool = False
    """Whether recomputed values are compared with checksums of the forward's."""
    offload: Tier | None = None
    """Where saved values may be sent; None keeps them on the device."""
    in_place: bool = True
    """Whether the halves are run op by op, so that ops may write into operands that die."""
    tile: int | str | None = None
    """Tiles that regions of independent rows may be unrolled into: a number, or ``"auto"``."""
    search: PriceSearch = field(default_factory=PriceSearch)
    choose_level: LevelChooser | None = None
    """Chooses the schedule in place of the search, where a budget is of a step of many graphs."""
    is_agreed: bool = False
    """Whether all ranks have one plan of the graph, which may choose what is communicated again."""
    ranks: Ranks | None = field(default=None, repr=False, compare=False)
    """The ranks that plan as one; None plans for this process alone."""

    def plan(self, joint: Joint) -> tuple[Facts, Plan]:
        """Return the facts and the plan of a prepared joint graph, and log the plan.

        Raises :class:`BudgetInfeasible`, and :class:`PlanMismatch` where plans are fixed and none
        is of this graph.
        """
        begin = time.perf_counter()
        lines = self.lines(joint.module.graph)
        for plan in self.known:
            if is_of_graph(plan, lines):
                fused = frozenset(
                    n for n in joint.module.graph.nodes if n.name in plan.never_stored
                )
                facts = read_facts(
                    joint.module,
                    num_fwd_outputs=joint.num_fwd_outputs,
                    cost=checked(FlopCost()),
                    never_stored=fused,
                    in_place=self._writes_in_place,
                )
                refuse_unknown_ops(plan, facts)
                log_known(plan)
                return facts, plan
        if self.is_fixed:
            given = self.known[0]
            refuse_another_graph(replace(given, graph=without_regions(given.graph)), lines)
        if self.budget is not None:
            warn_of_unbounded_sizes(joint.module.graph, self.budget)
        try:
            facts, plan = self._plan_by_search(joint)
        except BudgetInfeasible as error:
            raise self._with_tile_hint(error, joint) from error
        log_plan(plan, time.perf_counter() - begin, is_level=self.choose_level is not None)
        return facts, plan

    def _plan_by_search(self, joint: Joint) -> tuple[Facts, Plan]:
        """Return the facts and the plan of a joint graph without a known one."""
        device = device_of(joint.module.graph)
        is_free = self.budget is None and self.choose_level is None
        facts, cost = self.read(joint, bind_preferences=is_free)
        facts = self.with_region_limits(joint.module.graph, facts)
        if self.choose_level is not None:
            found = self.choose_level(facts.program)
        elif self.ranks is not None:
            program, found = self.search_with_ranks(self.ranks, facts, device)
            facts = replace(facts, program=program)
        else:
            found = self.within_budget(facts, device)
        return facts, self._described(joint, facts, cost, found)

    def plan_of(self, joint: Joint, facts: Facts, cost: str) -> tuple[Facts, Plan]:
        """Return the plan within the budget of a joint graph that was read, and its facts.

        Raises :class:`BudgetInfeasible`.
        """
        facts = self.with_region_limits(joint.module.graph, facts)
        found = self.within_budget(facts, device_of(joint.module.graph))
        return facts, self._described(joint, facts, cost, found)

    def _described(self, joint: Joint, facts: Facts, cost: str, found: SearchResult) -> Plan:
        assert found.best is not None
        snapshot = snapshot_of(joint.module.graph, facts)
        plan = build_plan(snapshot, found, found.best, budget_bytes=found.limit, cost=cost)
        return replace(plan, graph=self.lines(joint.module.graph))

    def plan_with_tiles(self, joint: Joint) -> tuple[Joint, Facts, Plan]:
        """Return the graph that is emitted, tiled where that was asked for and gains, and its plan.

        Raises what :meth:`plan` raises, and :class:`InvalidOption` for what excludes tiles.
        """
        if self.tile is None or self.is_fixed:
            joint = self.as_fixed(joint)
            return (joint, *self.plan(joint))
        begin = time.perf_counter()
        if self.budget is not None:
            warn_of_unbounded_sizes(joint.module.graph, self.budget)
        is_free = self.budget is None
        pricer = self.tile_pricer(
            lambda graph, budget: replace(self, budget=budget)._plan_by_search(graph),
            lambda graph: self.read(graph, bind_preferences=is_free)[0].program,
        )
        choice = pricer(joint)
        log_plan(choice.plan, time.perf_counter() - begin)
        return choice.joint, choice.facts, choice.plan

    def as_fixed(self, joint: Joint) -> Joint:
        """Return the graph with the tiles of the plan that is applied unchanged, if one is."""
        if not self.is_fixed:
            return joint
        if (found := tiled_as(joint, self.known[0])) is None:
            refuse_another_graph(self.known[0], self.lines(joint.module.graph))
        assert found is not None
        return found

    def tile_pricer(self, plan: PlanWithin, read: Read) -> TilePricer:
        """Return what chooses the tiles of a graph, by plans and programs of variants.

        Raises :class:`InvalidOption` for what excludes tiles.
        """
        assert self.tile is not None
        if self.choose_level is not None or self.ranks is not None:
            raise InvalidOption(
                f"tile={self.tile!r} is for a model that is one graph, planned by one process; "
                "this graph is one of several of a step, or one of several ranks plans it. Leave "
                "tile out, or give scope='graph' and no group."
            )
        return TilePricer(self.tile, self.budget, plan, read, self._tile_patterns)

    @property
    def _tile_patterns(self) -> tuple[TilePattern, ...]:
        """Modules of whose regions alone there may be tiles; none allows all."""
        return () if self.policy is None else self.policy.tiles()

    def _with_tile_hint(self, error: BudgetInfeasible, joint: Joint) -> BudgetInfeasible:
        """Return an error for a budget below the floor that says what tiles would reach."""
        takes_tiles = self._writes_in_place and self.offload is None and self.policy is None
        if self.tile is not None or not takes_tiles or self.ranks or self.choose_level:
            return error
        found = reach(
            joint, lambda graph, budget: replace(self, budget=budget)._plan_by_search(graph), error
        )
        return error if found is None else offering_tiles(error, found)

    @property
    def _writes_in_place(self) -> bool:
        """Whether emitted graphs write in place; autograd runs ops of its own."""
        return self.in_place and not self.is_eager

    def regions(self, graph: fx.Graph) -> tuple[BudgetRegion, ...]:
        """Return the parts of a joint graph with a budget of their own.

        torch's budget for whole graphs counts where there is none of ours.
        """
        if self.is_eager or self.is_fixed:
            return ()
        return budget_regions(graph.nodes, graph_budget() if self.budget is None else 1.0)

    def lines(self, graph: fx.Graph) -> tuple[str, ...]:
        """Return the fingerprint of a joint graph and of the budgets of its regions."""
        return (*fingerprint(graph), *(region.line for region in self.regions(graph)))

    def with_region_limits(
        self, graph: fx.Graph, facts: Facts, default: Schedule | None = None
    ) -> Facts:
        """Return the facts with the limits of the graph's regions on what is saved.

        ``default`` is the schedule without a budget; None for that which recomputes nothing. Raises
        :class:`BudgetInfeasible` for a region of less than the least.
        """
        regions = self.regions(graph)
        if not regions:
            return facts
        saved = (default or save_all(facts.program)).saved
        limits = saved_limits(facts.program, regions, saved)
        for limit in limits:
            if limit.bytes < limit.least_bytes:
                raise infeasible_region(limit)
        return replace(facts, program=replace(facts.program, limits=limits))

    def search_budget(self, program: Program, device: torch.device) -> SearchResult:
        """Return the result of the search for what the budget asks for.

        Raises :class:`SlowdownInfeasible` where even the fastest plan takes too long.
        """
        asked = budgets.parse(self.budget)
        if not isinstance(asked, budgets.LeastMemory):
            found = self.search(program, lambda peak: self.budget_bytes(asked, peak, device))
            return self.search.further(program, found)
        if math.isinf(asked.max_slowdown):
            return self.search.least_memory(program, math.inf)
        most = asked.max_slowdown * program.step_seconds
        found = self.search.least_memory(program, most)
        assert found.best is not None
        if (least := found.best.simulation.extra_seconds) > most:
            raise too_slow(asked.max_slowdown, least / program.step_seconds)
        return found

    def within_budget(self, facts: Facts, device: torch.device) -> SearchResult:
        """Return the result of a search that found a plan.

        Raises :class:`BudgetInfeasible` where none is within the budget.
        """
        found = self.search_budget(facts.program, device)
        if found.best is None:
            assert found.limit is not None
            raise infeasible(
                self.budget,
                found.limit,
                found.least_peak.simulation.peak_bytes,
                found.baseline.simulation.peak_bytes,
                offload_hint(self.offload, device, facts, found),
            )
        return found

    def search_with_ranks(
        self, ranks: Ranks, facts: Facts, device: torch.device
    ) -> tuple[Program, SearchResult]:
        """Return the program of the largest sizes of all ranks, and the search's result for it.

        ``"auto"`` is the least of the ranks' free memory.
        """
        is_auto = budgets.parse(self.budget) == "auto"
        room = self.budget_bytes(self.budget, 0, device) if is_auto else None

        def search_merged(merged: Program, least: int | None) -> SearchResult:
            planner = self if least is None else replace(self, budget=least)
            return planner.within_budget(replace(facts, program=merged), device)

        return search_together(ranks, "the plan of a graph", facts.program, search_merged, room)

    def frontier(
        self,
        joint: Joint,
        *,
        points: int | Sequence[budgets.Budget],
        tick: Callable[[], object] = lambda: None,
    ) -> tuple[Plan, ...]:
        """Return plans of a prepared joint graph at several budgets.

        ``points`` are the budgets, or their number from the least peak to the uncheckpointed one;
        ``tick`` is called once a point.

        Raises :class:`BudgetInfeasible` for a budget below the floor.
        """
        begin = time.perf_counter()
        device = device_of(joint.module.graph)
        facts, cost = self.read(joint, bind_preferences=False)
        facts = self.with_region_limits(joint.module.graph, facts)

        asked: dict[int, budgets.Budget] = {}

        def peaks(floor: Candidate, baseline: Candidate) -> Sequence[int]:
            if isinstance(points, int):
                return evenly_spaced(points, floor, baseline)
            peak = baseline.simulation.peak_bytes
            chosen: list[int] = []
            for budget in points:
                if budgets.parse(budget) == budgets.LeastMemory():
                    chosen.append(floor.simulation.peak_bytes)
                    continue
                limit = self.budget_bytes(budget, peak, device)
                chosen.append(peak if limit is None else limit)
                asked[chosen[-1]] = budget
            return chosen

        found = self.search.frontier(facts.program, peaks, tick)
        for each in found:
            if each.best is None:
                assert each.limit is not None
                floor, baseline = each.least_peak.simulation, each.baseline.simulation
                raise infeasible(
                    asked[each.limit], each.limit, floor.peak_bytes, baseline.peak_bytes
                )
        snapshot, lines = snapshot_of(joint.module.graph, facts), self.lines(joint.module.graph)
        made = (
            build_plan(snapshot, f, f.best, budget_bytes=f.limit, cost=cost)
            for f in found
            if f.best is not None
        )
        plans = tuple(replace(plan, graph=lines) for plan in made)
        log_frontier(plans, time.perf_counter() - begin)
        return plans

    def read(
        self,
        joint: Joint,
        *,
        bind_preferences: bool,
        never_stored: frozenset[fx.Node] = frozenset(),
        workspace: Workspace | None = None,
    ) -> tuple[Facts, str]:
        """Return the facts of a prepared joint graph, and the name of their cost model.

        ``workspace`` gives the workspace of an op's kernel where it is not the kernel that eager
        mode calls.
        """
        device = device_of(joint.module.graph)
        cost = checked(resolve(self.cost, device, named=self.device, replays=self.replays))
        measured = self.measured() if workspace is None else workspace
        decided = self._decided(joint)
        facts = read_facts(
            joint.module,
            num_fwd_outputs=joint.num_fwd_outputs,
            cost=cost,
            policy=decided.get,
            workspace=lambda node: measured(node) + inner_bytes(node),
            bind_preferences=bind_preferences,
            never_stored=never_stored,
            is_agreed=self.is_agreed,
            in_place=self._writes_in_place,
        )
        if self.is_eager:
            facts = replace(facts, program=held_by_region(facts))
            facts = replace(facts, program=held_by_nodes(facts))
        sending = OFFLOAD if bind_preferences else (CheckpointPolicy.MUST_CPU_OFFLOAD,)
        asked = {**_region_answers(joint.module.graph), **_given(decided)}
        sent = frozenset(node for node, answer in asked.items() if answer in sending)
        if self.offload is not None:
            facts = with_link(facts, self.offload, sent, device, self.policy, self.device)
        elif CheckpointPolicy.MUST_CPU_OFFLOAD in asked.values():
            raise InvalidOption(
                f"{sender(self.policy)} sends values away, and there is no offload=. Give a "
                "tier to fxckpt.Backend(policy=..., offload=fxckpt.tiers.Host(...)), to "
                "fxckpt.rewrite, or to fxckpt.checkpoint, which takes no budget beside it."
            )
        return facts, cost.name

    def budget_bytes(
        self, budget: budgets.Budget, baseline_peak_bytes: int, device: torch.device
    ) -> int | None:
        """Return a budget in bytes, or None for none.

        Raises :class:`InvalidBudget` for ``"auto"`` on a device that is elsewhere.
        """
        if self.device is not None and budgets.parse(budget) == "auto":
            raise InvalidBudget(
                f"budget='auto' reads the free memory of a device at hand, and {self.device.name} "
                f"is named. Give bytes: it has {budgets.format_bytes(self.device.memory_bytes)} "
                "for parameters, gradients, optimizer states and the step."
            )
        with outside_trace():  # An optimizer is asked for its state, by tensors that are not fake.
            return budgets.resolve(budget, baseline_peak_bytes=baseline_peak_bytes, device=device)

    def measured(self) -> Workspace:
        """Return the measurement of workspace, which runs each distinct op once."""
        return MeasuredWorkspace() if self.measure_workspace else stated_workspace

    def _decided(self, joint: Joint) -> dict[fx.Node, CheckpointPolicy | None]:
        """Return the policy's answer for each op of the forward."""
        if self.policy is None:
            return {}
        facts = read_facts(
            joint.module, num_fwd_outputs=joint.num_fwd_outputs, cost=checked(FlopCost())
        )
        values = values_of(facts)
        answers = decide_all(self.policy, values)
        return {
            facts.op_node[value.node]: answer for value, answer in zip(values, answers, strict=True)
        }

    def partition(self, joint: Joint) -> tuple[fx.GraphModule, fx.GraphModule, Plan]:
        """Return the forward and the backward of a joint graph, and the plan they follow.

        ``joint`` is used up. Raises what :meth:`plan` raises.
        """
        prepare(joint)
        begin = time.perf_counter()
        chosen, facts, plan = self.plan_with_tiles(joint)
        log.debug("plan took %.1f ms", 1e3 * (time.perf_counter() - begin))
        if chosen is joint:
            return (*emit_halves(self.emission(joint, facts, plan)), plan)
        is_asked = self.is_fixed or asks_for_tiles(self.tile, self._tile_patterns)
        with leaving_out(str(plan.tiling), is_asked=is_asked):
            return (*emit_halves(self.emission(chosen, facts, plan)), plan)
        facts, plan = self._plan_by_search(joint)
        log_plan(plan, time.perf_counter() - begin)
        return (*emit_halves(self.emission(joint, facts, plan)), plan)

    def emission(self, joint: Joint, facts: Facts, plan: Plan) -> Emission:
        """Return a planned joint graph, ready to be emitted.

        Raises :class:`InvalidOption` for a plan that sends values away, without an offload or to
        one that holds less.
        """
        if plan.offloads and self.offload is None:
            raise InvalidOption(
                f"the plan sends {len(plan.offloads)} values away, and there is no offload=. Give "
                "the backend a tier: fxckpt.Backend(policy=plan, offload=fxckpt.tiers.Host(...))."
            )
        device = device_of(joint.module.graph)
        if plan.offloads and device.type not in ("cpu", "cuda"):
            raise InvalidOption(
                f"offload={self.offload!r}: values are sent away from the CPU and from CUDA "
                f"devices, and the model is on {device}. Leave offload out, or plan alone: "
                "fxckpt.plan(..., offload=...)."
            )
        if self.offload is not None:
            check_fits(plan, self.offload)
        tier = None if self.offload is None else self.offload.number
        return Emission(joint, facts, plan, exact=self.exact, tier=tier)


def _region_answers(graph: fx.Graph) -> dict[fx.Node, CheckpointPolicy]:
    """Return what the checkpoint regions of a model ask for its values, as torch tags them."""
    tags = ((node, node.meta.get("recompute")) for node in graph.nodes)
    return {node: tag for node, tag in tags if isinstance(tag, CheckpointPolicy)}


def _given(
    answers: Mapping[fx.Node, CheckpointPolicy | None],
) -> dict[fx.Node, CheckpointPolicy]:
    """Return the answers that a policy gives."""
    return {node: answer for node, answer in answers.items() if answer is not None}


def planner_of(
    budget: budgets.Budget, policy: Any, cost: str | CostModel, **options: Any
) -> Planner:
    """Return the planner of a user's options; a plan given as ``policy`` is applied unchanged.

    Raises :class:`FxckptError` for invalid options.
    """
    budgets.validate(budget)
    if not isinstance(policy, Plan):
        policy = as_policy(policy)
        if policy is not None and policy.tiles():
            if "tile" not in options:  # The caller plans no tiles.
                refuse_tiles(policy)
            if options["tile"] is None:
                options["tile"] = "auto"
    check_tile(options.get("tile"))
    if None not in (options.get("tile"), options.get("offload")):
        raise InvalidOption(
            f"tile={options['tile']!r}, offload={options['offload']!r}: tiles are planned for "
            "values that stay on the device. Use one of the two."
        )
    resolve(cost, None, named=options.get("device"))
    if not isinstance(policy, Plan):
        return Planner(budget=budget, policy=policy, cost=cost, **options)
    if options.get("tile") is not None:
        raise InvalidOption(
            f"tile={options['tile']!r} and a plan were given: a plan knows its tiles. Leave tile "
            "out."
        )
    if budget is not None:
        raise InvalidOption(
            f"budget={budget!r} and a plan were given: a plan is applied as it is. Leave one of "
            "them out."
        )
    return Planner(cost=cost, known=(policy,), is_fixed=True, **options)


def is_of_graph(plan: Plan, lines: tuple[str, ...]) -> bool:
    """Return whether a plan was made for a graph, given as :meth:`Planner.lines`.

    A plan that is given, and a graph that was stored, have lost the annotations of regions.
    """
    return plan.graph == lines or without_regions(plan.graph) == lines


def device_of(graph: fx.Graph) -> torch.device:
    """Return the first accelerator among the devices of a graph's values, or the CPU.

    A joint graph keeps its values under one name, a graph of Dynamo under another.
    """
    first = torch.device("cpu")
    for node in graph.nodes:
        for key in ("val", "example_value"):
            for tensor in tensors(node.meta.get(key)):
                if tensor.device.type != "cpu":
                    return tensor.device
    return first
