"""Record of a step: its calls, its moments, and the bytes outside of all graphs at each."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from math import ceil
from typing import ClassVar

from fxckpt.solver.levels import Level
from fxckpt.solver.step_choice import Moment, StepProgram, choice_of
from fxckpt.step.graph import Sizes, StepGraph

FALLEN = 0.05
"""Share of the most outside bytes of a step by which those of a moment have fallen much."""


@dataclass(frozen=True)
class RecordedCall:
    """One forward of a graph, in the order of the step."""

    graph: StepGraph
    position: int
    """Position of the plan that it took among the graph's."""
    sizes: Sizes = ()
    """Sizes that it was called with, of those that vary."""
    is_repeated: bool = False
    """Whether a region of torch's ``checkpoint`` holds its inputs, and runs it again."""

    @property
    def held_bytes(self) -> int:
        """Bytes that it holds from its forward to its backward."""
        return 0 if self.is_repeated else self.graph.held_bytes(self.position, self.sizes)

    @property
    def away_bytes(self) -> int:
        """Bytes that it has sent away from its forward to its backward."""
        return 0 if self.is_repeated else self.graph.away_bytes(self.position, self.sizes)


@dataclass
class StepRecord:
    """Calls, moments and peak of a step so far."""

    calls: list[RecordedCall] = field(default_factory=list)
    moments: list[Moment] = field(default_factory=list)
    peak_bytes: int = 0
    """Most bytes allocated beyond those before the step."""
    most_bytes: int = 0
    """Upper bound on the peak: more than it where a device's own peak hid a part of the step."""
    peak_at: str = ""
    """Where the peak was reached, for people."""
    left: dict[tuple[str, str] | None, int] = field(default_factory=dict)
    """Bytes that code between the graphs holds until the backward.

    They are listed by the reason and line of the graph break that the code follows, None if none.
    """
    kept: dict[int, dict[int, int]] = field(default_factory=dict)
    """Bytes of each input that a call alone kept when the first backward began."""
    is_whole: bool = True
    """Whether it was measured from the outermost module on, if there is one."""
    is_exact: bool = True
    """Whether every peak was seen, and not only what was allocated at the boundaries."""
    is_of_the_step_alone: bool = True
    """Whether nothing but the step, such as a FLOP counter, held its tensors."""

    @property
    def has_backward(self) -> bool:
        """Whether some call had its backward."""
        return any(moment.is_backward for moment in self.moments)

    @property
    def most_in_flight(self) -> int:
        """Most calls of one graph, which was compiled as if it were the step, at once."""
        alone = {i: id(call.graph) for i, call in enumerate(self.calls) if call.graph.is_alone}
        counts = (
            Counter(
                alone[i] for i in {*moment.held, moment.running} if i is not None and i in alone
            )
            for moment in self.moments
        )
        return max((n for count in counts for n in count.values()), default=0)

    @property
    def signature(self) -> tuple[object, ...]:
        """Order of calls and moments, equal for steps that differ only in bytes."""
        return (
            tuple((id(call.graph), call.is_repeated and call.position) for call in self.calls),
            tuple((m.held, m.running, m.is_backward) for m in self.moments),
        )


@dataclass
class LearnedStep:
    """Steps of one signature, with the most outside bytes that the latest ones had."""

    calls: tuple[StepGraph, ...]
    recent: list[tuple[Moment, ...]]
    """Moments of the latest steps."""
    sizes: tuple[Sizes, ...]
    """Sizes of the calls in the latest step."""
    largest: tuple[Sizes, ...]
    """Greatest sizes that each call had."""
    fixed: tuple[int | None, ...]
    """Position of the plan of each call that is repeated, None for one that may take any."""
    is_whole: bool = True
    """Whether the latest ones were measured from the outermost module on, if there is one."""
    count: int = 1
    """Number of steps seen."""
    kept: dict[tuple[int, int], dict[int, int]] = field(default_factory=dict)
    """Bytes of each input that a call alone keeps, by its number and the position of its plan."""
    is_hopeful: bool = False
    """Whether plans that never ran are taken to keep none."""
    measured: tuple[tuple[tuple[Sizes, ...], tuple[int, ...]], ...] = ()
    """Sizes of the latest steps, and the outside bytes that each had, where sizes vary."""
    moments: tuple[Moment, ...] = field(init=False)
    """The moments, each with the most outside bytes of the latest steps."""

    MEMORY: ClassVar[int] = 8
    """Number of latest steps that count."""
    NEAR: ClassVar[float] = 2.0
    """Most growth from a step to the largest sizes with which it tells of larger ones."""

    def __post_init__(self) -> None:
        """Find the most of the latest steps."""
        self.moments = _most_of(self.recent)

    @classmethod
    def of(cls, record: StepRecord) -> LearnedStep:
        """Return what one step teaches."""
        sizes = tuple(call.sizes for call in record.calls)
        calls = tuple(call.graph for call in record.calls)
        fixed = tuple(call.position if call.is_repeated else None for call in record.calls)
        return cls(
            calls,
            [tuple(record.moments)],
            sizes,
            sizes,
            fixed,
            record.is_whole,
            kept=_kept(record),
            measured=_measured(record),
        )

    def add(self, record: StepRecord) -> bool:
        """Add a step of the same signature; return whether it shows something new.

        That is more outside bytes than before, or many fewer, or what a plan keeps of its inputs.
        A step whose peaks were not all seen, or that may have been a smaller one, had as many bytes
        as the ones before, for all that is known.
        """
        if record.is_whole and not self.is_whole:  # Those before had more outside than was seen.
            self.is_whole, self.recent, self.measured = True, [], ()
        self.measured = (*self.measured, *_measured(record))[-self.MEMORY :]
        before, moments = self.moments, tuple(record.moments)
        if not record.is_exact or any(self.sizes):
            moments = tuple(
                replace(new, outside_bytes=max(new.outside_bytes, old.outside_bytes))
                for new, old in zip(moments, before, strict=True)
            )
        self.count += 1
        # Most steps are like those before: their moments replace equal ones.
        is_as_before = len(self.recent) == self.MEMORY and self.recent[0] == moments
        self.recent = [*self.recent[1 - self.MEMORY :], moments]
        if not is_as_before:
            self.moments = _most_of(self.recent)
        self.sizes = tuple(call.sizes for call in record.calls)
        self.largest = tuple(
            tuple(map(max, one, other)) for one, other in zip(self.largest, self.sizes, strict=True)
        )
        kept = _kept(record)
        is_new = any(self.kept.get(key) != inputs for key, inputs in kept.items())
        self.kept.update(kept)
        enough = FALLEN * max((m.outside_bytes for m in before), default=0)
        return is_new or any(
            new.outside_bytes > old.outside_bytes or old.outside_bytes - new.outside_bytes > enough
            for new, old in zip(self.moments, before, strict=True)
        )

    def take(self, outside: Sequence[int]) -> None:
        """Take some outside bytes at each moment for those of the latest steps."""
        self.recent = [
            tuple(
                replace(moment, outside_bytes=most)
                for moment, most in zip(self.moments, outside, strict=True)
            )
        ]
        self.moments = self.recent[0]

    def beginning_with(self, outside_bytes: int) -> LearnedStep:
        """Return the steps as if at least that many bytes were allocated when each began."""
        grown = outside_bytes - self.moments[0].outside_bytes
        if grown <= 0:
            return self
        moments = (replace(m, outside_bytes=m.outside_bytes + grown) for m in self.moments)
        return replace(self, recent=[tuple(moments)])

    @property
    def calm(self) -> LearnedStep:
        """The steps as if each moment had the fewest outside bytes that the latest ones had."""
        least = tuple(
            min(same, key=lambda m: m.outside_bytes) for same in zip(*self.recent, strict=True)
        )
        return replace(self, recent=[least])

    def moments_at(self, sizes: Sequence[Sizes]) -> tuple[Moment, ...]:
        """Return the moments of a step with calls of some sizes.

        Code outside of the graphs is taken to allocate in proportion to the size that grew most
        over all that were seen, and as much as then at smaller ones. What it allocates may depend
        on levels too, so that steps of nearly those sizes count as well.
        """
        growth = _growth(sizes, self.largest)
        if growth <= 1:
            return self.moments
        grown = [tuple(ceil(growth * m.outside_bytes) for m in self.moments)]
        for seen, outside in self.measured:
            if _growth(self.largest, seen) <= self.NEAR:
                grown.append(tuple(ceil(_growth(sizes, seen) * each) for each in outside))
        return tuple(
            replace(m, outside_bytes=max(m.outside_bytes, *same))
            for m, *same in zip(self.moments, *grown, strict=True)
        )

    def sizes_after(self, known: Sequence[Sizes]) -> tuple[Sizes, ...]:
        """Return the sizes that the calls of a step are expected to have, of which some are known.

        A call that had the sizes of a known one in the latest step has them again; another has the
        greatest that it had.
        """
        now = dict(zip(self.sizes, known, strict=False))
        rest = range(len(known), len(self.calls))
        return (*known, *(now.get(self.sizes[i], self.largest[i]) for i in rest))

    def room(self, limit: int) -> int | None:
        """Return the bytes left for the backward of the only call; None if there are several.

        What was freed meanwhile may have been garbage of before: it is not counted on.
        """
        if len(self.calls) != 1:
            return None
        outside = (
            m.outside_bytes + (self._most_kept(0) if m.keeps else 0)
            for m in self.moments
            if m.is_backward or 0 in m.held
        )
        return limit - max((0, *outside))

    def program(self, sizes: Sequence[Sizes] | None = None) -> StepProgram:
        """Return the step as it is chosen over, by default at the sizes of the latest one."""
        sizes = self.sizes if sizes is None else sizes
        levels = tuple(self._levels(i, each) for i, each in enumerate(sizes))
        limits = [g.away_limit for g in self.calls if g.away_limit is not None]
        return StepProgram(levels, self.moments_at(sizes), min(limits, default=None))

    def _levels(self, call: int, sizes: Sizes) -> tuple[Level, ...]:
        """Return the levels of a call; one that is repeated takes the same whichever is chosen."""
        graph, fixed = self.calls[call], self.fixed[call]
        levels = graph.levels(sizes)
        if fixed is None:
            unknown = 0 if self.is_hopeful else self._most_kept(call)
            known = [self.kept.get((call, i)) for i in range(len(levels))]
            return tuple(
                replace(level, input_bytes=sum(kept.values()) if kept is not None else unknown)
                for level, kept in zip(levels, known, strict=True)
            )
        return (replace(levels[fixed], held_bytes=0),) * len(levels)

    def _most_kept(self, call: int) -> int:
        """Return the most bytes of its inputs that a call alone kept by any plan that ran."""
        ran = (inputs for (number, _), inputs in self.kept.items() if number == call)
        return max((sum(inputs.values()) for inputs in ran), default=0)

    def _kept_uncheckpointed(self, call: int) -> int:
        """Return the bytes of its inputs that a call alone keeps where nothing is recomputed."""
        ran = [inputs for (number, _), inputs in self.kept.items() if number == call]
        read = self.calls[call].inputs_read
        found = {i: n for inputs in ran for i, n in inputs.items() if read is None or i in read}
        return sum(found.values())

    def baseline_bytes(self, sizes: Sequence[Sizes] | None = None) -> int:
        """Return the peak of the uncheckpointed step, of which fractions are.

        Sizes that vary are the largest seen, ``sizes``, or those planned for, whichever needs more.
        The baseline of a graph which was planned as if it were the step counts its outputs and
        incoming gradients in full, and is the least: such a step has the budget that it was planned
        for, or more.
        """
        peaks = [graph.baseline_alone for graph in self.calls]
        for at in {self.largest, tuple(sizes or self.sizes), ((),) * len(self.calls)}:
            found = [
                graph.uncheckpointed(each) if fixed is None else None
                for graph, each, fixed in zip(self.calls, at, self.fixed, strict=True)
            ]
            levels = tuple(
                (replace(level, input_bytes=self._kept_uncheckpointed(i)),)
                if level is not None
                else self._levels(i, each)
                for i, (level, each) in enumerate(zip(found, at, strict=True))
            )
            program = StepProgram(levels, self.moments_at(at) if any(at) else self.moments)
            peaks.append(choice_of(program, [0] * len(levels)).peak_bytes)
        return max(peaks)


def _growth(sizes: Sequence[Sizes], seen: Sequence[Sizes]) -> float:
    """Return the growth of the size that is largest beside the same one of other calls."""
    return max(
        (
            size / most
            for one, other in zip(sizes, seen, strict=True)
            for size, most in zip(one, other, strict=True)
            if most
        ),
        default=1.0,
    )


def _measured(record: StepRecord) -> tuple[tuple[tuple[Sizes, ...], tuple[int, ...]], ...]:
    """Return the sizes of a step and its outside bytes; nothing where they vary with no size."""
    sizes = tuple(call.sizes for call in record.calls)
    outside = tuple(moment.outside_bytes for moment in record.moments)
    return ((sizes, outside),) if any(sizes) else ()


def _most_of(recent: Sequence[tuple[Moment, ...]]) -> tuple[Moment, ...]:
    """Return the moments of some steps alike, each with the most outside bytes of all of them."""
    return tuple(
        replace(same[0], outside_bytes=max(m.outside_bytes for m in same))
        for same in zip(*recent, strict=True)
    )


def _kept(record: StepRecord) -> dict[tuple[int, int], dict[int, int]]:
    """Return the bytes of inputs that the calls of a step alone kept, with their plans."""
    return {(i, record.calls[i].position): inputs for i, inputs in record.kept.items()}
