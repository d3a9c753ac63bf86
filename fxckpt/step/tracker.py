"""Tracker of steps: measures what is allocated outside of all graphs, and chooses levels.

A step begins with a forward while nothing is in flight, and ends when every forward had its
backward, or was dropped. The first one runs cautiously and is recorded; from then on each call
takes the level that was chosen for its place in the step.
"""

from __future__ import annotations

import threading
import time
import warnings
import weakref
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch.utils.weak import WeakIdKeyDictionary

from fxckpt import budgets
from fxckpt.errors import (
    BudgetExceeded,
    BudgetInfeasible,
    CaptureError,
    FxckptError,
    InvalidOption,
)
from fxckpt.memory_meter import Meter, Watch, meter_of
from fxckpt.planner.planner import infeasible
from fxckpt.planner.ranks import Ranks
from fxckpt.reports.step_report import StepReport, StepRow
from fxckpt.solver.step_choice import (
    LevelChoice,
    Moment,
    StepProgram,
    bound_seconds,
    choice_of,
    choose,
    choose_few,
    least_peak,
)
from fxckpt.step.graph import SIZES, Sizes, StepGraph
from fxckpt.step.out_of_memory import GeneratorStates, free_memory, is_out_of_memory
from fxckpt.step.record import LearnedStep, RecordedCall, StepRecord
from fxckpt.step.running import RunningBackwards
from fxckpt.step.together import Said, merged_steps
from fxckpt.torch_private import (
    after_optimizers,
    at_engine_exit,
    backward_node,
    before_forward,
    current_backward,
    failed_frames,
    is_recording,
    keeps_graph,
    outermost_module,
    watch_backward,
)

WORTHWHILE = 0.02
"""Least share of the step's recompute time, or of its bytes, that a new choice must gain."""
TOLD = 0.001
"""Share of the budget from which a peak over it is told."""
TOLD_BYTES = 4096
"""Bytes over the budget from which a peak is told; a loss and a few scalars take less."""
LEFT = 0.05
"""Share of the budget from which code that Dynamo left to Python is told of."""
KINDS = 16
"""Most kinds of steps that are remembered for one first graph."""
SPARE = 0.005
"""Share of the uncheckpointed step's time below which recompute is not worth a compile."""
LEVELS = 3
"""Levels of a graph that a choice may add to those that are compiled, as each is a compile."""
COMPILES = 4
"""Most rounds of compiles for one choice. A compiled level may take other bytes than planned."""
NOISE = 0.01
"""Share of the budget by which a step that runs at its floor may be over it before it is refused.

Bytes outside of the graphs vary from step to step; a peak over the budget is warned of.
"""


LOWERED = 2
"""Most times that a forward runs again by another plan: the one chosen for the rest of the step
within the memory that there was, then the one that holds least."""


def _is_together(step: int) -> bool:
    """Return whether the ranks of a group choose levels as a step begins, counted from 1.

    They do for the first few, which show most, and for every power of two.
    """
    return step == 3 or (step > 1 and step & (step - 1) == 0)


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


def _spare(learned: LearnedStep) -> float:
    """Return the seconds of recompute that are not worth a compile."""
    return SPARE * sum(graph.step_seconds for graph in learned.calls)


RUNNING: RunningBackwards[StepTracker] = RunningBackwards()
"""Trackers with calls in the backwards that run."""


class _Flight:
    """One call between its forward and its backward."""

    def __init__(
        self, tracker: StepTracker, number: int, step: StepRecord, call: RecordedCall
    ) -> None:
        self.number, self.step, self.call = number, step, call
        self.start = 0
        """Bytes allocated when its backward began."""
        self._tracker = weakref.ref(tracker)

    def enter(self) -> None:
        """Take note that its backward begins."""
        if (tracker := self._tracker()) is not None:
            tracker.enter_backward(self)

    def leave(self) -> None:
        """Take note that its backward ended."""
        if (tracker := self._tracker()) is not None:
            tracker.leave_backward(self)

    def failed(self, error: BaseException) -> None:
        """Take note that its backward raised an error."""
        if (tracker := self._tracker()) is not None:
            tracker.failed_backward(self, error)

    def unseen(self) -> None:
        """Take note that compiled autograd runs its backward, where no measure is taken."""
        if (tracker := self._tracker()) is not None:
            tracker.forget_step(self)

    def __del__(self) -> None:
        tracker = self._tracker()
        if tracker is not None:
            tracker.dropped(self)


@dataclass(frozen=True)
class Settled:
    """Levels chosen for a step that was seen before, at some sizes."""

    learned: LearnedStep
    sizes: tuple[Sizes, ...]
    """Sizes that the calls are expected to have."""
    choice: LevelChoice
    limit: int


@dataclass
class KnownStep:
    """A step that was seen, and the levels chosen for it at each size of its first call."""

    learned: LearnedStep
    limit: int
    levels: tuple[int, ...]
    """Levels that it had last."""
    settled: dict[Sizes, tuple[tuple[int, int], Settled]] = field(default_factory=dict)
    """Choices, each with the versions of the figures and of the step that it was made by."""
    version: int = 0
    """Number of times that it took more outside bytes than before."""


class StepTracker:
    """Runs the calls of a step, each at the level that keeps the step within the budget."""

    def __init__(
        self, budget: budgets.Budget, in_flight: int = 1, strict: bool = False, name: str = ""
    ) -> None:
        self.budget, self.in_flight, self.strict = budget, in_flight, strict
        self.name = name
        """Name of its backend in errors."""
        self.ranks: Ranks | None = None
        """The ranks that choose levels as one; None chooses for this process alone."""
        self._begun = 0
        """Number of steps that began."""
        self._made_at = time.time()
        self.steps = 0
        """Number of steps that ended."""
        self.settled_at: int | None = None
        """Number of the step from which on levels are chosen by what was learned."""
        self.last: StepRecord | None = None
        """Record of the latest step that ended."""
        self._known: dict[int, dict[tuple[object, ...], KnownStep]] = {}
        """Steps that were seen, by their first graph and their signature."""
        self._expected: dict[int, tuple[object, ...]] = {}
        """Signature that a step with this first graph is expected to have."""
        self._version = 0
        """Number of changes of what is known about levels and budget."""
        self._lock = threading.RLock()
        self._device: torch.device | None = None
        self._meter: Meter | None = None
        self._watch: Watch | None = None
        self._base: int | None = None
        self._roots: weakref.WeakSet[torch.nn.Module] = weakref.WeakSet()
        """Outermost modules, whose forwards are the begins of steps."""
        self._entered: int | None = None
        """Bytes allocated when the latest such forward began."""
        self._record = StepRecord()
        self._flights: dict[int, int] = {}
        self._current: Settled | None = None
        self._leaves = WeakIdKeyDictionary()
        self._seen_optimizer = False
        self._forward_ended: tuple[StepGraph, int] | None = None
        """Graph of the latest forward, and the bytes allocated at its end, until code follows."""
        self._backward: object | None = None
        """The backward whose end is awaited."""
        self._capacity: int | None = None
        """Most bytes allocated when memory ran out, None if it never did."""
        self._is_polluted = False
        """Whether a compile allocated since the latest boundary."""
        self._was_seen = True
        """Whether the latest peak is that of the step, and not only a bound from below."""
        self._free: int | None = None
        self._has_warned: set[str] = set()

    # Calls ------------------------------------------------------------------------------------

    def forward(self, graph: StepGraph, args: Sequence[Any]) -> Any:
        """Run the forward of a call at the level chosen for it."""
        sizes = graph.sizes_of(args)
        with self._lock:
            if not self._flights:
                self._begin(graph, sizes)
            self._close_gap()
            self._note_left()
            self._note_measure()
            number = len(self._record.calls)
            with self._unmeasured():
                call = RecordedCall(graph, self._position(number, graph, sizes), sizes)
                self._compile(call)
            start = self._restart()
            step = self._record
            step.calls.append(call)
            if not self._seen_optimizer:
                for arg in args:
                    if isinstance(arg, torch.Tensor) and arg.is_leaf and arg.requires_grad:
                        self._leaves[arg] = None
        outputs, call = self._run(number, call, args)
        with self._lock:
            held = graph.held_bytes(call.position, sizes)
            own = self._peak(f"the forward of call {number + 1}, {graph.name}") - start
            step.moments.append(
                Moment(start - self._held() - self._start(), tuple(self._flights), number)
            )
            self._calibrate(call, forward=own)
            node = backward_node(outputs)
            if node is not None:
                self._flights[number] = held
                watch_backward(node, _Flight(self, number, step, call))
            self._forward_ended = (graph, self._restart())
        return outputs

    def _compile(self, call: RecordedCall) -> None:
        """Compile the plan of a call if it is new."""
        if call.graph.entries[call.position].run is None:
            self._version += 1
        call.graph.run(call.position)

    def _run(
        self, number: int, call: RecordedCall, args: Sequence[Any]
    ) -> tuple[Any, RecordedCall]:
        """Return the outputs of a forward, and the call by the plan that it ran by.

        Where memory is short it runs again by a plan that takes less, from the same generator
        states; if it may have written to what outlives it, the error stands.
        """
        graph = call.graph
        states = GeneratorStates.of(graph.device)
        for tries in range(LOWERED + 1):
            try:
                return graph.run(call.position)(*args), call
            except BaseException as error:
                lower = None
                if is_out_of_memory(error) and graph.runs_again:
                    lower = self._lowered(number, call, is_last=tries + 1 >= LOWERED)
                if lower is None or tries == LOWERED:
                    with self._lock:
                        self._forget()
                    raise
            # The error, whose traceback holds tensors, is gone by now.
            states.restore()
            free_memory()
            call = lower
            with self._lock:
                with self._unmeasured():
                    self._compile(call)
                self._record.calls[number] = call
                self._restart()
        raise AssertionError("the last try returns or raises")

    def _lowered(self, number: int, call: RecordedCall, *, is_last: bool) -> RecordedCall | None:
        """Return a call by a plan that takes less than one that ran out of memory, if there is."""
        graph = call.graph
        with self._lock:
            self._take_capacity()
            del self._record.calls[number:]
            if self._current is not None and not is_last:
                self._current = self._rest_of_step(self._current.learned, self._current.sizes)
                levels = self._current.choice.levels
                if number < len(levels) and levels[number] != call.position:
                    lower = replace(call, position=levels[number])
                    self._record.calls.append(lower)
                    return lower
            limit = self.limit_of(graph)
            if limit is not None:
                limit = max(0, limit - self._held())
            if graph.ranks is None:  # Memory is short on this rank alone.
                graph.learn_levels(limit)
            lower = replace(call, position=graph.least(limit))
            self._record.calls.append(lower)
            return None if lower == call else lower

    def _take_capacity(self) -> None:
        """Take the most bytes that were allocated when memory ran out for all there is."""
        assert self._watch is not None
        self._capacity = self._watch.seen()
        self._version += 1

    def _room(self, limit: int) -> int:
        """Return the bytes of a step within its budget and the memory that there is."""
        if self._capacity is None:
            return limit
        return max(0, min(limit, self._capacity - self._start()))

    def enter_backward(self, flight: _Flight) -> None:
        """Begin to measure the backward of a call."""
        with self._lock:
            if flight.step is not self._record:
                return  # A second backward of an earlier step.
            if self._backward != current_backward():
                self._refuse_second(current_backward())
                self._backward = current_backward()
                at_engine_exit(self._leave_engine)
            self._close_gap()
            self._note_left()
            self._note_measure()
            flight.start = self._restart()

    def _refuse_second(self, backward: object) -> None:
        """Raise :class:`InvalidOption` if another budget's calls are in the same backward."""
        RUNNING.leave(self)  # A backward that failed may not have told of its end.
        other = RUNNING.enter(backward, self)
        if other is None or other._device != self._device:
            return
        self._forget()
        raise InvalidOption(
            f"two budgets of one step: {other.name} and {self.name} have calls in one backward. A "
            "budget is that of the whole step: compile all of it with one Backend object, or give "
            "each graph a budget of its own with scope='graph'."
        )

    def leave_backward(self, flight: _Flight) -> None:
        """Record the backward of a call."""
        with self._lock:
            if flight.step is not self._record:
                return
            number, held = flight.number, self._flights.pop(flight.number, 0)
            graph = flight.call.graph
            if keeps_graph():
                self._flights[number] = held  # Its saved values stay, for another backward.
            where = f"the backward of call {number + 1}, {graph.name}"
            own = self._peak(where) - flight.start
            others = tuple(each for each in self._flights if each != number)
            outside = flight.start - sum(self._flights[each] for each in others) - held
            outside -= self._start()
            self._record.moments.append(Moment(outside, others, number, True))
            self._calibrate(flight.call, backward=own + held)
            self._restart()

    def failed_backward(self, flight: _Flight, error: BaseException) -> None:
        """Forget the step of a call; if memory ran out, later ones are to take less."""
        with self._lock:
            if flight.step is not self._record:
                return
            if is_out_of_memory(error):
                self._take_capacity()
            self._forget()

    def forget_step(self, flight: _Flight) -> None:
        """Learn nothing from the step of a call."""
        with self._lock:
            if flight.step is self._record:
                self._forget()

    def _forget(self) -> None:
        """Drop what was recorded; backwards of its calls are not followed."""
        self._record = StepRecord()
        self._flights.clear()
        self._forward_ended = None

    def _leave_engine(self) -> None:
        RUNNING.leave(self)
        with self._lock:
            self._backward = None
            self._close_gap()
            if not self._flights:
                self._finish()

    def dropped(self, flight: _Flight) -> None:
        """Take note that a call's autograd graph is gone."""
        with self._lock:
            if flight.step is self._record:
                self._flights.pop(flight.number, None)

    # Measures ----------------------------------------------------------------------------------

    def _held(self) -> int:
        """Return the bytes held by the calls in flight."""
        return sum(self._flights.values())

    def _start(self) -> int:
        """Return the bytes allocated before the step."""
        assert self._base is not None
        return self._base

    def _peak(self, where: str) -> int:
        """Return the greatest bytes allocated since the latest boundary.

        An accelerator has one peak for all, and it is the user's: it is reset only while a step is
        learned. Later on a peak that is not above it goes unseen.
        """
        assert self._watch is not None and self._meter is not None
        # What compiling allocated is not the step's, and hides what was.
        peak = self._meter.allocated() if self._is_polluted else self._watch.seen()
        self._was_seen = self._watch.exact and not self._is_polluted
        self._record.is_exact &= self._was_seen
        if peak - self._start() > self._record.peak_bytes:
            self._record.peak_bytes, self._record.peak_at = peak - self._start(), where
        return peak

    def _restart(self) -> int:
        """Forget the peak so far; return the bytes allocated now."""
        assert self._watch is not None and self._meter is not None
        self._is_polluted = False
        if self._current is None:
            self._watch.restart()
        else:
            self._watch.reset()
        return self._meter.allocated()

    @contextmanager
    def _unmeasured(self) -> Iterator[None]:
        """Leave out of the step what planning and a compile allocate."""
        assert self._meter is not None and self._base is not None and self._watch is not None
        before, version = self._meter.allocated(), self._version
        try:
            yield
        finally:
            self._base += self._meter.allocated() - before
            if self._version == version:
                self._watch.reset()
            else:
                self._watch.restart()

    def _close_gap(self) -> None:
        """Record the code between two calls."""
        assert self._meter is not None
        most = self._peak("code outside of the graphs")
        outside = most - self._held() - self._start()
        self._record.moments.append(Moment(outside, tuple(self._flights)))

    def _note_left(self) -> None:
        """Record what the code after a graph break has allocated since the forward before it."""
        if self._forward_ended is None or self._meter is None:
            return
        (graph, before), self._forward_ended = self._forward_ended, None
        if (held := self._meter.allocated() - before) > 0:
            left = self._record.left
            left[graph.break_after] = left.get(graph.break_after, 0) + held

    def _note_measure(self) -> None:
        """Record whether a dispatch mode, such as a FLOP counter, may hold tensors."""
        if is_recording():
            self._record.is_of_the_step_alone = False

    def _calibrate(
        self, call: RecordedCall, forward: int | None = None, backward: int | None = None
    ) -> None:
        """Take the measured peak of a forward or a backward, if all of it was seen."""
        if not self._record.is_of_the_step_alone or not self._was_seen:
            return
        if self._is_exact and call.graph.measured(call.position, call.sizes, forward, backward):
            self._version += 1

    # Steps -------------------------------------------------------------------------------------

    def _begin(self, graph: StepGraph, sizes: Sizes) -> None:
        """Begin a step, or go on with the one whose calls so far had their backwards."""
        self._forward_ended = None
        # A backward that failed may not have told of its end.
        if self._record.calls and (self._backward is None or current_backward() is None):
            self._finish()
        if self._meter is None:
            self._device = graph.device
            self._meter = meter_of(self._device)
            self._watch = self._meter.watch()
            after_optimizers(self._optimizer_stepped)
        if self._base is None or not self._seen_optimizer:
            # Gradients that an earlier backward accumulated are the step's; once an optimizer was
            # seen, it is its steps that part them.
            held = sum(p.grad.nbytes for p in self._leaves if p.grad is not None)
            allocated = self._meter.allocated()
            self._base = min(allocated, self._entered or allocated) - held
        self._entered = None
        self._watch_root()
        if self._free is None and budgets.parse(self.budget) == "auto":
            # Asked once: later on, the step's own bytes are not free.
            self._free = budgets.resolve(
                self.budget, baseline_peak_bytes=0, device=self._device or torch.device("cpu")
            )
        self._restart()
        self._begun += 1
        with self._unmeasured():
            if self.ranks is None:
                settled = self._settle(graph, sizes)
            elif _is_together(self._begun):
                settled = self._settle_together(self.ranks, graph, sizes)
            else:
                settled = self._settle_alone(graph, sizes)
            self._current = self._anticipated(settled)

    def _watch_root(self) -> None:
        """Let later steps begin where the outermost module does, before its first graph.

        What code before that graph allocates is the step's, such as parameters that are gathered.
        """
        root = outermost_module()
        if root is not None and root not in self._roots:
            self._roots.add(root)
            before_forward(root, self._enter_root)

    def _enter_root(self) -> None:
        """Note the bytes allocated before a step that may begin."""
        with self._lock:
            if self._meter is not None and not self._flights:
                self._entered = self._meter.allocated()

    def _anticipated(self, known: Settled | None) -> Settled | None:
        """Return the choice for a step that begins with more outside bytes than it was known to.

        The gradients that an earlier backward accumulated stay through the step.
        """
        if known is None or self._meter is None:
            return known
        learned, limit = known.learned, known.limit
        grown = self._meter.allocated() - self._start() - learned.moments[0].outside_bytes
        if grown <= 0 or known.choice.peak_bytes + grown <= limit:
            return known
        more = replace(
            learned,
            recent=[
                tuple(replace(m, outside_bytes=m.outside_bytes + grown) for m in learned.moments)
            ],
        )
        for each in dict.fromkeys(learned.calls):
            if each.ranks is None:  # The others need not have more.
                each.learn_levels()
        choice = self._choose(more, known.sizes, limit)
        fits = choice.peak_bytes <= limit
        return replace(known, learned=more, choice=choice) if fits else known

    def _optimizer_stepped(self) -> None:
        with self._lock:
            self._seen_optimizer = True
            if not self._flights:
                if self._record.calls:
                    self._finish()
                self._base = None

    def _finish(self) -> None:
        """End the step: learn from its record, and compare its peak with the budget."""
        record, self._record = self._record, StepRecord()
        if not record.calls or not record.is_of_the_step_alone:
            return
        self.steps += 1
        self.last = record
        first = id(record.calls[0].graph)
        known = self._known.setdefault(first, {})
        found = known.get(record.signature)
        if found is None:
            learned, levels = LearnedStep.of(record), tuple(c.position for c in record.calls)
            found = known[record.signature] = KnownStep(learned, self._limit(learned), levels)
            if len(known) > KINDS:
                del known[next(iter(known))]
        elif found.learned.add(record):
            found.version += 1
        # A step unlike the last ones is expected again once it was seen twice.
        if first not in self._expected or found.learned.count > 1:
            self._expected[first] = record.signature
        self._compare(record, found.limit)

    def _limit(self, learned: LearnedStep, sizes: Sequence[Sizes] | None = None) -> int:
        """Return the budget of a step in bytes; a fraction is of one that has these sizes too."""
        if self._free is not None:
            return self._free
        limit = budgets.resolve(
            self.budget,
            baseline_peak_bytes=learned.baseline_bytes(sizes),
            device=self._device or torch.device("cpu"),
        )
        assert limit is not None
        return limit

    def _settle(self, graph: StepGraph, sizes: Sizes) -> Settled | None:
        """Return the choice for a step that begins with a call of ``graph`` of some sizes.

        It is made anew if figures changed.
        """
        known = self._known_of(graph)
        if known is None:
            return None
        version, settled = known.settled.get(sizes, (None, None))
        if version == (self._version, known.version):
            return settled
        learned, expected = known.learned, known.learned.sizes_after([sizes])
        limit = self._limit(learned, expected)
        room, levels = self._room(limit), known.levels if settled is None else settled.choice.levels
        now = choice_of(learned.program(expected), levels)
        if now.peak_bytes <= room and self._is_good(learned, now, room):
            choice = now
        else:
            for each in dict.fromkeys(learned.calls):
                each.learn_levels(learned.room(room))
            choice = self._compiled_choice(learned, expected, room)
            if choice.peak_bytes > (1 + NOISE) * limit and self._is_exact:
                raise self._infeasible(learned, expected, limit)
            if now.peak_bytes <= room and now.extra_seconds <= choice.extra_seconds * (
                1 + WORTHWHILE
            ):
                choice = now
        if self.settled_at is None:
            self.settled_at = self.steps + 1
        known.limit, known.levels = limit, choice.levels
        if len(known.settled) > SIZES:
            known.settled.clear()
        settled = Settled(learned, expected, choice, limit)
        known.settled[sizes] = (self._version, known.version), settled
        return settled

    def _known_of(self, graph: StepGraph) -> KnownStep | None:
        """Return what is known of the step that is expected to begin with a graph."""
        return self._known.get(id(graph), {}).get(self._expected.get(id(graph)) or ())

    def _settle_alone(self, graph: StepGraph, sizes: Sizes) -> Settled | None:
        """Return the choice that the ranks made, or one for sizes that this rank alone has."""
        known = self._known_of(graph)
        if known is None:
            return None
        if sizes in known.settled:
            return known.settled[sizes][1]
        learned = known.learned
        expected = learned.sizes_after([sizes])
        limit = self._limit(learned, expected)
        room = self._room(limit)
        for each in dict.fromkeys(learned.calls):
            if each.ranks is None:
                each.learn_levels(learned.room(room))
        choice = self._compiled_choice(learned, expected, room)
        settled = Settled(learned, expected, choice, limit)
        known.settled[sizes] = (self._version, known.version), settled
        return settled

    def _settle_together(self, ranks: Ranks, graph: StepGraph, sizes: Sizes) -> Settled | None:
        """Return the choice of all ranks for a step, by the most bytes that any of them measured.

        Where they ran different steps, each rank keeps to its own.
        """
        try:
            return self._settled_together(ranks, graph, sizes)
        except Exception as error:
            ranks.fail(error)
            raise

    def _settled_together(self, ranks: Ranks, graph: StepGraph, sizes: Sizes) -> Settled | None:
        known, subject = self._known_of(graph), f"the levels of step {self._begun}"
        said = None
        if known is not None:
            learned, limit = known.learned, self._limit(known.learned)
            room = self._room(limit)
            now = choice_of(learned.program(), known.levels)
            is_good = now.peak_bytes <= room and self._is_good(learned, now, room)
            said = Said.of(learned, limit, is_good=is_good)
        merged = ranks.decide(subject, said, merged_steps)
        if known is None or merged is None:
            return self._settle_alone(graph, sizes)
        merged.tell(known.learned)
        self._version += 1
        learned, expected = known.learned, known.learned.sizes_after([sizes])
        limit = min(self._limit(learned, expected), merged.limit)
        room = self._room(limit)
        if merged.is_good:
            choice = choice_of(learned.program(expected), known.levels)
        else:
            for each in dict.fromkeys(learned.calls):
                if each.ranks is not None:
                    each.learn_levels(learned.room(merged.limit))
            choice = self._compiled_choice(learned, expected, room)
        over = None
        if choice.peak_bytes > (1 + NOISE) * limit and self._is_exact and not merged.is_good:
            over = self._infeasible(learned, expected, limit)
        tightest = ranks.decide(
            subject, (choice.peak_bytes / max(1, limit), choice.levels, over), _tightest
        )
        if tightest != choice.levels and not any(expected):
            for call, position in zip(learned.calls, tightest, strict=True):
                self._compile(RecordedCall(call, position))
            choice = choice_of(learned.program(expected), tightest)
        if self.settled_at is None:
            self.settled_at = self.steps + 1
        known.limit, known.levels = limit, choice.levels
        settled = Settled(learned, expected, choice, limit)
        known.settled.clear()
        known.settled[sizes] = (self._version, known.version), settled
        return settled

    @staticmethod
    def _is_good(learned: LearnedStep, now: LevelChoice, room: int) -> bool:
        """Return whether a choice recomputes next to nothing, or is the plan of the only graph.

        That plan was made for about as many bytes; at smaller sizes it may recompute too much.
        """
        if now.extra_seconds <= _spare(learned):
            return True
        graph, backward = learned.calls[0], learned.room(room)
        if backward is None or graph.room is None or graph.has_sizes or now.levels != (0,):
            return False
        return backward - graph.room <= WORTHWHILE * room

    def _another(self, number: int, graph: StepGraph, sizes: Sizes) -> Settled | None:
        """Return a known step that begins with the calls so far, and goes on with ``graph``."""
        calls = [*(call.graph for call in self._record.calls), graph]
        for known in reversed(list(self._known.get(id(calls[0]), {}).values())):
            learned = known.learned
            if list(learned.calls[: number + 1]) == calls:
                return self._rest_of_step(learned, self._sizes_with(learned, sizes))
        return None

    def _sizes_with(self, learned: LearnedStep, sizes: Sizes) -> tuple[Sizes, ...]:
        """Return the sizes that a step is expected to have, whose next call has ``sizes``."""
        return learned.sizes_after([*(call.sizes for call in self._record.calls), sizes])

    def _compiled_choice(
        self, learned: LearnedStep, sizes: tuple[Sizes, ...], limit: int
    ) -> LevelChoice:
        """Return a choice of levels that are compiled, as only then their bytes are certain."""
        choice = self._choose(learned, sizes, limit)
        for _ in range(COMPILES):
            used = dict.fromkeys(zip(learned.calls, choice.levels, strict=True))
            new = [RecordedCall(g, i) for g, i in used if g.entries[i].run is None]
            if not new:
                return choice
            for call in new:
                self._compile(call)
            choice = self._choose(learned, sizes, limit)
        return self._choose(learned, sizes, limit, most=0)

    @staticmethod
    def _choose(
        learned: LearnedStep, sizes: tuple[Sizes, ...], limit: int, most: int = LEVELS
    ) -> LevelChoice:
        graphs = {id(graph): graph for graph in learned.calls}
        ready = [
            (key, i)
            for key, graph in graphs.items()
            for i, entry in enumerate(graph.entries)
            if entry.run is not None
        ]
        calls, spare = [id(graph) for graph in learned.calls], _spare(learned)
        return choose_few(learned.program(sizes), limit, calls, ready, most=most, spare=spare)

    @property
    def _is_exact(self) -> bool:
        """Whether measured bytes are exact, so that they may be taken at their word."""
        return self._meter is not None and self._meter.exact

    def _position(self, number: int, graph: StepGraph, sizes: Sizes) -> int:
        """Return the plan that a call takes."""
        current = self._current
        if current is not None:
            learned = current.learned
            if number >= len(learned.calls) or learned.calls[number] is not graph:
                self._current = current = self._another(number, graph, sizes)
            elif current.sizes[number] != sizes:
                expected = self._sizes_with(learned, sizes)
                self._current = current = self._rest_of_step(learned, expected)
            if current is not None:
                return current.choice.levels[number]
        elif graph.is_alone and not self._flights and self._capacity is None:
            return 0
        if graph.ranks is None or self._capacity is None:
            graph.learn_levels()
        return graph.least(self.limit_of(graph))

    def limit_of(self, graph: StepGraph) -> int | None:
        """Return a limit on the peak of one graph, which may take all that there is.

        That is the budget, and the memory there is once some call ran out of it.
        """
        limit = budgets.parse(self.budget)
        if isinstance(limit, int):
            return self._room(limit)
        level = graph.uncheckpointed()
        if not isinstance(limit, float) or level is None:
            return None if self._capacity is None else self._room(self._capacity)
        # The step is at least this graph.
        return self._room(int(limit * max(level.forward_bytes, level.backward_bytes)))

    def misfit(self, graph: StepGraph) -> BudgetInfeasible | None:
        """Return the error for a graph that is over a budget in bytes at every level."""
        limit = budgets.parse(self.budget)
        peaks = [max(x.forward_bytes, x.backward_bytes) for x in graph.levels()]
        if graph.is_alone or not isinstance(limit, int) or not peaks or min(peaks) <= limit:
            return None
        level = graph.uncheckpointed()
        assert level is not None
        baseline = max(level.forward_bytes, level.backward_bytes)
        error = infeasible(self.budget, limit, min(peaks), max(baseline, min(peaks)))
        return BudgetInfeasible(
            f"{error} This is graph {graph.number} of those that the model broke into, and the "
            "budget is that of the step.",
            floor_bytes=error.floor_bytes,
            budget_bytes=error.budget_bytes,
        )

    def is_known_alone(self) -> bool:
        """Return whether a graph may be compiled for the whole budget: nothing is in flight."""
        return self.in_flight == 1 and not self._flights

    def compiling(self) -> None:
        """Take note of a compile, whose own allocations are not the step's."""
        with self._lock:
            self._is_polluted = True

    def set_budget(self, budget: budgets.Budget) -> None:
        """Change the budget, from the next forward on."""
        with self._lock:
            self.budget, self._free, self._capacity = budget, None, None
            self._version += 1
            if self._flights and self._current is not None:
                self._current = self._rest_of_step(self._current.learned, self._current.sizes)

    def _rest_of_step(self, learned: LearnedStep, sizes: tuple[Sizes, ...]) -> Settled:
        """Return the choice for the calls to come; those in flight stay at their levels."""
        program, done = learned.program(sizes), [call.position for call in self._record.calls]
        fixed = tuple(
            (levels[done[i]],) if i < len(done) else levels
            for i, levels in enumerate(program.calls)
        )
        limit = self._limit(learned, sizes)
        rest = choose(StepProgram(fixed, program.moments), self._room(limit))
        levels = (*done, *rest.levels[len(done) :])
        return Settled(learned, sizes, choice_of(program, levels), limit)

    # Reports -----------------------------------------------------------------------------------

    def report(self) -> StepReport | None:
        """Return the report of the latest step that ended, or None before the first."""
        with self._lock:
            record = self.last
            if record is None or self._meter is None:
                return None
            known = self._known.get(id(record.calls[0].graph), {}).get(record.signature)
            learned = LearnedStep.of(record) if known is None else known.learned
            levels = [call.position for call in record.calls]
            program = learned.program([call.sizes for call in record.calls])
            limit, choice = self._limit(learned), choice_of(program, levels)
            rows = []
            counts = Counter(record.calls)
            for call, count in sorted(
                counts.items(), key=lambda item: (item[0].graph.number, item[0].position)
            ):
                graph = call.graph
                each = graph.levels(call.sizes)
                level = each[call.position]
                faster = sum(other.extra_seconds < level.extra_seconds for other in each)
                rows.append(
                    StepRow(
                        graph.number,
                        graph.name,
                        count,
                        faster + 1,
                        len(graph.entries),
                        level.held_bytes,
                        level.forward_bytes,
                        level.backward_bytes,
                        level.extra_seconds,
                    )
                )
            return StepReport(
                tuple(rows),
                limit,
                choice.peak_bytes,
                record.peak_bytes,
                record.peak_at,
                max((moment.outside_bytes for moment in program.moments), default=0),
                self.steps,
                self.settled_at,
                min(choice.extra_seconds, bound_seconds(program, limit)),
                choice.extra_seconds,
                self._meter.describes,
            )

    def _compare(self, record: StepRecord, limit: int) -> None:
        """Tell once, or raise if strict, what a step took that its budget does not allow for."""
        if not self._is_exact:
            return
        if record.peak_bytes > limit + max(TOLD * limit, TOLD_BYTES):
            self._tell("exceeded", BudgetExceeded(self._exceeded(record, limit)))
        for broke, held in record.left.items():
            if held <= max(LEFT * limit, TOLD_BYTES):
                continue
            # Code that follows no break was left by Dynamo if it gave up on a function.
            reason, line = broke or next(iter(failed_frames(self._made_at)), ("", ""))
            if reason:
                message = (
                    f"code that Dynamo left to Python holds {budgets.format_bytes(held)} until the "
                    f"backward, {held / limit:.0%} of the budget of "
                    f"{budgets.format_bytes(limit)}, and has no plan: see {line or 'the model'} "
                    f"({reason}). Change it so that it compiles, or wrap it in "
                    "fxckpt.checkpoint()."
                )
                self._tell(f"left {line}", CaptureError(message))

    def _tell(self, kind: str, error: FxckptError) -> None:
        """Raise an error if strict, else warn of it, once for each kind."""
        if self.strict:
            raise error
        if kind not in self._has_warned:
            self._has_warned.add(kind)
            warnings.warn(str(error), stacklevel=2)

    def _exceeded(self, record: StepRecord, limit: int) -> str:
        """Return the text that says by what part a step was over its budget."""
        message = (
            f"step {self.steps} had a peak of {record.peak_bytes} bytes "
            f"({budgets.format_bytes(record.peak_bytes)}), over the budget of {limit} bytes "
            f"({budgets.format_bytes(limit)}): {record.peak_at}."
        )
        if self.settled_at is None or self.steps <= self.settled_at:
            return message + (
                " Later steps are planned with what this one showed. If several forwards are in "
                "flight at once, say so: fxckpt.Backend(..., in_flight=n)."
            )
        return message + " backend.report() lists what the step holds."

    def _infeasible(
        self, learned: LearnedStep, sizes: tuple[Sizes, ...], limit: int
    ) -> BudgetInfeasible:
        """Return the error for a step that does not fit at any level."""
        floor = least_peak(learned.program(sizes)).peak_bytes
        asked, least = budgets.format_apart(limit, floor)
        baseline = learned.baseline_bytes(sizes)
        fraction = budgets.least_fraction(self.budget, floor, baseline)
        enough = f"'{floor}B'" if fraction is None else f"{fraction} ('{floor}B')"
        outside = max(moment.outside_bytes for moment in learned.moments_at(sizes))
        return BudgetInfeasible(
            f"budget={self.budget!r} is {asked}, below the least peak found for this step of "
            f"{len(learned.calls)} calls, {least}, of which up to {budgets.format_bytes(outside)} "
            f"are allocated outside of the compiled graphs; its uncheckpointed peak is "
            f"{budgets.format_bytes(baseline)}. Raise the budget to at least {enough}, or make the "
            "batch smaller.",
            floor_bytes=floor,
            budget_bytes=limit,
        )
