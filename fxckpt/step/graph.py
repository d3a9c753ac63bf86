"""Graph of a step: one compiled graph, and a few plans of it that are compiled when first used."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from math import ceil
from typing import Any

import torch

from fxckpt.errors import PlanningFailed
from fxckpt.planner.planner import LevelChooser
from fxckpt.planner.ranks import Ranks
from fxckpt.planner.together import search_together
from fxckpt.plans.types import Plan, schedule_of
from fxckpt.solver.levels import Level, LevelFamily, LevelSearch, boundary_bytes, level_of
from fxckpt.solver.program import Program
from fxckpt.solver.schedule import Schedule, save_all
from fxckpt.solver.search.candidates import Candidate, SearchResult
from fxckpt.solver.search.price_search import PriceSearch
from fxckpt.solver.simulate import simulate
from fxckpt.torch_private import leave_capture

log = logging.getLogger("fxckpt")

SIZES = 4096
"""Most sizes for which the bytes of a graph's plans are remembered."""
NEARLY = 0.01
"""Share of the most held bytes up to which two plans hold as much, and the peak tells."""
CHANGE = 0.01
"""Share of a peak by which a measured one must be below the planned to be worth a new choice."""

Compile = Callable[[LevelChooser | None, bool], tuple[Callable[..., Any] | None, Plan | None]]
"""Compiles the graph with a chooser of its schedule; None searches within the whole budget.

The flag tells whether all ranks of a group compile it now. Returns no function if the chooser left
the compile.
"""

Sizes = tuple[int, ...]
"""Values of the sizes that vary among a graph's inputs; empty if none does."""


@dataclass(frozen=True)
class Ratios:
    """Bytes of a compiled graph over those of its simulated schedule."""

    forward: float = 1.0
    """Ratio of the forward's peaks."""
    backward: float = 1.0
    """Ratio of the backward's peaks."""
    held: float = 1.0
    """Ratio of the bytes held from the forward to the backward."""

    def or_more(self, found: Ratios) -> Ratios:
        """Return the ratios of a plan that may be as wrong as others were.

        A peak of either half may be as wrong as the other's was.
        """
        peak = max(self.forward, found.forward, found.backward)
        return Ratios(peak, peak, max(self.held, found.held))


AS_SIMULATED = Ratios()
"""Ratios of a graph that is not known to differ from its simulation."""


@dataclass
class LevelPlan:
    """One plan that a graph may run by."""

    program: Program
    candidate: Candidate
    """Its schedule, simulated at the sizes that the program was made for."""
    index: int | None
    """Index in the family; None for the plan that the graph was compiled with by itself."""
    ratios: Ratios = AS_SIMULATED
    """Its compiled bytes over the simulated, by what is known."""
    run: Callable[..., Any] | None = None
    """Compiled function; None until it is used."""
    plan: Plan | None = None
    """The plan; None until it is compiled."""
    measured: dict[Sizes, tuple[int, int]] = field(default_factory=dict)
    """Greatest measured peaks of forward and backward at each size, 0 if none was measured."""


class StepGraph:
    """One graph of a step; identical modules share it."""

    def __init__(
        self,
        number: int,
        name: str,
        device: torch.device,
        compile_graph: Compile,
        search: PriceSearch,
        symbols: Sequence[tuple[int, str]] = (),
        *,
        ranks: Ranks | None = None,
    ) -> None:
        self.number = number
        """Position among the graphs of the backend, from 1."""
        self.name = name
        """Line of the user's code that called it."""
        self.plans: list[LevelPlan] = []
        """Plans: that of the graph alone if there is one, then the family if it is known."""
        self.baseline_alone = 0
        """Uncheckpointed peak of the plan for the whole budget, if it was compiled for that."""
        self.base_ratio = 1.0
        """What a fraction is of, over the uncheckpointed peak as planned, if that was too low."""
        self.room: int | None = None
        """Bytes that its backward may take by the plan for the whole budget, None if none is."""
        self._model_error = AS_SIMULATED
        """Greatest ratios of the plans compiled so far."""
        self.break_after: tuple[str, str] | None = None
        """Reason and line of the graph break that it ends at."""
        self.runs_again = False
        """Whether a forward that ran out of memory has acted on nothing that outlives it."""
        self.inputs_read: frozenset[int] | None = None
        """Arguments that the uncheckpointed graph saves for its backward; None if not known."""
        self.device = device
        """Device whose memory the graph takes."""
        self.ranks = ranks
        """The ranks that have the same plans of it; None if this process has its own."""
        self.repeated: int | None = None
        """Position of the plan of calls that a checkpoint repeats; None before the first."""
        self.excess = (0, 0)
        """Most bytes by which a forward and a backward were above their plan."""
        self._symbols = tuple(symbols)
        """Inputs that are sizes, each with its symbol."""
        self._program: Program | None = None
        self._baselines: dict[Sizes, Level] = {}
        """Bytes and seconds of the uncheckpointed graph at each size."""
        self._levels: dict[Sizes, list[Level]] = {}
        """Planned bytes and seconds of the plans at each size."""
        self._compile, self._search = compile_graph, search
        self._family: LevelFamily | None = None

    @property
    def step_seconds(self) -> float:
        """Seconds of the uncheckpointed graph in all."""
        return 0.0 if self._program is None else self._program.step_seconds

    @property
    def is_alone(self) -> bool:
        """Whether the graph was compiled as if it were the whole step."""
        return bool(self.plans) and self.plans[0].index is None

    def compile_alone(self, share: float | None = None) -> Callable[..., Any]:
        """Compile the graph for the whole budget, as if it were the step.

        ``share`` is a budget that is a fraction. Where it was of more than the uncheckpointed peak
        as planned, those of the step are too.
        """
        run, plan = self._compile(None, True)
        assert run is not None
        if plan is not None:
            assert plan.snapshot is not None
            program = plan.snapshot.program
            self._program = program
            self.baseline_alone = plan.baseline_peak_bytes
            if plan.budget_bytes is not None:
                self.room = plan.budget_bytes - boundary_bytes(program)
                if share is not None and plan.budget_bytes > int(share * self.baseline_alone):
                    base = ceil(plan.budget_bytes / share)
                    base += int(share * base) < plan.budget_bytes  # The quotient was rounded.
                    self.base_ratio = base / max(1, self.baseline_alone)
                    self.baseline_alone = base
            candidate = _candidate(program, schedule_of(plan))
            ratios = _ratios(program, candidate, plan)
            self.plans = [LevelPlan(program, candidate, None, ratios, run, plan)]
        return run

    def compile_cautiously(self, limit_of: Callable[[StepGraph], int | None]) -> Callable[..., Any]:
        """Compile the graph at the level that holds least, within a limit on its own peak."""

        position: int | None = None

        def least(program: Program) -> SearchResult:
            nonlocal position
            self._take_family(program)
            position = self.least(limit_of(self))
            return self._result(position)

        run, plan = self._compile(least, True)
        assert run is not None
        if position is not None:
            self._compiled(self.plans[position], run, plan)
        return run

    def learn_levels(self, room: int | None = None) -> None:
        """Find the family of levels if it is not known, without a compile.

        With ``room`` bytes for its backward, one level is the plan of just that budget.
        """
        if self.has_family:
            return

        def leave(program: Program) -> SearchResult:
            self._take_family(program, room)
            leave_capture()

        self._compile(leave, True)

    def sizes_of(self, args: Sequence[Any]) -> Sizes:
        """Return the values of the sizes among the arguments of a call."""
        return tuple([int(args[i]) for i, _ in self._symbols])

    @property
    def has_family(self) -> bool:
        """Whether its levels are known."""
        return self._family is not None

    @property
    def has_sizes(self) -> bool:
        """Whether sizes of its inputs vary."""
        return bool(self._symbols)

    @property
    def away_limit(self) -> int | None:
        """Bytes of the memory that values are sent to; None if none are."""
        link = None if self._program is None else self._program.link
        return None if link is None else link.limit_bytes

    def least(self, limit: int | None = None, away: int = 0) -> int:
        """Return the position of the plan that holds least among those of a peak within a limit.

        Without one within it, it is the plan of least peak where another call holds as much:
        fractions are of more than one graph. ``away`` are the bytes that calls in
        flight have sent away: a plan that sends more than is left is the last choice.
        """
        levels = self._planned(())
        grain = max(1, int(NEARLY * max(level.held_bytes for level in levels)))
        left = None if self.away_limit is None else self.away_limit - away

        def key(i: int) -> tuple[int, int, int, int, int, float]:
            level = levels[i]
            excess = 0 if left is None else max(0, level.away_bytes - left)
            peak = max(level.forward_bytes, level.backward_bytes)
            over = 0 if limit is None or peak <= limit else peak + level.held_bytes
            held = level.held_bytes
            return excess, over, held // grain, peak, held, level.extra_seconds

        return min(range(len(levels)), key=key)

    def compiled_position(self, limit: int | None) -> int:
        """Return the position of a plan that is compiled; where none is, of :meth:`least`."""
        compiled = (i for i, level_plan in enumerate(self.plans) if level_plan.run is not None)
        found = next(compiled, None)
        return self.least(limit) if found is None else found

    def level(self, position: int, sizes: Sizes = ()) -> Level:
        """Return the bytes and seconds of a plan at some sizes, by default those planned for.

        Plans never run may be as wrong as the ones that were: what wrappers around the compiled
        halves allocate is the same at every level, copies of incoming gradients that are not
        contiguous, for one.
        """
        forward, backward = self.plans[position].measured.get(sizes, (0, 0))
        level = _raised(self._planned(sizes)[position], *self.excess)
        return replace(
            level,
            forward_bytes=forward or level.forward_bytes,
            backward_bytes=backward or level.backward_bytes,
        )

    def levels(self, sizes: Sizes = ()) -> tuple[Level, ...]:
        """Return the bytes and seconds of every plan at some sizes."""
        return tuple(self.level(i, sizes) for i in range(len(self.plans)))

    def away_bytes(self, position: int, sizes: Sizes) -> int:
        """Return the bytes that a plan sends away."""
        return self._planned(sizes)[position].away_bytes

    def held_bytes(self, position: int, sizes: Sizes) -> int:
        """Return the bytes that a plan holds from the forward to the backward."""
        return self._planned(sizes)[position].held_bytes

    def _planned(self, sizes: Sizes) -> list[Level]:
        """Return the planned bytes and seconds of every plan at some sizes."""
        levels = self._levels.setdefault(sizes, [])
        if len(levels) < len(self.plans):
            if len(self._levels) > SIZES:
                self._levels = {sizes: levels}
            at: dict[int, Program] = {}
            for each in self.plans[len(levels) :]:
                program, candidate = each.program, each.candidate
                if sizes:
                    if id(program) not in at:
                        at[id(program)] = self._at(program, sizes)
                    program = at[id(program)]
                    candidate = _candidate(program, candidate.schedule)
                levels.append(_scaled(level_of(program, candidate), each.ratios))
        return levels

    def _at(self, program: Program, sizes: Sizes) -> Program:
        """Return a program at some sizes."""
        if not sizes:
            return program
        names = [name for _, name in self._symbols]
        return program.at(dict(zip(names, sizes, strict=True)))

    def uncheckpointed(self, sizes: Sizes = ()) -> Level | None:
        """Return the bytes of the uncheckpointed graph, with what wrappers were seen to take."""
        if self._program is None:
            return None
        if sizes not in self._baselines:
            if len(self._baselines) > SIZES:
                self._baselines.clear()
            program = self._at(self._program, sizes)
            planned = level_of(program, _candidate(program, save_all(program)))
            above = Ratios(self.base_ratio, self.base_ratio)
            self._baselines[sizes] = _scaled(planned, above)
        return _raised(self._baselines[sizes], *self.excess)

    def run(self, position: int) -> Callable[..., Any]:
        """Return the compiled function of a plan; compile it if it is new."""
        level_plan = self.plans[position]
        if level_plan.run is None:

            def chosen(program: Program) -> SearchResult:
                return self._result(position, program)

            run, plan = self._compile(chosen, False)
            assert run is not None
            self._compiled(level_plan, run, plan)
        assert level_plan.run is not None
        return level_plan.run

    def measured(
        self,
        position: int,
        sizes: Sizes,
        forward_bytes: int | None = None,
        backward_bytes: int | None = None,
    ) -> bool:
        """Take the measured peak of a forward or a backward; return whether it changes much.

        It does if it is above what was known of the plan, or well below.
        """
        found = self.plans[position].measured
        before = found.get(sizes, (0, 0))
        above = (forward_bytes or 0) > before[0] or (backward_bytes or 0) > before[1]
        if sizes in found and not above:
            return False
        known, planned = self.level(position, sizes), self._planned(sizes)[position]
        if sizes not in found and len(found) > SIZES:
            found.clear()
        forward, backward = found[sizes] = (
            max(before[0], forward_bytes or 0),
            max(before[1], backward_bytes or 0),
        )
        self.excess = (
            max(self.excess[0], forward - planned.forward_bytes),
            max(self.excess[1], backward - planned.backward_bytes),
        )
        now = self.level(position, sizes)
        return any(
            new > old or new < (1 - CHANGE) * old
            for new, old in (
                (now.forward_bytes, known.forward_bytes),
                (now.backward_bytes, known.backward_bytes),
            )
        )

    def _compiled(self, level_plan: LevelPlan, run: Callable[..., Any], plan: Plan | None) -> None:
        level_plan.run, level_plan.plan = run, plan
        if plan is not None and plan.compiled_peak_bytes is not None:
            level_plan.ratios = _ratios(level_plan.program, level_plan.candidate, plan)
            error = self._model_error.or_more(level_plan.ratios)
            if error != self._model_error:
                self._model_error = error
                for other in self.plans:
                    if other.run is None:
                        other.ratios = error
            self._levels.clear()

    def _take_family(self, program: Program, room: int | None = None) -> None:
        if self.ranks is None:
            family = LevelSearch()(self._search, program, room)
        else:
            program, family = search_together(
                self.ranks,
                f"the levels of graph {self.number}, {self.name}",
                program,
                lambda merged, least: LevelSearch()(self._search, merged, least),
                room,
            )
        self._family, self._program = family, self._program or program
        # Positions of plans stay as they are.
        self.plans += [
            LevelPlan(program, candidate, i) for i, candidate in enumerate(family.candidates)
        ]
        log.debug("graph %d has %d levels", self.number, len(family.candidates))

    def _result(self, position: int, program: Program | None = None) -> SearchResult:
        family, index = self._family, self.plans[position].index
        assert family is not None and index is not None
        if program is not None and len(program.ops) != family.ops:
            raise PlanningFailed(
                f"graph {self.number} ({self.name}) has {len(program.ops)} ops when it is compiled "
                f"again, and had {family.ops}."
            )
        return family.result(index)


def _candidate(program: Program, schedule: Schedule) -> Candidate:
    """Return a schedule with its memory and time."""
    return Candidate(schedule, simulate(program, schedule))


def _ratios(program: Program, candidate: Candidate, plan: Plan) -> Ratios:
    """Return the compiled bytes of a plan over those of its schedule.

    Where Inductor compiles, the plan is of a program that its lowering corrected, and each half has
    a peak of its own: that of the step tells nothing of the other half.
    """
    simulated = level_of(program, candidate)
    planned = plan.profile[: plan.forward_ops], plan.profile[plan.forward_ops :]
    peaks = plan.compiled_halves_bytes or tuple(max(half, default=0) for half in planned)
    forward, backward = peaks[0], peaks[1] - boundary_bytes(program)
    held = 1.0
    if simulated.held_bytes and plan.compiled_held_bytes is not None:
        held = plan.compiled_held_bytes / simulated.held_bytes
    return Ratios(
        forward / max(1, simulated.forward_bytes),
        max(backward, simulated.held_bytes) / max(1, simulated.backward_bytes),
        held,
    )


def _scaled(level: Level, ratios: Ratios) -> Level:
    """Return a level with its bytes multiplied by their ratios."""
    held = round(level.held_bytes * ratios.held)
    return replace(
        level,
        held_bytes=held,
        forward_bytes=round(level.forward_bytes * ratios.forward),
        backward_bytes=max(held, round(level.backward_bytes * ratios.backward)),
    )


def _raised(level: Level, forward: int, backward: int) -> Level:
    """Return a level with some bytes added to its peaks."""
    return replace(
        level,
        forward_bytes=level.forward_bytes + forward,
        backward_bytes=level.backward_bytes + backward,
    )
