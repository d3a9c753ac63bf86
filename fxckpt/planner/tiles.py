"""Tiles, priced: a joint graph with regions of independent rows unrolled, if that is faster.

A variant of a graph has the regions of a few groups (identical layers are one group) unrolled into
some number of tiles. It is a graph like any other, planned by the same planner. Variants are
screened by a lower bound on the time of any plan within the budget, which is also the order in
which they are planned; the search ends where the bound of the next one is no less than the time of
the best plan. The untiled graph is a variant too, so that tiles are chosen only if they gain.
A variant that fails is left out, with a warning, unless its tiles were asked for.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, replace

from torch import fx

from fxckpt import budgets
from fxckpt.errors import (
    BudgetInfeasible,
    InvalidOption,
    PolicyMatchesNothing,
    SlowdownInfeasible,
)
from fxckpt.passes.analysis.graph_snapshot import module_path
from fxckpt.passes.analysis.joint import Facts
from fxckpt.passes.graphs import Joint
from fxckpt.passes.tiles.equal_sizes import guard_gathers
from fxckpt.passes.tiles.fixed_sizes import at_planned_sizes
from fxckpt.passes.tiles.gradient_ahead import run_ahead
from fxckpt.passes.tiles.row_regions import RowRegion, obstacles, row_regions
from fxckpt.passes.tiles.unroll import unroll
from fxckpt.planner.refusals import leaving_out, warn_of_no_tiles
from fxckpt.plans.types import Plan, Tiling
from fxckpt.policies.base import TilePattern
from fxckpt.policies.selectors import matched_module, nearest_modules
from fxckpt.solver.exact.lower_bounds import LowerBounds
from fxckpt.solver.program import Program
from fxckpt.solver.search.prices import price_range
from fxckpt.torch_private.inductor.default_partitioner import copied

COUNTS = (2, 4, 8, 12, 16, 24, 32)
"""Numbers of tiles that are tried."""
WIDE_LIVE = 3
"""Wide values that are live together at the peak of a tile."""
SHARE = 0.2
"""Share of a limit that they should take."""
GROUPS = 2
"""Most groups of regions that are tiled, the widest first."""
PLANNED = 3
"""Most variants that are planned beside the untiled graph."""

ALL = "all of this graph"
"""Text for the tiles of no one variant."""

WORTH = 0.95
"""Share of the floor that tiles must reach to be offered."""

PlanWithin = Callable[[Joint, budgets.Budget], tuple[Facts, Plan]]
"""Plans a joint graph within a budget."""
Groups = list[list[tuple[RowRegion, ...]]]
"""Groups of the regions of a graph, each region with the ways to number its rows."""
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


def asks_for_tiles(tile: int | str | None, patterns: Sequence[TilePattern]) -> bool:
    """Return whether tiles were asked for, by their number or for modules, and not left open."""
    return tile != "auto" or not all(pattern.may_miss for pattern in patterns)


def groups_of(graph: fx.Graph) -> Groups:
    """Return the regions of a graph by group, the widest group first.

    Regions of one group have as many ops and as wide values as one another. Sizes may be guarded.
    """
    guard_gathers(graph)
    groups: dict[tuple[int, int, int], list[tuple[RowRegion, ...]]] = {}
    for ways in row_regions(graph):
        first = ways[0]
        key = (first.wide_bytes, len(first.forward), len(first.backward))
        groups.setdefault(key, []).append(ways)
    return [groups[key] for key in sorted(groups, reverse=True)]


def kept_whole(graph: fx.Graph, pattern: str = "**") -> str:
    """Return what keeps matmuls whose results are wide, in modules that fit, from being tiled."""
    texts = [
        f"The matmul of {module_path(seed) or seed.name} is kept whole by {obstacle}."
        for seed, obstacle in obstacles(graph).items()
        if pattern == "**" or matched_module(module_path(seed), pattern) is not None
    ]
    return " ".join(texts[:3])


def groups_within(graph: fx.Graph, groups: Groups, patterns: Sequence[TilePattern]) -> Groups:
    """Return the groups with the regions that begin in modules which fit one of the patterns.

    Raises :class:`PolicyMatchesNothing` for a pattern without a region.
    """
    paths = {module_path(ways[0].seed) for group in groups for ways in group}
    for tile in patterns:
        fitting = [path for path in paths if matched_module(path, tile.pattern) is not None]
        if not fitting and not tile.may_miss:
            near = nearest_modules(tile.pattern, paths) if any(paths) else "There is no region."
            raise PolicyMatchesNothing(
                f"tile({tile.pattern!r}): no region of independent rows that could be tiled begins "
                f"in such a module. {kept_whole(graph, tile.pattern) or near}"
            )

    def fits(ways: tuple[RowRegion, ...]) -> bool:
        path = module_path(ways[0].seed)
        return any(matched_module(path, tile.pattern) is not None for tile in patterns)

    kept = ([ways for ways in group if fits(ways)] for group in groups)
    return [group for group in kept if group]


def _groups_named(graph: fx.Graph, names: Sequence[str]) -> Groups:
    """Return the groups of a graph with the regions of these names; with all if there are none."""
    if not names:
        return groups_of(graph)
    kept = ([w for w in group if any(way.name in names for way in w)] for group in groups_of(graph))
    return [group for group in kept if group]


def tiled(
    joint: Joint, tiling: Tiling, groups: Groups | None = None, *, is_fixed: bool = False
) -> tuple[Joint, Tiling] | None:
    """Return a copy of a joint graph that is tiled, and the tiling with the regions' names.

    ``groups`` are those of the graph, if they are known, or of the one whose sizes vary where those
    of this one are fixed. None where the gradients of its widest region cannot be computed with its
    forward.
    """
    if groups is None:
        groups = _groups_named(joint.module.graph, tiling.regions)
    module = copied(joint.module)
    chosen = _apart(
        moved.at_planned_sizes() if is_fixed else moved
        for group in groups[: tiling.groups]
        for ways in group
        if (way := next((w for w in ways if w.divides(tiling.count)), None)) is not None
        for moved in (way.moved_to(module.graph),)
    )
    if tiling.is_ahead:
        if not run_ahead(module.graph, chosen[0]):
            return None
        # The others may read what is now scaled, and the first one what lay behind it.
        again = [way.grown_again() for way in chosen]
        if again[0] is None or not again[0].divides(tiling.count):
            return None
        chosen = _apart(way for way in again if way is not None and way.divides(tiling.count))
    order = {node: i for i, node in enumerate(module.graph.nodes)}
    chosen.sort(key=lambda way: order[way.forward[0]])
    unroll(module.graph, chosen, tiling.count)
    module.graph.lint()
    names = tuple(way.name for way in chosen)
    return Joint(module, joint.num_fwd_outputs), replace(tiling, regions=names)


def _apart(regions: Iterable[RowRegion]) -> list[RowRegion]:
    """Return regions without those that share an op with one before."""
    kept: list[RowRegion] = []
    for region in regions:
        if all(region.members.isdisjoint(other.members) for other in kept):
            kept.append(region)
    return kept


def tiled_as(joint: Joint, plan: Plan) -> Joint | None:
    """Return the graph with the tiles that a plan has; None if it cannot have them."""
    if plan.tiling is None:
        return joint
    found = tiled(joint, plan.tiling)
    return None if found is None else found[0]


def tilings(groups: Groups, tile: int | str, limit: int | None = None) -> list[Tiling]:
    """Return the tilings that are worth a look, of a graph with these groups of regions.

    Of the numbers of tiles there are those from the least with which the wide values of a tile are
    within the limit to the least with which they take but :data:`SHARE` of it, and at least two.
    Without a limit they are the greatest. A group of which they take no more untiled is left whole.
    """
    if not groups:
        return []
    room = SHARE * limit if limit else 0.0
    needed = [WIDE_LIVE * group[0][0].wide_bytes for group in groups[:GROUPS]]
    counts: tuple[int, ...] = COUNTS if tile == "auto" else (int(tile),)
    if tile == "auto":
        enough = [n for n in counts if needed[0] <= n * room]
        at = counts.index(enough[0]) if enough else len(counts) - 1
        within = [i for i, n in enumerate(counts) if needed[0] <= n * (limit or 0)]
        counts = counts[max(0, min([at - 1, *within])) : at + 1]
        if any(way.has_unused for ways in groups[0] for way in ways):
            counts = (1, *counts)
    numbers = [i for i, n in enumerate(needed, 1) if i == 1 or n > room]
    found = []
    for count in counts:
        for number in numbers:
            # A group that cannot be divided so finely makes no variant of its own.
            if any(way.divides(count) for ways in groups[number - 1] for way in ways):
                found.append(Tiling(count, number))
                if len(groups[0]) == 1 and any(way.divides(count) for way in groups[0][0]):
                    found.append(Tiling(count, number, is_ahead=True))
    return found


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
    patterns: tuple[TilePattern, ...] = ()
    """Modules of whose regions alone there may be tiles; none allows all."""

    def __call__(self, joint: Joint) -> Choice:
        """Return the best variant and its plan.

        Raises :class:`BudgetInfeasible` where none is within the budget.
        """
        return self.chosen(joint, self.groups(joint))

    def chosen(self, joint: Joint, groups: Groups) -> Choice:
        """Return the best variant and its plan, with tiles of some groups of regions.

        Raises :class:`BudgetInfeasible` where none is within the budget.
        """
        untiled: Choice | None = None
        limit: int | None = None
        error: BudgetInfeasible | None = None
        try:
            untiled = Choice(joint, *self.plan(joint, self.budget))
            limit = untiled.plan.budget_bytes
        except BudgetInfeasible as found:
            error, limit = found, found.budget_bytes
        goal = budgets.parse(self.budget)
        is_least = isinstance(goal, budgets.LeastMemory)
        names = tilings(groups, self.tile, None if is_least else limit)
        if not names and self.tile != "auto":
            why = (
                f"no region of independent rows can be divided so. {kept_whole(joint.module.graph)}"
            )
            warn_of_no_tiles(self.tile, why)
        if isinstance(goal, budgets.LeastMemory):
            assert untiled is not None
            return self._least_memory(joint, groups, untiled, goal, names)
        best = untiled if self.tile == "auto" or not names else None
        if best is not None and best.seconds <= best.plan.step_seconds:
            return best
        bounded = sorted(self._screened(joint, groups, names, limit), key=lambda v: v.seconds)
        best, floors = self._fastest(best, joint, groups, bounded, limit)
        if best is not None:
            return best
        if error is not None:
            raise infeasible_with_tiles(error, self.tile, min([error.floor_bytes, *floors]))
        assert untiled is not None
        warn_of_no_tiles(self.tile, "no plan with them is within the budget.")
        return untiled

    def groups(self, joint: Joint) -> Groups:
        """Return the groups of a graph that may have tiles.

        Raises :class:`PolicyMatchesNothing` for a pattern without a region.
        """
        found: Groups = []
        with self.trying():
            found = groups_of(joint.module.graph)
        graph = joint.module.graph
        return groups_within(graph, found, self.patterns) if self.patterns else found

    def trying(self, tiling: Tiling | None = None) -> AbstractContextManager[None]:
        """Return a context that leaves out tiles which fail in it, unless they were asked for.

        Without a tiling they are all tiles of the graph.
        """
        is_asked = asks_for_tiles(self.tile, self.patterns)
        return leaving_out(ALL if tiling is None else str(tiling), is_asked=is_asked)

    def _fastest(
        self,
        best: Choice | None,
        joint: Joint,
        groups: Groups,
        variants: Sequence[Variant],
        limit: int | None,
    ) -> tuple[Choice | None, list[int]]:
        """Return the fastest of ``best`` and the plans of variants, by increasing bounds.

        With it come the least peaks of the variants that are not within the limit.
        """
        floors = []
        planned = 0
        for variant in variants:
            if planned == PLANNED or (best is not None and variant.seconds >= best.seconds):
                break
            with self.trying(variant.tiling):
                try:
                    choice = self._planned(variant, joint, groups, limit)
                    if choice is not None and (best is None or choice.seconds < best.seconds):
                        best = choice
                except BudgetInfeasible as found:
                    floors.append(found.floor_bytes)
                planned += 1
        return best, floors

    def _planned(
        self, variant: Variant, joint: Joint, groups: Groups, budget: budgets.Budget
    ) -> Choice | None:
        """Return a variant of a graph with its plan; None where its sizes allow none."""
        graph, tiling = variant.joint, variant.tiling
        if graph is None:
            found = tiled(joint, tiling, groups)
            if found is None:
                return None
            graph, tiling = found
        facts, plan = self.plan(graph, budget)
        return Choice(graph, facts, replace(plan, tiling=tiling))

    def _screened(
        self, joint: Joint, groups: Groups, names: Sequence[Tiling], limit: int | None
    ) -> list[Variant]:
        """Return the variants that the budget does not rule out, each with its bound.

        Sizes that vary are fixed for it.
        """
        fixed, left = None, names[:0]
        with self.trying():
            fixed, left = at_planned_sizes(joint) if names else None, names
        found = []
        for name in left:
            with self.trying(named(name, groups)):
                made = tiled(fixed or joint, name, groups, is_fixed=fixed is not None)
                variant = None if made is None else self._bounded(*made, limit)
                if variant is not None:
                    found.append(variant if fixed is None else replace(variant, joint=None))
        return found

    def _bounded(self, graph: Joint, tiling: Tiling, limit: int | None) -> Variant | None:
        """Return a variant with its bound, or None if it is not within the budget."""
        program = self.read(graph)
        bounds = LowerBounds(program, *price_range(program))
        if limit is not None and bounds.peak_bytes > limit:
            return None
        extra = 0.0 if limit is None else bounds.seconds(limit).seconds
        return Variant(graph, tiling, program.step_seconds + extra)

    def _least_memory(
        self,
        joint: Joint,
        groups: Groups,
        untiled: Choice,
        goal: budgets.LeastMemory,
        names: Sequence[Tiling],
    ) -> Choice:
        """Return the variant of least peak that takes no longer than it may."""
        allowed = (1 + goal.max_slowdown) * untiled.plan.step_seconds
        best = untiled if self.tile == "auto" or not names else None
        variants = self._screened(joint, groups, names, None)
        finest = sorted(variants, key=lambda v: (-v.tiling.groups, -v.tiling.count))
        for variant in finest[:PLANNED]:
            slack = allowed / variant.seconds - 1
            if slack < 0:
                continue
            within = goal if math.isinf(slack) else budgets.LeastMemory(slack)
            with self.trying(variant.tiling), suppress(SlowdownInfeasible):
                choice = self._planned(variant, joint, groups, within)
                least = None if best is None else best.plan.peak_bytes
                if choice is not None and (least is None or choice.plan.peak_bytes < least):
                    best = choice
        return untiled if best is None else best


@dataclass(frozen=True)
class Variant:
    """A tiled graph, with the least time that any plan of it may take."""

    joint: Joint | None
    """None where it is yet to be unrolled at sizes that vary."""
    tiling: Tiling
    seconds: float


def named(tiling: Tiling, groups: Groups) -> Tiling:
    """Return a tiling with the names of the regions that it is of."""
    names = (ways[0].name for group in groups[: tiling.groups] for ways in group)
    return replace(tiling, regions=tuple(names))


def finest(
    joint: Joint, groups: Groups, tile: int | str, limit: int | None
) -> tuple[Joint, Tiling] | None:
    """Return the variant of the most tiles that are worth a look; None if there is none."""
    names = tilings(groups, tile, limit)
    if not names:
        return None
    return tiled(joint, max(names, key=lambda n: (n.groups, n.count, -n.is_ahead)), groups)


def reach(joint: Joint, plan: PlanWithin, error: BudgetInfeasible) -> int | None:
    """Return the least peak of a tiled graph, or None if tiles lower it by nothing much."""
    floor = error.floor_bytes
    with leaving_out(ALL, is_asked=False):
        found = finest(joint, groups_of(joint.module.graph), "auto", error.budget_bytes)
        if found is None:
            return None
        try:
            floor = plan(found[0], error.budget_bytes)[1].floor_bytes
        except BudgetInfeasible as below:
            floor = below.floor_bytes
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
