"""Levels of steps that were seen: one for each call, chosen to keep the step within its budget."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch

from fxckpt import budgets
from fxckpt.errors import BudgetInfeasible
from fxckpt.solver.step_choice import (
    LevelChoice,
    Moment,
    choice_of,
    choose,
    choose_few,
    least_peak,
)
from fxckpt.step.graph import SIZES, Sizes, StepGraph
from fxckpt.step.measure import StepMeter
from fxckpt.step.record import LearnedStep, RecordedCall, StepRecord

WORTHWHILE = 0.02
"""Least share of the step's recompute time, or of its bytes, that a new choice must gain."""
KINDS = 16
"""Most kinds of steps that are remembered for one first graph."""
RIVALS = 128
"""Number of latest steps whose kinds the next one may be."""
SPARE = 0.005
"""Share of the uncheckpointed step's time below which recompute is not worth a compile."""
LEVELS = 3
"""Levels of a graph that a choice may add to those that are compiled, as each is a compile."""
COMPILES = 4
"""Most rounds of compiles for one choice. A compiled level may take other bytes than planned."""
HOPES = 3
"""Most times that a step is run which fits only if plans that never ran keep none of their inputs.
"""
NOISE = 0.01
"""Share of the budget by which a step that runs at its floor may be over it before it is refused.

Bytes outside of the graphs vary from step to step; a peak over the budget is warned of.
"""


@dataclass(frozen=True)
class StepChoice:
    """Choice of levels for the calls of a step that was seen before, at some sizes."""

    learned: LearnedStep
    sizes: tuple[Sizes, ...]
    """Sizes that the calls are expected to have."""
    choice: LevelChoice
    limit: int
    basis: Basis | None = None
    """What it was chosen by; None for one that was not searched."""


@dataclass(frozen=True)
class Basis:
    """What a choice depends on."""

    version: int
    rivals: frozenset[int]
    """Numbers of the kinds of steps that may come in its place."""
    room: int
    moments: tuple[Moment, ...]
    kept: dict[tuple[int, int], dict[int, int]]

    def is_less(self, other: Basis) -> bool:
        """Return whether all is as in another, but that there may be less room."""
        return (
            (self.version, self.kept) == (other.version, other.kept)
            and self.rivals >= other.rivals
            and self.room <= other.room
            and all(
                new.outside_bytes >= old.outside_bytes
                for new, old in zip(self.moments, other.moments, strict=True)
            )
        )


@dataclass
class KnownStep:
    """A step that was seen, and the levels chosen for it at each size of its first call."""

    learned: LearnedStep
    levels: tuple[int, ...]
    """Levels that it had last."""
    number: int
    """Number of the first step of this kind."""
    choices: dict[Sizes, StepChoice] = field(default_factory=dict)
    """Latest choices by those sizes."""
    chosen: dict[object, StepChoice] = field(default_factory=dict)
    """Choices by those sizes and the versions of what is behind them."""
    version: int = 0
    """Number of times that it showed something new."""
    hopes: int = 0
    """Number of times that it was run though it seemed not to fit."""
    seen_at: int = 0
    """Number of the latest step of this kind."""
    was_over: bool = False
    """Whether a step of this kind was over the budget, as calls it began with were of another's."""
    baseline_of: object = None
    """Versions and sizes for which the uncheckpointed peak was found."""

    def may_come(self, since: int) -> bool:
        """Return whether a step is of this kind for all that those after step ``since`` tell.

        One that was seen once, and kept the budget, may have been the only one.
        """
        return (self.learned.count > 1 or self.was_over) and self.seen_at > since


class StepLevels:
    """Knows the steps that were seen, and chooses the levels of their calls."""

    def __init__(self, budget: budgets.Budget) -> None:
        self.budget = budget
        self.meter: StepMeter | None = None
        """Measure of the step's device; None before the first call."""
        self.settled_at: int | None = None
        """Number of the step from which on levels are chosen by what was learned."""
        self.steps = 0
        """Number of steps that ended."""
        self.begun = 0
        """Number of the step that began last: of those that ended, and itself."""
        self.version = 0
        """Number of changes of what is known about levels and budget."""
        self.capacity: int | None = None
        """Most bytes allocated when memory ran out, None if it never did."""
        self.free: int | None = None
        """Free bytes of the device before the first step, where those are the budget."""
        self._baseline = 0
        """Most bytes of an uncheckpointed step so far, of which fractions are."""
        self._known: dict[int, dict[tuple[object, ...], KnownStep]] = {}
        """Steps that were seen, by their first graph and their signature, the latest last."""
        self._expected: dict[int, tuple[object, ...]] = {}
        """Signature that a step with this first graph is expected to have."""

    @property
    def device(self) -> torch.device:
        """Device of the step."""
        return torch.device("cpu") if self.meter is None else self.meter.device

    @property
    def is_exact(self) -> bool:
        """Whether measured bytes are exact."""
        return self.meter is not None and self.meter.is_exact

    def set_budget(self, budget: budgets.Budget) -> None:
        """Change the budget; what memory there was when it ran out is forgotten."""
        self.budget, self.free, self.capacity = budget, None, None
        self.version += 1

    def ask_free(self) -> None:
        """Ask for the device's free bytes, if those are the budget, before the first step.

        Later on, the step's own bytes are not free.
        """
        if self.free is None and budgets.parse(self.budget) == "auto":
            self.free = budgets.resolve(self.budget, baseline_peak_bytes=0, device=self.device)

    def take_capacity(self, nbytes: int) -> None:
        """Take the bytes that were allocated when memory ran out for all there is."""
        self.capacity = nbytes
        self.version += 1

    def compile(self, call: RecordedCall) -> None:
        """Compile the plan of a call if it is new."""
        if call.graph.plans[call.position].run is None:
            self.version += 1
        call.graph.run(call.position)

    def learn(self, record: StepRecord) -> KnownStep:
        """Take what a step that ended shows; return what is known of its kind."""
        self.steps += 1
        first = id(record.calls[0].graph)
        known = self._known.setdefault(first, {})
        found = known.get(record.signature)
        if found is None:
            learned, levels = LearnedStep.of(record), tuple(c.position for c in record.calls)
            found = known[record.signature] = KnownStep(learned, levels, self.steps)
            if len(known) > KINDS:
                del known[next(iter(known))]
        else:
            known[record.signature] = known.pop(record.signature)
            found.version += found.learned.add(record)
        found.seen_at = self.steps
        figures = found.version, self.version, found.learned.largest
        if found.baseline_of != figures:
            found.baseline_of = figures
            self._baseline = max(self._baseline, found.learned.baseline_bytes())
        # A step unlike the last ones is expected again once it was seen twice.
        if first not in self._expected or found.learned.count > 1:
            self._expected[first] = record.signature
        return found

    def learned(self, record: StepRecord) -> LearnedStep:
        """Return what steps of the kind of one that ended teach."""
        known = self._known.get(id(record.calls[0].graph), {}).get(record.signature)
        return LearnedStep.of(record) if known is None else known.learned

    def limit(self, learned: LearnedStep, sizes: Sequence[Sizes] | None = None) -> int:
        """Return the budget of a step in bytes; a fraction is of one that has these sizes too.

        A step that is smaller than others were, such as one of a last batch, may take as much.
        """
        if self.free is not None:
            return self.free
        baseline = max(self._baseline, learned.baseline_bytes(sizes))
        limit = budgets.resolve(self.budget, baseline_peak_bytes=baseline, device=self.device)
        assert limit is not None
        return limit

    def room(self, limit: int) -> int:
        """Return the bytes of a step within its budget and the memory that there is."""
        if self.capacity is None or self.meter is None:
            return limit
        return max(0, min(limit, self.capacity - self.meter.start))

    def known_of(self, graph: StepGraph) -> KnownStep | None:
        """Return what is known of the step that is expected to begin with a graph."""
        return self._known.get(id(graph), {}).get(self._expected.get(id(graph)) or ())

    def choice_for(
        self,
        graph: StepGraph,
        sizes: Sizes,
        outside_bytes: int = 0,
        *,
        is_nested: bool = False,
    ) -> StepChoice | None:
        """Return the choice for a step that begins with a call of ``graph`` of some sizes.

        It is made anew if figures changed. ``outside_bytes`` are those allocated by now, of which
        the error for a step that does not fit tells. ``is_nested`` tells that it begins within a
        backward, before which much may have been allocated.
        """
        known = self.known_of(graph)
        if known is None:
            return None
        found = known.chosen.get((sizes, self._version_of(known)))
        # One that does not fit is made again, until it does, or the step is refused.
        if found is not None and found.choice.peak_bytes <= (1 + NOISE) * found.limit:
            return self.keep(known, sizes, found)
        chosen = known.choices.get(sizes)
        learned, expected = known.learned, known.learned.sizes_after([sizes])
        limit = self.limit(learned, expected)
        room, levels = self.room(limit), known.levels if chosen is None else chosen.choice.levels
        program = learned.program(expected)
        now = choice_of(program, levels)
        fits = now.peak_bytes <= room and program.has_room(now.levels)
        rivals = self._rivals(known)
        numbers = frozenset(rival.number for rival in rivals)
        basis = Basis(self.version, numbers, room, learned.moments, dict(learned.kept))
        # With less room, what was the fastest and still fits is it again.
        is_best = chosen is not None and chosen.basis is not None and basis.is_less(chosen.basis)
        if fits and (is_best or is_good(learned, now, room)):
            choice = now
        else:
            for each in dict.fromkeys(learned.calls):
                each.learn_levels(learned.room(room))
            choice = self.compiled_choice(learned, expected, room)
            if choice.peak_bytes > (1 + NOISE) * limit and self.is_exact:
                if (hoped := self._hoped(known, expected, room)) is not None:
                    return self.keep(known, sizes, StepChoice(*hoped, limit))
                calm = _choose(learned.calm, expected, room)
                # Of a nested step that was not measured from its begin the least is not known.
                is_known = learned.is_whole or not is_nested
                if is_known and calm.peak_bytes > (1 + NOISE) * limit:
                    begun = learned.beginning_with(outside_bytes)
                    raise infeasible_step(self.budget, begun, expected, limit)
            if fits and now.extra_seconds <= (1 + WORTHWHILE) * choice.extra_seconds:
                choice = now
        for rival in rivals:
            choice = self._leaving_room(choice, learned, expected, rival)
        if len(known.choices) > SIZES:
            known.choices.clear()
        if len(known.chosen) > SIZES:
            known.chosen.clear()
        return self.keep(known, sizes, StepChoice(learned, expected, choice, limit, basis))

    def _hoped(
        self, known: KnownStep, sizes: tuple[Sizes, ...], room: int
    ) -> tuple[LearnedStep, tuple[Sizes, ...], LevelChoice] | None:
        """Return a choice for a step that seems not to fit, which may; None if none may.

        Of plans that never ran it is not known what they keep of their inputs, and only a step
        tells. It is tried a few times before the step is refused.
        """
        if known.hopes >= HOPES:
            return None
        known.hopes += 1
        learned = replace(known.learned, is_hopeful=True)
        choice = self.compiled_choice(learned, sizes, room)
        return None if choice.peak_bytes > room else (learned, sizes, choice)

    def keep(self, known: KnownStep, sizes: Sizes, chosen: StepChoice) -> StepChoice:
        """Keep a choice for steps whose first call has these sizes, and return it."""
        if self.settled_at is None:
            self.settled_at = self.steps + 1
        known.levels = chosen.choice.levels
        known.choices[sizes] = known.chosen[sizes, self._version_of(known)] = chosen
        return chosen

    def _version_of(self, known: KnownStep) -> object:
        """Return what a choice for a kind of steps depends on."""
        rivals = tuple((rival.number, rival.version, rival.levels) for rival in self._rivals(known))
        return self.version, known.version, rivals

    def _rivals(self, known: KnownStep) -> list[KnownStep]:
        """Return the other kinds of the latest steps that began with the same graph, and may come.

        The next step may be one of them, and by then its first calls have their levels.
        """
        kinds = self._known[id(known.learned.calls[0])].values()
        since = self.steps - RIVALS
        return [k for k in kinds if k is not known and k.may_come(since)]

    def _leaving_room(
        self,
        choice: LevelChoice,
        learned: LearnedStep,
        sizes: tuple[Sizes, ...],
        rival: KnownStep,
    ) -> LevelChoice:
        """Return a choice whose first calls leave room for a step of another kind, if there is.

        Where they do not, they take the levels that they have in it.
        """
        other = rival.learned
        pairs = list(zip(learned.calls, other.calls, strict=False))
        same = next((i for i, (one, another) in enumerate(pairs) if one is not another), len(pairs))
        limit = self.room(self.limit(other))
        own = choice_of(other.program(), rival.levels)
        if own.peak_bytes > limit:  # None was chosen since it was over.
            own = self.compiled_choice(other, other.sizes, limit)
            rival.levels = own.levels
        begun = other.program().beginning_with(choice.levels[:same])
        if own.peak_bytes > limit or least_peak(begun).peak_bytes <= limit:
            return choice
        limit = self.room(self.limit(learned, sizes))
        found = self._after(rival.levels[:same], learned, sizes, limit)
        return found if found.peak_bytes <= limit else choice

    def choice_alone(self, graph: StepGraph, sizes: Sizes) -> StepChoice | None:
        """Return the choice that the ranks made, or one for sizes that this rank alone has."""
        known = self.known_of(graph)
        if known is None:
            return None
        if sizes in known.choices:
            return known.choices[sizes]
        learned = known.learned
        expected = learned.sizes_after([sizes])
        limit = self.limit(learned, expected)
        room = self.room(limit)
        for each in dict.fromkeys(learned.calls):
            if each.ranks is None:
                each.learn_levels(learned.room(room))
        choice = self.compiled_choice(learned, expected, room)
        chosen = StepChoice(learned, expected, choice, limit)
        known.choices[sizes] = chosen
        return chosen

    def anticipated(self, chosen: StepChoice | None, outside_bytes: int) -> StepChoice | None:
        """Return the choice for a step that begins with more outside bytes than it was known to.

        ``outside_bytes`` are those allocated since before the step: the gradients that an earlier
        backward accumulated stay through it.
        """
        if chosen is None:
            return chosen
        learned, limit = chosen.learned, chosen.limit
        more = learned.beginning_with(outside_bytes)
        if more is learned:
            return chosen
        grown = outside_bytes - learned.moments[0].outside_bytes
        if chosen.choice.peak_bytes + grown <= limit:
            return chosen
        for each in dict.fromkeys(learned.calls):
            if each.ranks is None:  # The others need not have more.
                each.learn_levels()
        return replace(chosen, learned=more, choice=_choose(more, chosen.sizes, limit))

    def another(
        self, done: Sequence[RecordedCall], graph: StepGraph, sizes: Sizes
    ) -> StepChoice | None:
        """Return a known step that begins with the calls so far, and goes on with ``graph``.

        Of those that may come it is the longest, which leaves room for the others, else the latest.
        """
        calls = [*(call.graph for call in done), graph]
        kinds = [
            known
            for known in self._known.get(id(calls[0]), {}).values()
            if list(known.learned.calls[: len(calls)]) == calls
        ]
        if not kinds:
            return None
        since = self.steps - RIVALS
        often = [k.learned for k in kinds if k.may_come(since)]
        learned = max(reversed(often), key=lambda k: len(k.calls), default=kinds[-1].learned)
        return self.rest_of_step(done, learned, sizes_with(done, learned, sizes))

    def rest_of_step(
        self, done: Sequence[RecordedCall], learned: LearnedStep, sizes: tuple[Sizes, ...]
    ) -> StepChoice:
        """Return the choice for the calls to come; those in flight stay at their levels."""
        limit = self.limit(learned, sizes)
        taken = [call.position for call in done]
        return StepChoice(
            learned, sizes, self._after(taken, learned, sizes, self.room(limit)), limit
        )

    def _after(
        self,
        taken: Sequence[int],
        learned: LearnedStep,
        sizes: tuple[Sizes, ...],
        room: int,
    ) -> LevelChoice:
        """Return the choice of a step whose first calls have taken their levels."""
        program = learned.program(sizes)
        rest = choose(program.beginning_with(taken), room)
        return choice_of(program, (*taken, *rest.levels[len(taken) :]))

    def compiled_choice(
        self, learned: LearnedStep, sizes: tuple[Sizes, ...], limit: int
    ) -> LevelChoice:
        """Return a choice of levels that are compiled, as only then their bytes are certain."""
        choice = _choose(learned, sizes, limit)
        for _ in range(COMPILES):
            used = dict.fromkeys(
                (graph, level)
                for graph, level, fixed in zip(
                    learned.calls, choice.levels, learned.fixed, strict=True
                )
                if fixed is None
            )
            new = [RecordedCall(g, i) for g, i in used if g.plans[i].run is None]
            if not new:
                return choice
            for call in new:
                self.compile(call)
            choice = _choose(learned, sizes, limit)
        return _choose(learned, sizes, limit, most=0)


def is_good(learned: LearnedStep, now: LevelChoice, room: int) -> bool:
    """Return whether a choice recomputes next to nothing, or is the plan of the only graph.

    That plan was made for about as many bytes; at smaller sizes it may recompute too much.
    """
    if now.extra_seconds <= _spare(learned):
        return True
    graph, backward = learned.calls[0], learned.room(room)
    if backward is None or graph.room is None or graph.has_sizes or now.levels != (0,):
        return False
    return backward - graph.room <= WORTHWHILE * room


def sizes_with(
    done: Sequence[RecordedCall], learned: LearnedStep, sizes: Sizes
) -> tuple[Sizes, ...]:
    """Return the sizes that a step is expected to have, whose call after ``done`` has ``sizes``."""
    return learned.sizes_after([*(call.sizes for call in done), sizes])


def _choose(
    learned: LearnedStep, sizes: tuple[Sizes, ...], limit: int, most: int = LEVELS
) -> LevelChoice:
    """Return the levels of least time within a limit, of which few are not compiled."""
    graphs = {id(graph): graph for graph in learned.calls}
    ready = [
        (key, i)
        for key, graph in graphs.items()
        for i, plan in enumerate(graph.plans)
        if plan.run is not None
    ]
    calls, spare = [id(graph) for graph in learned.calls], _spare(learned)
    return choose_few(learned.program(sizes), limit, calls, ready, most=most, spare=spare)


def _spare(learned: LearnedStep) -> float:
    """Return the seconds of recompute that are not worth a compile."""
    return SPARE * sum(graph.step_seconds for graph in learned.calls)


def infeasible_step(
    budget: budgets.Budget, learned: LearnedStep, sizes: tuple[Sizes, ...], limit: int
) -> BudgetInfeasible:
    """Return the error for a step that does not fit at any level."""
    floor = least_peak(learned.program(sizes)).peak_bytes
    asked, least = budgets.format_apart(limit, floor)
    baseline = learned.baseline_bytes(sizes)
    fraction = budgets.least_fraction(budget, floor, baseline)
    enough = f"'{floor}B'" if fraction is None else f"{fraction} ('{floor}B')"
    outside = max(moment.outside_bytes for moment in learned.moments_at(sizes))
    return BudgetInfeasible(
        f"budget={budget!r} is {asked}, below the least peak found for this step of "
        f"{len(learned.calls)} calls, {least}, of which up to {budgets.format_bytes(outside)} "
        f"are allocated outside of the compiled graphs; its uncheckpointed peak is "
        f"{budgets.format_bytes(baseline)}. Raise the budget to at least {enough}, or make the "
        "batch smaller.",
        floor_bytes=floor,
        budget_bytes=limit,
    )
