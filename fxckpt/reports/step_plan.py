"""Plan of a step of several graphs: their levels, the choice for each call, and the frontier."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from fxckpt import budgets
from fxckpt.budgets import format_bytes
from fxckpt.errors import BudgetInfeasible, InvalidOption
from fxckpt.plans.types import Plan
from fxckpt.reports.plots import draw_frontier
from fxckpt.reports.step_report import StepRow, table_of
from fxckpt.reports.tradeoff import Point, points_of, table_of_points
from fxckpt.solver.levels import Level
from fxckpt.solver.step_choice import (
    LevelChoice,
    Moment,
    StepProgram,
    bound_seconds,
    choose_few,
    fastest_choice,
    least_peak,
)
from fxckpt.utils.tables import Table
from fxckpt.utils.units import format_seconds

if TYPE_CHECKING:
    from matplotlib.axes import Axes

FEW_LEVELS = 3
"""Levels of one graph that a choice takes if it may, as each is a compile."""
WORTH_SHARE = 0.005
"""Share of the step's time below which recompute is not worth a compile."""


@dataclass(frozen=True)
class GraphLevels:
    """A graph of a step, and the plans that its calls may take."""

    number: int
    """Number of the graph, from 1."""
    source: str
    """Line of the user's code that called it first, or with which it begins."""
    plans: tuple[Plan, ...]
    """One plan a level, the fastest first."""
    levels: tuple[Level, ...]
    """Bytes and seconds of each as a part of a step."""


@dataclass(frozen=True)
class StepPlan:
    """The levels of a step's calls within a budget, made by :func:`fxckpt.plan_step`.

    Printed, it is a table of the calls by graph and level, with the step's peak.
    """

    graphs: tuple[GraphLevels, ...]
    calls: tuple[int, ...]
    """Position of the graph of each call, from 0."""
    step: StepProgram
    """Levels of the calls, and the moments of the step with the bytes outside of the graphs."""
    choice: LevelChoice
    """The level of each call."""
    budget_bytes: int | None
    baseline_peak_bytes: int
    """Peak of the uncheckpointed step."""

    @classmethod
    def within(
        cls,
        limit: int | None,
        graphs: tuple[GraphLevels, ...],
        calls: tuple[int, ...],
        step: StepProgram,
        *,
        baseline_peak_bytes: int,
    ) -> StepPlan:
        """Return the plan of least time within a limit, or of least peak if nothing fits."""
        plan = cls(graphs, calls, step, fastest_choice(step), limit, baseline_peak_bytes)
        return plan if limit is None else replace(plan, choice=plan._chosen(limit))

    def _chosen(self, limit: int) -> LevelChoice:
        spare = WORTH_SHARE * self.step_seconds
        return choose_few(self.step, limit, self.calls, most=FEW_LEVELS, spare=spare)

    @property
    def peak_bytes(self) -> int:
        """Peak of the step."""
        return self.choice.peak_bytes

    @cached_property
    def floor_bytes(self) -> int:
        """Least peak of the step that was found among the levels."""
        return least_peak(self.step).peak_bytes

    @property
    def floor_bound_bytes(self) -> int:
        """Lower bound on the peak at any levels: what is allocated outside of the graphs."""
        return self.outside_bytes

    @property
    def outside_bytes(self) -> int:
        """Most bytes allocated outside of the graphs at any time of the step."""
        return max(moment.outside_bytes for moment in self.step.moments)

    @property
    def saved_bytes(self) -> int:
        """Most bytes that the calls hold for their backwards at any time of the step."""
        return max(held for _, held, _ in self.moments())

    @property
    def step_seconds(self) -> float:
        """Seconds of the uncheckpointed graphs."""
        return sum(self.graphs[g].plans[0].step_seconds for g in self.calls)

    @property
    def extra_seconds(self) -> float:
        """Seconds of recompute, and of waits for copies."""
        return self.choice.extra_seconds

    @property
    def stall_seconds(self) -> float:
        """Seconds of waits for copies off the device and back."""
        pairs = zip(self.calls, self.choice.levels, strict=True)
        return sum(self.graphs[g].plans[level].stall_seconds for g, level in pairs)

    @property
    def away_bytes(self) -> int:
        """Most bytes that are away from the device at any time of the step."""
        return int(self.step.tables.most_away(self.choice.levels))

    @property
    def slowdown(self) -> float:
        """Extra time over the time of the uncheckpointed graphs."""
        return self.extra_seconds / self.step_seconds if self.step_seconds else 0.0

    @cached_property
    def lower_bound_seconds(self) -> float:
        """Lower bound on the extra seconds of any choice of these levels within the budget."""
        limit = self.baseline_peak_bytes if self.budget_bytes is None else self.budget_bytes
        return min(self.extra_seconds, bound_seconds(self.step, limit))

    def level_of(self, graph: int) -> int:
        """Return the level, from 0, of most calls of a graph, which has a number from 1."""
        chosen = Counter(
            level
            for position, level in zip(self.calls, self.choice.levels, strict=True)
            if position == graph - 1
        )
        return chosen.most_common(1)[0][0]

    def plan_of(self, graph: int) -> Plan:
        """Return the plan by which most calls of a graph run, by its number from 1."""
        return self.graphs[graph - 1].plans[self.level_of(graph)]

    def moments(self) -> list[tuple[int, int, int]]:
        """Return the bytes of each moment: outside, held by calls, and of the running call."""
        levels = [call[i] for call, i in zip(self.step.calls, self.choice.levels, strict=True)]

        def running(moment: Moment) -> int:
            if moment.running is None:
                return 0
            level = levels[moment.running]
            return level.backward_bytes if moment.is_backward else level.forward_bytes

        return [
            (m.outside_bytes, sum(levels[i].held_bytes for i in m.held), running(m))
            for m in self.step.moments
        ]

    def table(self) -> Table:
        """Return the calls by graph and level as a table with exports."""
        return table_of(tuple(self._rows()))

    def _rows(self) -> Iterator[StepRow]:
        counts = Counter(zip(self.calls, self.choice.levels, strict=True))
        for (position, index), count in sorted(counts.items()):
            graph = self.graphs[position]
            level = graph.levels[index]
            yield StepRow(
                graph.number,
                graph.source,
                count,
                index + 1,
                len(graph.levels),
                level.held_bytes,
                level.forward_bytes,
                level.backward_bytes,
                level.extra_seconds,
                level.away_bytes,
            )

    def figures(self) -> dict[str, Any]:
        """Return the figures of the step, in bytes and seconds."""
        names = (
            "budget_bytes",
            "peak_bytes",
            "baseline_peak_bytes",
            "floor_bytes",
            "outside_bytes",
            "saved_bytes",
            "away_bytes",
            "stall_seconds",
            "extra_seconds",
            "lower_bound_seconds",
            "step_seconds",
            "slowdown",
        )
        return {name: getattr(self, name) for name in names}

    def frontier(self, points: int | Sequence[budgets.Budget] = 8) -> StepFrontier:
        """Return the step at several budgets: time against the peak of the whole step.

        ``points`` is the number of budgets, from the least peak to the uncheckpointed one, or the
        budgets themselves. Raises :class:`InvalidOption` for fewer than 2 points or no budgets, and
        :class:`BudgetInfeasible` for a budget below the least peak.
        """
        floor, most = self.floor_bytes, self.baseline_peak_bytes
        if isinstance(points, int):
            if points < 2:
                raise InvalidOption(
                    f"points={points!r}: a frontier has at least 2 points, the floor and the "
                    "uncheckpointed step. Example: points=8."
                )
            shares = (k / (points - 1) for k in range(1, points))
            limits = [floor, *(round(floor * (most / floor) ** share) for share in shares)]
        else:
            limits = [self._limit(budget) for budget in points]
        if not limits:
            raise InvalidOption("points=[]: give budgets, such as points=['8GiB', 0.5].")
        steps = [replace(self, budget_bytes=limit, choice=self._chosen(limit)) for limit in limits]
        asked_for: Sequence[budgets.Budget] = limits if isinstance(points, int) else points
        for budget, limit, step in zip(asked_for, limits, steps, strict=True):
            if step.peak_bytes > limit:
                asked, least = budgets.format_apart(limit, floor)
                raise BudgetInfeasible(
                    f"budget={budget!r} is {asked}, below the least peak found for this step, "
                    f"{least}. Leave it out, or raise it to at least '{floor}B'.",
                    floor_bytes=floor,
                    budget_bytes=limit,
                )
        return StepFrontier(tuple(steps))

    def _limit(self, budget: budgets.Budget) -> int:
        budgets.validate(budget)
        if not budgets.is_in_bytes(budget) or budgets.parse(budget) == "auto":
            raise InvalidOption(
                f"{budget!r} is no budget of a step's frontier. Give bytes or fractions: "
                "points=['8GiB', 0.5]."
            )
        limit = budgets.resolve(
            budget, baseline_peak_bytes=self.baseline_peak_bytes, device=torch.device("cpu")
        )
        assert limit is not None
        return limit

    def to_html(self, path: str | Path, *, title: str | None = None) -> Path:
        """Write a page of the step: its table, and each graph with its levels; return the path."""
        from fxckpt.reports import html

        return html.write_step(self, path, title=title)

    def lines(self) -> list[tuple[str, str]]:
        """Return the figures of the step as (name, text)."""
        budget = "none" if self.budget_bytes is None else format_bytes(self.budget_bytes)
        return [
            ("peak of the step", format_bytes(self.peak_bytes)),
            ("budget", budget),
            ("uncheckpointed peak", format_bytes(self.baseline_peak_bytes)),
            ("least peak found", format_bytes(self.floor_bytes)),
            ("outside of the graphs", f"up to {format_bytes(self.outside_bytes)}"),
            *self._lines_of_offload(),
            (
                "extra time",
                f"{format_seconds(self.extra_seconds)}, {self.slowdown:.1%} of the step",
            ),
            (
                "least possible",
                f"{format_seconds(self.lower_bound_seconds)} at these levels",
            ),
            ("cost model", self.graphs[0].plans[0].cost),
        ]

    def _lines_of_offload(self) -> list[tuple[str, str]]:
        """Return the line of what is sent away, if anything is."""
        if not self.away_bytes:
            return []
        waits = format_seconds(self.stall_seconds)
        text = f"up to {format_bytes(self.away_bytes)} at once; waits for copies: {waits}"
        return [("sent away", text)]

    def __str__(self) -> str:
        graphs = f"{len(self.graphs)} graph{'s' if len(self.graphs) > 1 else ''}"
        calls = f"{len(self.calls)} call{'s' if len(self.calls) > 1 else ''}"
        width = max(len(name) for name, _ in self.lines())
        lines = "\n".join(f"{name:{width}}  {text}" for name, text in self.lines())
        return f"step of {calls} of {graphs}\n{self.table()}\n\n{lines}"


@dataclass(frozen=True)
class StepFrontier:
    """One step at increasing budgets, made by :meth:`StepPlan.frontier`."""

    plans: tuple[StepPlan, ...]

    @property
    def rows(self) -> tuple[Point, ...]:
        """The figures of each, one point a budget."""
        return points_of(self.plans)

    def table(self) -> Table:
        """Return the points as a table."""
        return table_of_points(self.rows)

    def plot(self, ax: Axes | None = None) -> Axes:
        """Draw recompute time over the step's peak, and return the axes. Needs matplotlib."""
        return draw_frontier(self, ax)

    def __str__(self) -> str:
        return str(self.table())

    def _repr_html_(self) -> str:
        return self.table().to_html()
