"""Graph of a step: one compiled graph, and a few plans of it that are compiled when first used."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from fxckpt.errors import PlanningFailed
from fxckpt.planner.planner import LevelChooser
from fxckpt.plans.types import Plan, schedule_of
from fxckpt.solver.levels import Level, LevelFamily, LevelSearch, level_of
from fxckpt.solver.program import Program
from fxckpt.solver.schedule import save_all
from fxckpt.solver.search import Candidate, PriceSearch, SearchResult
from fxckpt.solver.simulate import simulate
from fxckpt.torch_private import leave_capture

log = logging.getLogger("fxckpt")

Compile = Callable[[LevelChooser | None], tuple[Callable[..., Any] | None, Plan | None]]
"""Compiles the graph with a chooser of its schedule; None searches within the whole budget.

Returns no function if the chooser left the compile.
"""


@dataclass
class Entry:
    """One plan that a graph may run by."""

    level: Level
    """Bytes and seconds, by the latest knowledge."""
    candidate: int | None
    """Index in the family; None for the plan that the graph was compiled with by itself."""
    run: Callable[..., Any] | None = None
    """Compiled function; None until it is used."""
    plan: Plan | None = None
    """The plan; None until it is compiled."""
    measured: tuple[int, int] = (0, 0)
    """Greatest measured peaks of forward and backward, 0 if none was measured."""


class StepGraph:
    """One graph of a step; identical modules share it."""

    def __init__(
        self,
        number: int,
        name: str,
        device: torch.device,
        compile_graph: Compile,
        search: PriceSearch,
    ) -> None:
        self.number = number
        """Position among the graphs of the backend, from 1."""
        self.name = name
        """Line of the user's code that called it."""
        self.entries: list[Entry] = []
        """Plans: that of the graph alone if there is one, then the family if it is known."""
        self.baseline: Level | None = None
        """Bytes and seconds of the uncheckpointed graph."""
        self.baseline_alone = 0
        """Uncheckpointed peak of the plan for the whole budget, if it was compiled for that."""
        self.model_error = 1.0
        """Greatest ratio of a compiled peak to the planned one."""
        self.break_after: tuple[str, str] | None = None
        """Reason and line of the graph break that it ends at."""
        self.runs_again = False
        """Whether a forward that ran out of memory has acted on nothing that outlives it."""
        self.device = device
        """Device whose memory the graph takes."""
        self._excess = (0, 0)
        """Most bytes by which a forward and a backward were above their plan."""
        self._compile, self._search = compile_graph, search
        self._family: LevelFamily | None = None

    @property
    def is_alone(self) -> bool:
        """Whether the graph was compiled as if it were the whole step."""
        return bool(self.entries) and self.entries[0].candidate is None

    def compile_alone(self) -> Callable[..., Any]:
        """Compile the graph for the whole budget, as if it were the step."""
        run, plan = self._compile(None)
        assert run is not None
        if plan is not None:
            program, candidate = _planned(plan)
            level = _scaled(level_of(program, candidate), self._ratio(plan))
            schedule = save_all(program)
            self.baseline = level_of(program, Candidate(schedule, simulate(program, schedule)))
            self.baseline_alone = plan.baseline_peak_bytes
            self.entries = [Entry(level, None, run, plan)]
        return run

    def compile_cautiously(self) -> Callable[..., Any]:
        """Compile the graph at the level that holds least."""

        def least(program: Program) -> SearchResult:
            self._take_family(program)
            return self._result(self.least())

        run, plan = self._compile(least)
        assert run is not None
        if self.entries:
            self._compiled(self.entries[self.least()], run, plan)
        return run

    def learn_levels(self, room: int | None = None) -> None:
        """Find the family of levels if it is not known, without a compile.

        With ``room`` bytes for its backward, one level is the plan of just that budget.
        """
        if self._family is not None:
            return

        def leave(program: Program) -> SearchResult:
            self._take_family(program, room)
            leave_capture()

        self._compile(leave)

    def least(self) -> int:
        """Return the position of the plan that holds least."""
        return min(
            range(len(self.entries)),
            key=lambda i: (
                self.entries[i].level.held_bytes,
                self.entries[i].level.backward_bytes,
                self.entries[i].level.extra_seconds,
            ),
        )

    def levels(self) -> tuple[Level, ...]:
        """Return the bytes and seconds of every plan."""
        return tuple(map(self._expected, self.entries))

    def _expected(self, entry: Entry) -> Level:
        """Return the bytes of a plan; those never run may be as wrong as the ones that were.

        What wrappers around the compiled halves allocate is the same at every level: copies of
        incoming gradients that are not contiguous, for one.
        """
        forward, backward = entry.measured
        level = _raised(entry.level, *self._excess)
        return replace(
            level,
            forward_bytes=forward or level.forward_bytes,
            backward_bytes=backward or level.backward_bytes,
        )

    def uncheckpointed(self) -> Level | None:
        """Return the bytes of the uncheckpointed graph, with what wrappers allocate."""
        return None if self.baseline is None else _raised(self.baseline, *self._excess)

    def run(self, position: int) -> Callable[..., Any]:
        """Return the compiled function of a plan; compile it if it is new."""
        entry = self.entries[position]
        if entry.run is None:

            def chosen(program: Program) -> SearchResult:
                return self._result(position, program)

            run, plan = self._compile(chosen)
            assert run is not None
            self._compiled(entry, run, plan)
        assert entry.run is not None
        return entry.run

    def measured(
        self, position: int, forward_bytes: int | None, backward_bytes: int | None
    ) -> bool:
        """Take the measured peak of a forward or a backward; return whether any figure rose."""
        entry = self.entries[position]
        before = (self._excess, entry.measured)
        forward, backward = entry.measured
        entry.measured = (max(forward, forward_bytes or 0), max(backward, backward_bytes or 0))
        self._excess = (
            max(self._excess[0], entry.measured[0] - entry.level.forward_bytes),
            max(self._excess[1], entry.measured[1] - entry.level.backward_bytes),
        )
        return (self._excess, entry.measured) != before

    def _compiled(self, entry: Entry, run: Callable[..., Any], plan: Plan | None) -> None:
        entry.run, entry.plan = run, plan
        if plan is not None and plan.compiled_peak_bytes is not None:
            ratio = self._ratio(plan)
            entry.level = _scaled(self._modelled(entry), ratio)
            if ratio > self.model_error:
                self.model_error = ratio
                for other in self.entries:
                    if other.run is None:
                        other.level = _scaled(self._modelled(other), ratio)

    def _modelled(self, entry: Entry) -> Level:
        assert self._family is not None and entry.candidate is not None
        return self._family.levels[entry.candidate]

    @staticmethod
    def _ratio(plan: Plan) -> float:
        if plan.compiled_peak_bytes is None or not plan.peak_bytes:
            return 1.0
        return plan.compiled_peak_bytes / plan.peak_bytes

    def _take_family(self, program: Program, room: int | None = None) -> None:
        family = LevelSearch()(self._search, program, room)
        self._family, self.baseline = family, family.baseline
        # Positions of plans stay as they are.
        self.entries += [Entry(level, i) for i, level in enumerate(family.levels)]
        log.debug("graph %d has %d levels", self.number, len(family.levels))

    def _result(self, position: int, program: Program | None = None) -> SearchResult:
        family, index = self._family, self.entries[position].candidate
        assert family is not None and index is not None
        if program is not None and len(program.ops) != family.ops:
            raise PlanningFailed(
                f"graph {self.number} ({self.name}) has {len(program.ops)} ops when it is compiled "
                f"again, and had {family.ops}."
            )
        return family.result(index)


def _planned(plan: Plan) -> tuple[Program, Candidate]:
    """Return the program of a plan, and the plan as a candidate."""
    assert plan.step is not None
    program, schedule = plan.step.program, schedule_of(plan)
    return program, Candidate(schedule, simulate(program, schedule))


def _scaled(level: Level, ratio: float) -> Level:
    """Return a level with its peaks multiplied by a ratio."""
    return replace(
        level,
        forward_bytes=int(level.forward_bytes * ratio),
        backward_bytes=max(level.held_bytes, int(level.backward_bytes * ratio)),
    )


def _raised(level: Level, forward: int, backward: int) -> Level:
    """Return a level with some bytes added to its peaks."""
    return replace(
        level,
        forward_bytes=level.forward_bytes + forward,
        backward_bytes=level.backward_bytes + backward,
    )
