"""Tracker of steps: measures what is allocated outside of all graphs, and chooses levels.

A step begins with a forward while nothing is in flight, and ends when every forward had its
backward, or was dropped. The first one runs cautiously and is recorded; from then on each call
takes the level that was chosen for its place in the step.
"""

from __future__ import annotations

import threading
import warnings
import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.utils.weak import WeakIdKeyDictionary

from fxckpt import budgets
from fxckpt.errors import BudgetExceeded, BudgetInfeasible
from fxckpt.memory_meter import Meter, Watch, meter_of
from fxckpt.planner.planner import infeasible
from fxckpt.reports.step_report import StepReport, StepRow
from fxckpt.solver.step_choice import (
    Choice,
    Moment,
    StepProgram,
    bound_seconds,
    choice_of,
    choose,
    choose_few,
    least_peak,
)
from fxckpt.step.graph import StepGraph
from fxckpt.step.record import LearnedStep, RecordedCall, StepRecord
from fxckpt.torch_private import (
    after_optimizers,
    at_engine_exit,
    backward_node,
    is_compiled_autograd,
    keeps_graph,
    not_compiled,
)

WORTHWHILE = 0.02
"""Least share of the step's recompute time that a new choice must save to be taken."""
TOLD = 0.001
"""Share of the budget from which a peak over it is told."""
TOLD_BYTES = 4096
"""Bytes over the budget from which a peak is told; a loss and a few scalars take less."""
KINDS = 16
"""Most kinds of steps that are remembered for one first graph."""
NOISE = 0.01
"""Share of the budget by which a step that runs at its floor may be over it before it is refused.

Bytes outside of the graphs vary from step to step; a peak over the budget is warned of.
"""


class _Flight:
    """One call between its forward and its backward."""

    def __init__(self, tracker: StepTracker, number: int, step: object) -> None:
        self.number, self.step = number, step
        self.start = 0
        """Bytes allocated when its backward began."""
        self._tracker = weakref.ref(tracker)

    def __del__(self) -> None:
        tracker = self._tracker()
        if tracker is not None:
            tracker.dropped(self)


@dataclass
class Settled:
    """Levels chosen for a step that was seen before."""

    learned: LearnedStep
    choice: Choice
    limit: int
    version: int = -1
    """Version of the levels and the budget that the choice was made by."""
    is_dirty: bool = True
    """Whether the step took more outside bytes than the choice knows."""


class StepTracker:
    """Runs the calls of a step, each at the level that keeps the step within the budget."""

    def __init__(self, budget: budgets.Budget, in_flight: int = 1, strict: bool = False) -> None:
        self.budget, self.in_flight, self.strict = budget, in_flight, strict
        self.steps = 0
        """Number of steps that ended."""
        self.settled_at: int | None = None
        """Number of the step from which on levels are chosen by what was learned."""
        self.last: StepRecord | None = None
        """Record of the latest step that ended."""
        self._known: dict[int, dict[tuple[object, ...], Settled]] = {}
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
        self._record = StepRecord()
        self._flights: dict[int, int] = {}
        self._current: Settled | None = None
        self._leaves = WeakIdKeyDictionary()
        self._seen_optimizer = False
        self._engine_runs = False
        self._is_polluted = False
        self._free: int | None = None
        self._has_warned: set[str] = set()

    # Calls ------------------------------------------------------------------------------------

    def forward(self, graph: StepGraph, args: Sequence[Any]) -> Any:
        """Run the forward of a call at the level chosen for it."""
        with self._lock:
            if not self._flights:
                self._begin(graph)
            self._close_gap()
            number = len(self._record.calls)
            position = self._position(number, graph)
            if graph.entries[position].run is None:
                self._version += 1
            run = graph.run(position)
            # What a compile allocates is not the step's.
            start = self._restart()
            step = self._record
            step.calls.append(RecordedCall(graph, position))
            if not self._seen_optimizer:
                for arg in args:
                    if isinstance(arg, torch.Tensor) and arg.is_leaf and arg.requires_grad:
                        self._leaves[arg] = None
        try:
            outputs = run(*args)
        except BaseException:
            # What was recorded is no step to learn from; backwards of its calls are not followed.
            with self._lock:
                self._record = StepRecord()
                self._flights.clear()
            raise
        with self._lock:
            level = graph.entries[position].level
            own = self._peak(f"the forward of call {number + 1}, {graph.name}") - start
            step.moments.append(
                Moment(start - self._held() - self._start(), tuple(self._flights), number)
            )
            self._calibrate(graph, position, own, None)
            node = backward_node(outputs)
            if node is not None:
                self._fly(node, number, level.held_bytes, graph, position)
            self._restart()
        return outputs

    def _fly(self, node: Any, number: int, held: int, graph: StepGraph, position: int) -> None:
        """Follow a call from the end of its forward to its backward."""
        flight = _Flight(self, number, self._record)
        self._flights[number] = held

        def enter(gradients: Any) -> None:
            if not is_compiled_autograd():
                self._enter_backward(flight)

        def leave(gradients: Any, incoming: Any) -> None:
            if not is_compiled_autograd():
                self._leave_backward(flight, graph, position)

        not_compiled(enter)
        not_compiled(leave)
        node.register_prehook(enter)
        node.register_hook(leave)

    def _enter_backward(self, flight: _Flight) -> None:
        with self._lock:
            if flight.step is not self._record:
                return  # A second backward of an earlier step.
            if not self._engine_runs:
                self._engine_runs = True
                at_engine_exit(self._leave_engine)
            self._close_gap()
            flight.start = self._restart()

    def _leave_backward(self, flight: _Flight, graph: StepGraph, position: int) -> None:
        with self._lock:
            if flight.step is not self._record:
                return
            number, held = flight.number, self._flights.pop(flight.number, 0)
            if keeps_graph():
                self._flights[number] = held  # Its saved values stay, for another backward.
            own = self._peak(f"the backward of call {number + 1}, {graph.name}") - flight.start
            others = tuple(each for each in self._flights if each != number)
            outside = flight.start - sum(self._flights[each] for each in others) - held
            outside -= self._start()
            self._record.moments.append(Moment(outside, others, number, True))
            self._calibrate(graph, position, None, own + held)
            self._restart()

    def _leave_engine(self) -> None:
        with self._lock:
            self._engine_runs = False
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
        """Return the greatest bytes allocated since the latest boundary."""
        assert self._watch is not None
        peak = self._watch.peak()
        if peak - self._start() > self._record.peak_bytes:
            self._record.peak_bytes, self._record.peak_at = peak - self._start(), where
        return peak

    def _restart(self) -> int:
        """Forget the peak so far; return the bytes allocated now."""
        assert self._watch is not None and self._meter is not None
        self._watch.reset()
        return self._meter.allocated()

    def _close_gap(self) -> None:
        """Record the code between two calls."""
        assert self._meter is not None
        if self._is_polluted:
            self._is_polluted = False
            most = self._meter.allocated()
        else:
            most = self._peak("code outside of the graphs")
        outside = most - self._held() - self._start()
        self._record.moments.append(Moment(outside, tuple(self._flights)))

    def _calibrate(
        self, graph: StepGraph, position: int, forward: int | None, backward: int | None
    ) -> None:
        """Take the measured peak of a forward or a backward where it was above the planned one."""
        if self._is_exact and graph.measured(position, forward, backward):
            self._version += 1

    # Steps -------------------------------------------------------------------------------------

    def _begin(self, graph: StepGraph) -> None:
        """Begin a step, or go on with the one whose calls so far had their backwards."""
        if self._record.calls and not self._engine_runs:
            self._finish()
        if self._meter is None:
            self._device = graph.device
            self._meter = meter_of(self._device)
            self._watch = self._meter.watch()
            handle = after_optimizers(_weak(self._optimizer_stepped))
            weakref.finalize(self, handle.remove)
        if self._base is None or not self._seen_optimizer:
            # Gradients that an earlier backward accumulated are the step's; once an optimizer was
            # seen, it is its steps that part them.
            held = sum(p.grad.nbytes for p in self._leaves if p.grad is not None)
            self._base = self._meter.allocated() - held
        if self._free is None and budgets.parse(self.budget) == "auto":
            # Asked once: later on, the step's own bytes are not free.
            self._free = budgets.resolve(
                self.budget, baseline_peak_bytes=0, device=self._device or torch.device("cpu")
            )
        self._restart()
        self._current = self._anticipated(self._settle(graph))

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
            each.learn_levels()
        choice = self._choose(more, limit)
        return Settled(more, choice, limit) if choice.peak_bytes <= limit else known

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
        if not record.calls:
            return
        self.steps += 1
        self.last = record
        first = id(record.calls[0].graph)
        known = self._known.setdefault(first, {})
        settled = known.get(record.signature)
        if settled is None:
            learned = LearnedStep.of(record)
            choice = choice_of(learned.program(), [call.position for call in record.calls])
            settled = known[record.signature] = Settled(learned, choice, self._limit(learned))
            if len(known) > KINDS:
                del known[next(iter(known))]
        elif settled.learned.add(record):
            settled.is_dirty = True
        # A step unlike the last ones is expected again once it was seen twice.
        if first not in self._expected or settled.learned.count > 1:
            self._expected[first] = record.signature
        self._compare(record, settled.limit)

    def _limit(self, learned: LearnedStep) -> int:
        """Return the budget of a step in bytes."""
        if self._free is not None:
            return self._free
        program = learned.baseline()
        baseline = choice_of(program, [0] * len(program.calls)).peak_bytes
        limit = budgets.resolve(
            self.budget, baseline_peak_bytes=baseline, device=self._device or torch.device("cpu")
        )
        assert limit is not None
        return limit

    def _settle(self, graph: StepGraph) -> Settled | None:
        """Return the choice for a step that begins with ``graph``, made anew if figures changed."""
        signature = self._expected.get(id(graph))
        known = self._known.get(id(graph), {}).get(signature or ())
        if known is None:
            return None
        if known.version == self._version and not known.is_dirty:
            return known
        learned, limit = known.learned, self._limit(known.learned)
        now = choice_of(learned.program(), known.choice.levels)
        if now.peak_bytes <= limit and now.extra_seconds <= 0:
            choice = now
        else:
            for each in dict.fromkeys(learned.calls):
                each.learn_levels(learned.room(limit))
            choice = self._choose(learned, limit)
            if choice.peak_bytes > (1 + NOISE) * limit and self._is_exact:
                raise self._infeasible(learned, limit)
            if now.peak_bytes <= limit and now.extra_seconds <= choice.extra_seconds * (
                1 + WORTHWHILE
            ):
                choice = now
        if self.settled_at is None:
            self.settled_at = self.steps + 1
        known.choice, known.limit = choice, limit
        known.version, known.is_dirty = self._version, False
        return known

    def _another(self, number: int, graph: StepGraph) -> Settled | None:
        """Return a known step that begins with the calls so far, and goes on with ``graph``."""
        calls = [*(call.graph for call in self._record.calls), graph]
        for known in reversed(list(self._known.get(id(calls[0]), {}).values())):
            if list(known.learned.calls[: number + 1]) == calls:
                return self._rest_of_step(known)
        return None

    @staticmethod
    def _choose(learned: LearnedStep, limit: int) -> Choice:
        graphs = {id(graph): graph for graph in learned.calls}
        ready = [
            (key, i)
            for key, graph in graphs.items()
            for i, entry in enumerate(graph.entries)
            if entry.run is not None
        ]
        calls = [id(graph) for graph in learned.calls]
        return choose_few(learned.program(), limit, calls, ready)

    @property
    def _is_exact(self) -> bool:
        """Whether measured bytes are exact, so that they may be taken at their word."""
        return self._meter is not None and self._meter.exact

    def _position(self, number: int, graph: StepGraph) -> int:
        """Return the plan that a call takes."""
        current = self._current
        if current is not None:
            calls, levels = current.learned.calls, current.choice.levels
            if number < len(calls) and calls[number] is graph:
                return levels[number]
            self._current = self._another(number, graph)
            if self._current is not None:
                return self._current.choice.levels[number]
        elif graph.is_alone and not self._flights:
            return 0
        graph.learn_levels()
        return graph.least()

    def misfit(self, graph: StepGraph) -> BudgetInfeasible | None:
        """Return the error for a graph that is over a budget in bytes at every level."""
        limit = budgets.parse(self.budget)
        peaks = [max(x.forward_bytes, x.backward_bytes) for x in graph.levels()]
        if graph.is_alone or not isinstance(limit, int) or not peaks or min(peaks) <= limit:
            return None
        assert graph.baseline is not None
        baseline = max(graph.baseline.forward_bytes, graph.baseline.backward_bytes)
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
        """Take note that Dynamo compiled a graph, whose own allocations are not the step's."""
        with self._lock:
            self._is_polluted = True

    def set_budget(self, budget: budgets.Budget) -> None:
        """Change the budget, from the next forward on."""
        with self._lock:
            self.budget, self._free = budget, None
            self._version += 1
            if self._flights and self._current is not None:
                self._current = self._rest_of_step(self._current)

    def _rest_of_step(self, current: Settled) -> Settled:
        """Return the choice for the calls to come; those in flight stay at their levels."""
        learned, done = current.learned, [call.position for call in self._record.calls]
        program = learned.program()
        fixed = tuple(
            (levels[done[i]],) if i < len(done) else levels
            for i, levels in enumerate(program.calls)
        )
        limit = self._limit(learned)
        rest = choose(StepProgram(fixed, program.moments), limit)
        levels = (*done, *rest.levels[len(done) :])
        return Settled(learned, choice_of(program, levels), limit)

    # Reports -----------------------------------------------------------------------------------

    def report(self) -> StepReport | None:
        """Return the report of the latest step that ended, or None before the first."""
        with self._lock:
            record = self.last
            if record is None or self._meter is None:
                return None
            learned = LearnedStep.of(record)
            levels = [call.position for call in record.calls]
            limit, choice = self._limit(learned), choice_of(learned.program(), levels)
            rows = []
            counts = Counter((call.graph, call.position) for call in record.calls)
            for (graph, position), count in sorted(
                counts.items(), key=lambda item: (item[0][0].number, item[0][1])
            ):
                level = graph.levels()[position]
                faster = sum(
                    other.level.extra_seconds < level.extra_seconds for other in graph.entries
                )
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
                max((moment.outside_bytes for moment in record.moments), default=0),
                self.steps,
                self.settled_at,
                min(choice.extra_seconds, bound_seconds(learned.program(), limit)),
                choice.extra_seconds,
                self._meter.describes,
            )

    def _compare(self, record: StepRecord, limit: int) -> None:
        """Warn once, or raise if strict, where the measured peak of a step is over the budget."""
        if record.peak_bytes <= limit + max(TOLD * limit, TOLD_BYTES) or not self._is_exact:
            return
        message = (
            f"step {self.steps} had a peak of {record.peak_bytes} bytes "
            f"({budgets.format_bytes(record.peak_bytes)}), over the budget of {limit} bytes "
            f"({budgets.format_bytes(limit)}): {record.peak_at}."
        )
        if self.settled_at is None or self.steps <= self.settled_at:
            message += (
                " Later steps are planned with what this one showed. If several forwards are in "
                "flight at once, say so: fxckpt.Backend(..., in_flight=n)."
            )
        else:
            message += " backend.report() lists what the step holds."
        if self.strict:
            raise BudgetExceeded(message)
        if "exceeded" not in self._has_warned:
            self._has_warned.add("exceeded")
            warnings.warn(message, stacklevel=2)

    def _infeasible(self, learned: LearnedStep, limit: int) -> BudgetInfeasible:
        """Return the error for a step that does not fit at any level."""
        floor = least_peak(learned.program()).peak_bytes
        asked, least = budgets.format_apart(limit, floor)
        baseline = choice_of(learned.baseline(), [0] * len(learned.calls)).peak_bytes
        fraction = budgets.least_fraction(self.budget, floor, baseline)
        enough = f"'{floor}B'" if fraction is None else f"{fraction} ('{floor}B')"
        outside = max(moment.outside_bytes for moment in learned.moments)
        return BudgetInfeasible(
            f"budget={self.budget!r} is {asked}, below the least peak found for this step of "
            f"{len(learned.calls)} calls, {least}, of which up to {budgets.format_bytes(outside)} "
            f"are allocated outside of the compiled graphs; its uncheckpointed peak is "
            f"{budgets.format_bytes(baseline)}. Raise the budget to at least {enough}, or make the "
            "batch smaller.",
            floor_bytes=floor,
            budget_bytes=limit,
        )


def _weak(method: Callable[[], None]) -> Callable[[], None]:
    """Return a function that calls a method while its object lives."""
    held = weakref.WeakMethod(method)

    def call() -> None:
        alive = held()
        if alive is not None:
            alive()

    return call
