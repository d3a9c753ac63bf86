"""Tiles where Inductor compiles: the model of its kernels proposes, the lowering decides.

The untiled graph is searched first. If its plan recomputes, or none fits, the tiled variant that
the model expects to be fastest is searched too, and the faster of the two plans is taken. Inductor
keeps the tiles apart, as it is held to the plan's order.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from fxckpt import budgets
from fxckpt.errors import BudgetInfeasible
from fxckpt.inductor.autotune import PlannedHalves
from fxckpt.passes.graphs import Joint
from fxckpt.planner.tiles import TilePricer, groups_of, infeasible_with_tiles, tiled, tilings
from fxckpt.plans.types import Plan, Tiling
from fxckpt.torch_private.inductor.default_partitioner import copied


@dataclass(frozen=True)
class TileSearch:
    """Searches a joint graph, and the variant of it with tiles that promises most."""

    pricer: TilePricer
    """Chooses a variant by the model."""
    search: Callable[[Joint, budgets.Budget], PlannedHalves]
    """Searches a graph, which it uses up, for the fastest plan within a budget, by lowerings."""

    def __call__(self, joint: Joint) -> PlannedHalves:
        """Return the halves of the fastest plan.

        Raises :class:`BudgetInfeasible` where none is within the budget.
        """
        budget, is_auto = self.pricer.budget, self.pricer.tile == "auto"
        is_least = isinstance(budgets.parse(budget), budgets.LeastMemory)
        untiled: PlannedHalves | None = None
        error: BudgetInfeasible | None = None
        if is_auto:
            try:
                untiled = self.search(Joint(copied(joint.module), joint.num_fwd_outputs), budget)
            except BudgetInfeasible as found:
                error = found
            if untiled is not None and not is_least and not untiled[2].schedule:
                return untiled
        limit = budget if is_least else _limit(untiled, error)
        variant = self._variant(joint, limit)
        if variant is None:
            if error is not None:
                raise error
            return self.search(joint, budget) if untiled is None else untiled
        graph, tiling, planned_limit = variant
        try:
            halves = self.search(graph, planned_limit if limit is None else limit)
        except BudgetInfeasible as found:
            if untiled is not None:
                return untiled
            floors = [found.floor_bytes, *([] if error is None else [error.floor_bytes])]
            raise infeasible_with_tiles(error or found, self.pricer.tile, min(floors)) from found
        plan = replace(halves[2], tiling=tiling)
        if untiled is not None and not _is_better(plan, untiled[2], is_least=is_least):
            return untiled
        return (*halves[:2], plan)

    def _variant(
        self, joint: Joint, limit: budgets.Budget
    ) -> tuple[Joint, Tiling, budgets.Budget] | None:
        """Return the tiled variant to search, and the budget that the model took; None if none.

        The model may be wrong about what fits: where it says that nothing does, it is the finest.
        """
        try:
            choice = self.pricer(joint)
        except BudgetInfeasible as found:
            groups = groups_of(joint.module.graph)
            names = tilings(groups, self.pricer.tile, found.budget_bytes)
            finest = max(names, key=lambda n: (n.groups, n.count, -n.is_ahead), default=None)
            variant = None if finest is None else tiled(joint, finest, groups)
            return None if variant is None else (*variant, found.budget_bytes)
        if choice.plan.tiling is None:
            return None
        return choice.joint, choice.plan.tiling, choice.plan.budget_bytes


def _limit(untiled: PlannedHalves | None, error: BudgetInfeasible | None) -> int | None:
    """Return the budget in bytes: a fraction is one of the untiled peak."""
    if untiled is not None:
        return untiled[2].budget_bytes
    return None if error is None else error.budget_bytes


def _is_better(plan: Plan, other: Plan, *, is_least: bool) -> bool:
    """Return whether a plan is faster than another one, or of a lower peak if that was asked."""
    if is_least:
        return (plan.compiled_peak_bytes or 0) < (other.compiled_peak_bytes or 0)
    return plan.step_seconds + plan.recompute_seconds < other.step_seconds + other.recompute_seconds
