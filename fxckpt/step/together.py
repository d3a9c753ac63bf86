"""Measurements that the ranks of a group exchange of a step that all of them ran."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from fxckpt.errors import BudgetInfeasible
from fxckpt.planner.ranks import Ranks
from fxckpt.solver.step_choice import choice_of
from fxckpt.step.graph import Sizes, StepGraph
from fxckpt.step.levels import NOISE, StepChoice, StepLevels, infeasible_step, is_good
from fxckpt.step.record import LearnedStep, RecordedCall


@dataclass(frozen=True)
class StepMeasurement:
    """Measurement of a step by one rank, or the most that any rank measured."""

    calls: tuple[int, ...]
    """Numbers of the graphs that were called."""
    kinds: tuple[tuple[object, ...], ...]
    """Each moment without its bytes."""
    outside: tuple[int, ...]
    """Outside bytes at each moment."""
    excess: tuple[tuple[int, int], ...]
    """Bytes by which forward and backward of each call's graph were above their plan."""
    limit: int
    """Budget of the step in bytes."""
    is_good: bool
    """Whether the levels it ran at are within the budget, and next to nothing is to be gained."""
    is_shared: bool
    """Whether all its graphs were planned by the ranks together."""

    @classmethod
    def of(cls, learned: LearnedStep, limit: int, *, is_good: bool) -> StepMeasurement:
        """Return the measurement of a step by this rank."""
        moments = learned.moments
        return cls(
            tuple(graph.number for graph in learned.calls),
            tuple((m.held, m.running, m.is_backward) for m in moments),
            tuple(m.outside_bytes for m in moments),
            tuple(graph.excess for graph in learned.calls),
            limit,
            is_good,
            all(graph.ranks is not None for graph in learned.calls),
        )

    def apply_to(self, learned: LearnedStep) -> None:
        """Take the figures of all ranks for those of this one."""
        learned.take(self.outside)
        for graph, (forward, backward) in zip(learned.calls, self.excess, strict=True):
            graph.excess = max(graph.excess[0], forward), max(graph.excess[1], backward)


def merged_measurements(measured: Sequence[StepMeasurement | None]) -> StepMeasurement | None:
    """Return the most that any rank measured; None if they did not all run one step."""
    steps = [each for each in measured if each is not None]
    first = steps[0] if steps else None
    if first is None or len(steps) < len(measured):
        return None
    if any(
        (each.calls, each.kinds) != (first.calls, first.kinds) or not each.is_shared
        for each in steps
    ):
        return None
    return replace(
        first,
        outside=tuple(map(max, *(each.outside for each in steps))),
        excess=tuple(
            (max(forward for forward, _ in same), max(backward for _, backward in same))
            for same in zip(*(each.excess for each in steps), strict=True)
        ),
        limit=min(each.limit for each in steps),
        is_good=all(each.is_good for each in steps),
    )


def is_together(step: int) -> bool:
    """Return whether the ranks of a group choose levels as a step begins, counted from 1.

    They do for the first few, which show most, and for every power of two.
    """
    return step == 3 or (step > 1 and step & (step - 1) == 0)


def choose_together(
    levels: StepLevels, ranks: Ranks, graph: StepGraph, sizes: Sizes
) -> StepChoice | None:
    """Return the choice of all ranks for a step, by the most bytes that any of them measured.

    Where they ran different steps, each rank keeps to its own.
    """
    try:
        return _chosen_together(levels, ranks, graph, sizes)
    except Exception as error:
        ranks.fail(error)
        raise


def _chosen_together(
    levels: StepLevels, ranks: Ranks, graph: StepGraph, sizes: Sizes
) -> StepChoice | None:
    """Return the choice of all ranks."""
    known, subject = levels.known_of(graph), f"the levels of step {levels.begun}"
    measured = None
    if known is not None:
        learned, limit = known.learned, levels.limit(known.learned)
        room = levels.room(limit)
        now = choice_of(learned.program(), known.levels)
        fits = now.peak_bytes <= room and is_good(learned, now, room)
        measured = StepMeasurement.of(learned, limit, is_good=fits)
    merged = ranks.decide(subject, measured, merged_measurements)
    if known is None or merged is None:
        return levels.choice_alone(graph, sizes)
    merged.apply_to(known.learned)
    levels.version += 1
    learned, expected = known.learned, known.learned.sizes_after([sizes])
    limit = min(levels.limit(learned, expected), merged.limit)
    room = levels.room(limit)
    if merged.is_good:
        choice = choice_of(learned.program(expected), known.levels)
    else:
        for each in dict.fromkeys(learned.calls):
            if each.ranks is not None:
                each.learn_levels(learned.room(merged.limit))
        choice = levels.compiled_choice(learned, expected, room)
    over = None
    if choice.peak_bytes > (1 + NOISE) * limit and levels.is_exact and not merged.is_good:
        over = infeasible_step(levels.budget, learned, expected, limit)
    tightest = ranks.decide(
        subject, (choice.peak_bytes / max(1, limit), choice.levels, over), _tightest
    )
    if tightest != choice.levels and not any(expected):
        for call, position in zip(learned.calls, tightest, strict=True):
            levels.compile(RecordedCall(call, position))
        choice = choice_of(learned.program(expected), tightest)
    known.choices.clear()
    return levels.keep(known, sizes, StepChoice(learned, expected, choice, limit))


def _tightest(
    choices: Sequence[tuple[float, tuple[int, ...], BudgetInfeasible | None]],
) -> tuple[int, ...]:
    """Return the levels of the rank whose step is nearest to its budget.

    Raises the error of the first rank whose step fits at no level.
    """
    for rank, (_, _, over) in enumerate(choices):
        if over is not None:
            raise over.on_rank(rank)
    return max(choices, key=lambda choice: choice[0])[1]
