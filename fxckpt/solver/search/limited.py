"""Search of a program with limits on the saved bytes of regions, by choices within the limits."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from fxckpt.errors import BudgetInfeasible
from fxckpt.solver.cuts.saved_limits import SavedChoice, SavedLimits, exceeded
from fxckpt.solver.exact.lower_bounds import Bound
from fxckpt.solver.exact.milp import optimum
from fxckpt.solver.program import Program
from fxckpt.solver.search.candidates import Candidate
from fxckpt.solver.search.local_search import LocalSearch
from fxckpt.solver.search.options import SearchOptions


class LimitedSearch(LocalSearch):
    """All candidates seen for one program with limits on saved values.

    Each part is a search in which only a choice of values within the limits may be saved. The
    first choices do not depend on the budget; more are made at its price.
    """

    def __init__(self, options: SearchOptions, program: Program) -> None:
        super().__init__(options, program)
        self.limits = SavedLimits(program, self.low, self.high)
        self.parts: dict[frozenset[int], LocalSearch] = {}
        self.opened: set[float] = set()
        """Prices of all saved values that have a part."""

    def _open(self, price: float) -> None:
        """Add the part of the choice at a price of all saved values."""
        if price in self.opened:
            return
        self.opened.add(price)
        if (choice := self.limits.choose(price)) is not None:
            self._add(choice)

    def _add(self, choice: SavedChoice) -> None:
        """Add the part of a choice, with what else its recomputes leave room for."""
        candidate = self.evaluate(choice.schedule(self.program))
        if candidate in self.legal:
            candidate = self.retained(candidate, candidate.simulation.peak_bytes, None)
            candidate = self.retained(candidate, self._no_limit, None)
        saved = frozenset(candidate.schedule.saved)
        if saved in self.parts or exceeded(self.program, saved):
            return
        mask = np.zeros(len(self.program.storages), dtype=bool)
        mask[list(saved)] = True
        self.parts[saved] = LocalSearch(self.options, self.limits.restricted(mask))

    @property
    def _no_limit(self) -> int:
        """A peak that no schedule exceeds."""
        tables = self.program.tables
        return int(tables.bytes.sum() + tables.workspace_bytes.sum() + tables.written_bytes.sum())

    def _gather(self) -> None:
        """Take over the candidates of all parts."""
        for part in self.parts.values():
            for candidate in part.legal:
                if candidate.schedule not in self.seen:
                    self.seen[candidate.schedule] = candidate
                    self.legal.append(candidate)

    def least_time(self) -> Candidate:
        """Return the candidate of least extra time, and of least peak among those."""
        self._open(0.0)
        self._add(self.limits.fewest())
        if not self.parts:
            raise infeasible_together(self.program, self.limits.fewest())
        for part in self.parts.values():
            part.least_time()
        self._gather()
        self._solve_if_small(self._no_limit)
        return min(self.legal, key=lambda c: c.rank)

    def least_peak(self) -> Candidate:
        """Return the candidate of least peak."""
        self._open((self.low * self.high) ** 0.5)
        for part in self.parts.values():
            part.least_peak()
        self._gather()
        return self.lowest_peak()

    def fit(self, limit: int, factors: Sequence[float]) -> None:
        """Cut at prices around that of the lower bound at ``limit``."""
        price = self.bound(limit).price or self.low
        for factor in (1.0, 4.0):
            self._open(price * factor)
        for part in self.parts.values():
            part.fit(limit, factors)
        self._gather()

    def refine(
        self, limit: int, count: int, perturbations: Sequence[float], exact_states: int | None
    ) -> None:
        """Refine each part, then retain what the limits leave room for."""
        for part in self.parts.values():
            part.refine(limit, count, perturbations, exact_states)
        self._gather()
        if (best := self.best(limit)) is not None:
            self.retained(best, limit, None)
        if exact_states is not None:
            self._solve_if_small(limit)

    def repair_chains(self, limit: int) -> None:
        """Repair the schedules of the chains of each part."""
        for part in self.parts.values():
            part.repair_chains(limit)
        self._gather()

    def recompute_more(self) -> None:
        """Lower the least peak of each part by schedules of chains that recompute more."""
        for part in self.parts.values():
            part.recompute_more()
        self._gather()

    def _solve_if_small(self, limit: int) -> None:
        """Evaluate the schedule of an exact solver; both know the limits."""
        options, target = self.options, (1 + self.options.tolerance) * self.bound(limit).seconds
        if self.least_seconds(limit) <= target:
            return
        if self.exact.size <= options.exact_states_along:
            self.evaluate_exact(limit)
        elif len(self.program.ops) * len(self.program.backward) <= options.exact_size:
            nodes = options.exact_nodes
            self.evaluate_optimum(optimum(self.exact.program, limit, seconds=math.inf, nodes=nodes))

    def bound(self, limit: int | None) -> Bound:
        """Return the greatest of the bounds by the peak and by the limits on saved values."""
        by_peak = super().bound(limit)
        if limit is None:
            room = None
        else:
            outputs = int(self.program.tables.bytes[self.program.tables.is_output].sum())
            room = limit - outputs - self.program.tangent_bytes
        return Bound(max(by_peak.seconds, self.limits.bound(room)), by_peak.price)


def infeasible_together(program: Program, fewest: SavedChoice) -> BudgetInfeasible:
    """Return the error for limits that no plan was found to keep, with the fewest bytes found."""
    saved = np.flatnonzero(fewest.saved).tolist()
    over = exceeded(program, saved) or program.limits
    tables = program.tables
    parts = []
    for limit in over:
        nbytes = sum(int(tables.bytes[s]) for s in {*limit.storages} & {*saved})
        parts.append(f"{limit.name} allows {limit.bytes} bytes, and {nbytes} are saved")
    return BudgetInfeasible(
        "the budgets of these regions cannot be kept together: " + "; ".join(parts) + " in the "
        "plan that saves the fewest bytes of all of them. Raise them to that.",
        floor_bytes=sum(
            int(tables.bytes[s]) for limit in over for s in {*limit.storages} & {*saved}
        ),
        budget_bytes=sum(limit.bytes for limit in over),
    )
