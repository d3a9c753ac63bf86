"""Tiles where Inductor compiles: the model of its kernels proposes, the lowering decides.

The untiled graph is searched first. If its plan recomputes, or none fits, the tiled variant that
the model expects to be fastest is searched too, and the faster of the two plans is taken. Inductor
keeps the tiles apart, as it is held to the plan's order.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from fxckpt import budgets
from fxckpt.errors import BudgetInfeasible, SlowdownInfeasible
from fxckpt.inductor.autotune import PlannedHalves
from fxckpt.passes.graphs import Joint
from fxckpt.planner.tiles import Groups, TilePricer, finest, infeasible_with_tiles
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

        Raises :class:`BudgetInfeasible` where none is within the budget, and what
        :meth:`TilePricer.groups` raises.
        """
        pricer, goal = self.pricer, budgets.parse(self.pricer.budget)
        is_least = isinstance(goal, budgets.LeastMemory)
        groups = pricer.groups(joint)
        untiled: PlannedHalves | None = None
        error: BudgetInfeasible | None = None
        if pricer.tile == "auto":
            try:
                whole = Joint(copied(joint.module), joint.num_fwd_outputs)
                untiled = self.search(whole, pricer.budget)
            except BudgetInfeasible as found:
                error = found
            if untiled is not None and not is_least and not untiled[2].schedule:
                return untiled
        variant = self._variant(joint, groups)
        if variant is None:
            return self._whole(joint, untiled, error)
        graph, tiling, limit = variant
        # A fraction is one of the untiled peak as it was lowered.
        if not is_least and untiled is not None:
            limit = untiled[2].budget_bytes
        elif error is not None:
            limit = error.budget_bytes
        halves: PlannedHalves | None = None
        try:
            with pricer.trying(tiling):
                halves = self.search(graph, limit)
        except SlowdownInfeasible:
            return self._whole(joint, untiled, error)
        except BudgetInfeasible as found:
            if untiled is not None:
                return untiled
            floors = [found.floor_bytes, *([] if error is None else [error.floor_bytes])]
            raise infeasible_with_tiles(error or found, pricer.tile, min(floors)) from found
        if halves is None:
            return self._whole(joint, untiled, error)
        plan = replace(halves[2], tiling=tiling)
        if untiled is not None and not _is_better(plan, untiled[2], is_least=is_least):
            return untiled
        return (*halves[:2], plan)

    def _whole(
        self, joint: Joint, untiled: PlannedHalves | None, error: BudgetInfeasible | None
    ) -> PlannedHalves:
        """Return the halves of the untiled graph, if it was searched, with its error or without.

        Raises the error.
        """
        if error is not None:
            raise error
        return self.search(joint, self.pricer.budget) if untiled is None else untiled

    def _variant(self, joint: Joint, groups: Groups) -> tuple[Joint, Tiling, budgets.Budget] | None:
        """Return the tiled variant to search, and a budget of it by the model; None if none.

        The model may be wrong about what fits: where it says that nothing does, it is the finest.
        """
        goal = budgets.parse(self.pricer.budget)
        try:
            choice = self.pricer.chosen(joint, groups)
        except BudgetInfeasible as found:
            variant = None
            with self.pricer.trying():
                variant = finest(joint, groups, self.pricer.tile, found.budget_bytes)
            return None if variant is None else (*variant, found.budget_bytes)
        plan = choice.plan
        if plan.tiling is None:
            return None
        if not isinstance(goal, budgets.LeastMemory):
            return choice.joint, plan.tiling, plan.budget_bytes
        # Extra time is beyond the untiled step, and the tiles have taken some of it.
        allowed = (1 + goal.max_slowdown) * self.pricer.read(joint).step_seconds
        slack = max(0.0, allowed / plan.step_seconds - 1)
        return choice.joint, plan.tiling, budgets.LeastMemory(slack)


def _is_better(plan: Plan, other: Plan, *, is_least: bool) -> bool:
    """Return whether a plan is faster than another one, or of a lower peak if that was asked."""
    if is_least:
        return (plan.compiled_peak_bytes or 0) < (other.compiled_peak_bytes or 0)
    return plan.step_seconds + plan.recompute_seconds < other.step_seconds + other.recompute_seconds
