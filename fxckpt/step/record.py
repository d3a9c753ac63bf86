"""Record of a step: its calls, its moments, and the bytes outside of all graphs at each."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import ClassVar

from fxckpt.solver.step_choice import Moment, StepProgram, choice_of
from fxckpt.step.graph import StepGraph


@dataclass(frozen=True)
class RecordedCall:
    """One forward of a graph, in the order of the step."""

    graph: StepGraph
    position: int
    """Position of the plan that it took among the graph's."""


@dataclass
class StepRecord:
    """What happened in a step so far."""

    calls: list[RecordedCall] = field(default_factory=list)
    moments: list[Moment] = field(default_factory=list)
    peak_bytes: int = 0
    """Most bytes allocated beyond those before the step."""
    peak_at: str = ""
    """Where the peak was reached, for people."""
    left: dict[tuple[str, str] | None, int] = field(default_factory=dict)
    """Bytes that code between the graphs holds until the backward.

    They are listed by the reason and line of the graph break that the code follows, None if none.
    """
    is_of_the_step_alone: bool = True
    """Whether nothing but the step, such as a FLOP counter, held its tensors."""

    @property
    def signature(self) -> tuple[object, ...]:
        """Order of calls and moments, equal for steps that differ only in bytes."""
        return (
            tuple(id(call.graph) for call in self.calls),
            tuple((m.held, m.running, m.is_backward) for m in self.moments),
        )


@dataclass
class LearnedStep:
    """Steps of one signature, with the most outside bytes that the latest ones had."""

    calls: tuple[StepGraph, ...]
    recent: list[tuple[Moment, ...]]
    """Moments of the latest steps."""
    count: int = 1
    """Number of steps seen."""

    MEMORY: ClassVar[int] = 8
    """Number of latest steps that count."""

    @classmethod
    def of(cls, record: StepRecord) -> LearnedStep:
        """Return what one step teaches."""
        return cls(tuple(call.graph for call in record.calls), [tuple(record.moments)])

    def add(self, record: StepRecord) -> bool:
        """Add a step of the same signature; return whether it had more outside bytes."""
        before = self.moments
        self.count += 1
        self.recent = [*self.recent[1 - self.MEMORY :], tuple(record.moments)]
        return any(
            new.outside_bytes > old.outside_bytes
            for new, old in zip(self.moments, before, strict=True)
        )

    @property
    def moments(self) -> tuple[Moment, ...]:
        """The moments, each with the most outside bytes of the latest steps."""
        return tuple(
            replace(same[0], outside_bytes=max(m.outside_bytes for m in same))
            for same in zip(*self.recent, strict=True)
        )

    def room(self, limit: int) -> int | None:
        """Return the bytes left for the backward of the only call; None if there are several."""
        if len(self.calls) != 1:
            return None
        return limit - max(
            (m.outside_bytes for m in self.moments if m.is_backward or 0 in m.held), default=0
        )

    def program(self) -> StepProgram:
        """Return the step as it is chosen over."""
        return StepProgram(tuple(graph.levels() for graph in self.calls), self.moments)

    def baseline_bytes(self) -> int:
        """Return the peak of the uncheckpointed step, of which fractions are.

        That of a graph which was planned as if it were the step counts its outputs and incoming
        gradients in full, and is the least: such a step keeps the budget that it was planned for.
        """
        program = StepProgram(
            tuple((level,) if (level := g.uncheckpointed()) else g.levels() for g in self.calls),
            self.moments,
        )
        peak = choice_of(program, [0] * len(program.calls)).peak_bytes
        return max(peak, *(graph.baseline_alone for graph in self.calls))
