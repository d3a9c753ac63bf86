"""Tiles, priced: a joint graph with regions of independent rows unrolled, if that is faster.

A variant of a graph has the regions of a few groups (identical layers are one group) unrolled into
some number of tiles. It is a graph like any other, planned by the same planner. Variants are
screened by a lower bound on the time of any plan within the budget, which is also the order in
which they are planned; the search ends where the bound of the next one is no less than the time of
the best plan. The untiled graph is a variant too, so that tiles are chosen only if they gain.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from torch import fx

from fxckpt import budgets
from fxckpt.errors import BudgetInfeasible, InvalidOption, SlowdownInfeasible
from fxckpt.passes.analysis.joint import Facts
from fxckpt.passes.graphs import Joint
from fxckpt.passes.tiles.gradient_ahead import run_ahead
from fxckpt.passes.tiles.row_regions import RowRegion, row_regions
from fxckpt.passes.tiles.unroll import unroll
from fxckpt.plans.types import Plan, Tiling
from fxckpt.solver.exact.lower_bounds import LowerBounds
from fxckpt.solver.program import Program
from fxckpt.solver.search import price_range
from fxckpt.torch_private import is_symbolic
from fxckpt.torch_private.inductor.default_partitioner import copied

COUNTS = (2, 4, 8, 16, 32)
"""Numbers of tiles that are tried."""
GROUPS = 2
"""Most groups of regions that are tiled, the widest first."""
PLANNED = 3
"""Most variants that are planned beside the untiled graph."""

WORTH = 0.95
"""Share of the floor that tiles must reach to be offered."""

PlanWithin = Callable[[Joint, budgets.Budget], tuple[Facts, Plan]]
"""Plans a joint graph within a budget."""
Read = Callable[[Joint], Program]
"""Reads a joint graph as it is planned."""


def check_tile(tile: int | str | None) -> None:
    """Raise :class:`InvalidOption` for a number of tiles that is none."""
    is_count = isinstance(tile, int) and not isinstance(tile, bool) and tile >= 2
    if tile is not None and tile != "auto" and not is_count:
        raise InvalidOption(
            f"tile={tile!r} is no way to tile. Use 'auto', which tries none and up to {COUNTS[-1]} "
            "tiles, a number of tiles from 2, or None."
        )


def groups_of(graph: fx.Graph) -> list[list[tuple[RowRegion, ...]]]:
    """Return the regions of a graph by group, the widest group first.

    Regions of one group have as many ops and as wide values as one another.
    """
    groups: dict[tuple[int, int, int], list[tuple[RowRegion, ...]]] = {}
    for ways in row_regions(graph):
        first = ways[0]
        key = (first.wide_bytes, len(first.forward), len(first.backward))
        groups.setdefault(key, []).append(ways)
    return [groups[key] for key in sorted(groups, reverse=True)]


def tiled(joint: Joint, tiling: Tiling) -> tuple[Joint, Tiling] | None:
    """Return a copy of a joint graph that is tiled, and the tiling with the regions' names.

    None where the gradients of its widest region cannot be computed with its forward.
    """
    module = copied(joint.module)
    groups = groups_of(module.graph)[: tiling.groups]
    if tiling.is_ahead:
        ways = groups[0][0]
        if not run_ahead(module.graph, next(w for w in ways if w.divides(tiling.count))):
            return None
        groups = groups_of(module.graph)[: tiling.groups]
    chosen = [
        way
        for ways in (ways for group in groups for ways in group)
        if (way := next((w for w in ways if w.divides(tiling.count)), None)) is not None
    ]
    order = {node: i for i, node in enumerate(module.graph.nodes)}
    chosen.sort(key=lambda way: order[way.forward[0]])
    unroll(module.graph, chosen, tiling.count)
    module.graph.lint()
    module.recompile()
    names = tuple(way.name for way in chosen)
    return Joint(module, joint.num_fwd_outputs), replace(tiling, regions=names)


def tilings(graph: fx.Graph, tile: int | str) -> Iterator[Tiling]:
    """Yield the tilings of a graph that are worth a look."""
    groups = groups_of(graph)[:GROUPS]
    for count in COUNTS if tile == "auto" else (int(tile),):
        for number in range(1, len(groups) + 1):
            # A group that cannot be divided so finely makes no variant of its own.
            if any(way.divides(count) for ways in groups[number - 1] for way in ways):
                yield Tiling(count, number)
                if len(groups[0]) == 1 and any(way.divides(count) for way in groups[0][0]):
                    yield Tiling(count, number, is_ahead=True)


def refuse_symbolic(graph: fx.Graph, tile: int | str) -> None:
    """Raise :class:`InvalidOption` for a graph with sizes that vary."""
    names = [n.name for n in graph.nodes if n.op == "placeholder" and is_symbolic(n)]
    if names:
        raise InvalidOption(
            f"tile={tile!r} needs fixed sizes, and the graph takes {', '.join(names[:3])}, of any "
            "value. Compile with dynamic=False, or leave tile out."
        )


@dataclass(frozen=True)
class Choice:
    """A graph and its plan."""

    joint: Joint
    facts: Facts
    plan: Plan

    @property
    def seconds(self) -> float:
        """Seconds of the planned step."""
        plan = self.plan
        return plan.step_seconds + plan.recompute_seconds + plan.stall_seconds


@dataclass(frozen=True)
class TilePricer:
    """Chooses the variant of a joint graph that is fastest within a budget."""

    tile: int | str
    """``"auto"``, or the number of tiles."""
    budget: budgets.Budget
    plan: PlanWithin
    read: Read

    def __call__(self, joint: Joint) -> Choice:
        """Return the best variant and its plan.

        Raises :class:`BudgetInfeasible` where none is within the budget.
        """
        refuse_symbolic(joint.module.graph, self.tile)
        names = list(tilings(joint.module.graph, self.tile))
        untiled: Choice | None = None
        limit: int | None = None
        error: BudgetInfeasible | None = None
        try:
            untiled = Choice(joint, *self.plan(joint, self.budget))
            limit = untiled.plan.budget_bytes
        except BudgetInfeasible as found:
            error, limit = found, found.budget_bytes
        goal = budgets.parse(self.budget)
        if isinstance(goal, budgets.LeastMemory):
            assert untiled is not None
            return self._least_memory(joint, untiled, goal, names)
        best = untiled if self.tile == "auto" or not names else None
        if best is not None and best.seconds <= best.plan.step_seconds:
            return best
        floors = [] if error is None else [error.floor_bytes]
        bounded = sorted(self._screened(joint, names, limit), key=lambda v: v.seconds)
        for variant in bounded[:PLANNED]:
            if best is not None and variant.seconds >= best.seconds:
                break
            try:
                facts, plan = self.plan(variant.joint, limit)
            except BudgetInfeasible as found:
                floors.append(found.floor_bytes)
                continue
            choice = Choice(variant.joint, facts, replace(plan, tiling=variant.tiling))
            if best is None or choice.seconds < best.seconds:
                best = choice
        if best is not None:
            return best
        assert error is not None
        raise infeasible_with_tiles(error, self.tile, min(floors))

    def _screened(
        self, joint: Joint, names: Sequence[Tiling], limit: int | None
    ) -> Iterator[Variant]:
        """Yield the variants that the budget does not rule out, each with its bound."""
        for name in names:
            if (found := tiled(joint, name)) is None:
                continue
            graph, tiling = found
            program = self.read(graph)
            bounds = LowerBounds(program, *price_range(program))
            if limit is not None and bounds.peak_bytes > limit:
                continue
            extra = 0.0 if limit is None else bounds.seconds(limit).seconds
            yield Variant(graph, tiling, program.step_seconds + extra)

    def _least_memory(
        self, joint: Joint, untiled: Choice, goal: budgets.LeastMemory, names: Sequence[Tiling]
    ) -> Choice:
        """Return the variant of least peak that takes no longer than it may."""
        allowed = (1 + goal.max_slowdown) * untiled.plan.step_seconds
        best = untiled if self.tile == "auto" or not names else None
        for variant in sorted(self._screened(joint, names, None), key=lambda v: -v.tiling.count)[
            :PLANNED
        ]:
            slack = allowed / variant.seconds - 1
            if slack < 0:
                continue
            within = goal if math.isinf(slack) else budgets.LeastMemory(slack)
            try:
                facts, plan = self.plan(variant.joint, within)
            except SlowdownInfeasible:
                continue
            choice = Choice(variant.joint, facts, replace(plan, tiling=variant.tiling))
            if best is None or choice.plan.peak_bytes < best.plan.peak_bytes:
                best = choice
        return untiled if best is None else best


@dataclass(frozen=True)
class Variant:
    """A tiled graph, with the least time that any plan of it may take."""

    joint: Joint
    tiling: Tiling
    seconds: float


def reach(joint: Joint, plan: PlanWithin, error: BudgetInfeasible) -> int | None:
    """Return the least peak of a tiled graph, or None if tiles lower it by nothing much."""
    graph = joint.module.graph
    if any(is_symbolic(n) for n in graph.find_nodes(op="placeholder")):
        return None
    names = list(tilings(graph, "auto"))
    if not names:
        return None
    finest = tiled(joint, max(names, key=lambda name: (name.groups, name.count, -name.is_ahead)))
    assert finest is not None
    try:
        floor = plan(finest[0], error.budget_bytes)[1].floor_bytes
    except BudgetInfeasible as found:
        floor = found.floor_bytes
    return floor if floor < WORTH * error.floor_bytes else None


def offering_tiles(error: BudgetInfeasible, floor_bytes: int) -> BudgetInfeasible:
    """Return an error for a budget below the floor that says what tiles would reach."""
    return BudgetInfeasible(
        f"{error} With tile='auto' it could reach about {budgets.format_bytes(floor_bytes)}; "
        "sums over rows, gradients of weights among them, are then added up in another order.",
        floor_bytes=error.floor_bytes,
        budget_bytes=error.budget_bytes,
    )


def infeasible_with_tiles(
    error: BudgetInfeasible, tile: int | str, floor_bytes: int
) -> BudgetInfeasible:
    """Return the error for a budget below the floor of every variant."""
    reached = budgets.format_bytes(floor_bytes)
    return BudgetInfeasible(
        f"{error} tile={tile!r} reaches {reached} ('{floor_bytes}B').",
        floor_bytes=floor_bytes,
        budget_bytes=error.budget_bytes,
    )
