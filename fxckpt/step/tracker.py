"""Tracker of steps: runs each call at its level, and measures what is allocated around the calls.

A step begins with a forward while nothing is in flight, and ends when every forward had its
backward, or was dropped. The first one runs cautiously and is recorded; from then on each call
takes the level that was chosen for its place in the step.
"""

from __future__ import annotations

import gc
import threading
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch

from fxckpt import budgets
from fxckpt.errors import BudgetInfeasible, InvalidOption
from fxckpt.planner.ranks import Ranks
from fxckpt.planner.refusals import infeasible
from fxckpt.reports.step_report import StepReport
from fxckpt.solver.step_choice import Moment
from fxckpt.step.begin import StepBegin, is_parameter
from fxckpt.step.flight import Flight, RunningBackwards
from fxckpt.step.graph import Sizes, StepGraph
from fxckpt.step.inputs import Input, kept_bytes, made_inputs
from fxckpt.step.levels import StepChoice, StepLevels, sizes_with
from fxckpt.step.measure import StepMeter
from fxckpt.step.out_of_memory import GeneratorStates, free_memory, is_out_of_memory
from fxckpt.step.record import RecordedCall, StepRecord
from fxckpt.step.table import step_report
from fxckpt.step.together import choose_together, is_together
from fxckpt.step.warn import StepWarnings
from fxckpt.torch_private import (
    FakeTensor,
    after_optimizers,
    at_engine_exit,
    backward_node,
    before_optimizers,
    current_backward,
    is_early_stop,
    is_in_checkpoint,
    is_recording,
    keeps_graph,
    outermost_module,
    watch_backward,
)

LOWERED = 2
"""Most times that a forward runs again by another plan: the one chosen for the rest of the step
within the memory that there was, then the one that holds least."""

FEW = 32
"""Least number of calls in flight at once that a step is taken to have."""

SHORT = 0.9
"""Most of its peak that a step may have again after memory ran out outside of the graphs."""

RUNNING: RunningBackwards[StepTracker] = RunningBackwards()
"""Trackers with calls in the backwards that run."""


class StepTracker:
    """Runs the calls of a step, each at the level that keeps the step within the budget."""

    def __init__(
        self, budget: budgets.Budget, in_flight: int = 1, strict: bool = False, name: str = ""
    ) -> None:
        self.in_flight, self.name = in_flight, name
        """Most forwards of one graph in flight, and the name of the backend in errors."""
        self.is_of_blocks = False
        """Whether its graphs are known to be parts of a model, whatever calls the first one."""
        self.ranks: Ranks | None = None
        """The ranks that choose levels as one; None chooses for this process alone."""
        self.last: StepRecord | None = None
        """Record of the latest step that ended."""
        self._levels = StepLevels(budget)
        self._warnings = StepWarnings(strict=strict)
        self._lock = threading.RLock()
        self._beginning = StepBegin()
        self._record = StepRecord()
        self._flights: dict[int, int] = {}
        """Bytes held by each call in flight, by its number."""
        self._running = 0
        """Number of forwards that run, in other threads too."""
        self._leaves: dict[int, set[int]] = {}
        """Identities of the parameters of each call in flight."""
        self._passed: dict[int, int] = {}
        """Number of backwards, of other calls, that each has seen end."""
        self._most = 0
        """Most calls in flight at once in the step."""
        self._peak_before = 0
        """Most bytes allocated from the outermost module on, until the first call is measured."""
        self._inputs: dict[int, dict[int, Input]] = {}
        """Inputs of each call so far which other graphs, or code between them, made."""
        self._current: StepChoice | None = None
        """Levels chosen for this step; None while it is learned."""
        self._limit = 0
        self._seen = set[Hashable]()
        """Levels of steps whose peak was seen, on a device that may hide it."""
        """Budget in bytes when the step began; 0 while it is learned."""
        self._forward_ended: tuple[StepGraph, int] | None = None
        """Graph of the latest forward, and the bytes allocated at its end, until code follows."""
        self._backward: object | None = None
        """The backward whose end is awaited."""
        self._has_compiled = False
        """Whether a graph was compiled since the latest step whose backward began."""
        self._has_schedule = False
        """Whether steps begin where a schedule of a pipeline says."""
        self._refused = 0
        """How often memory had run out when the step began."""
        self._ended = self._begun = 0
        """Number of steps that ended, and the greatest number of one that began: a forward that one
        rank drops, and repeats, is no step of which the others know."""

    @property
    def steps(self) -> int:
        """Number of steps that ended."""
        return self._levels.steps

    @property
    def _meter(self) -> StepMeter:
        """Measure of the step's device, once a step began."""
        assert self._levels.meter is not None
        return self._levels.meter

    @property
    def share(self) -> float | None:
        """Budget that is a fraction; None for another."""
        parsed = budgets.parse(self._levels.budget)
        return parsed if isinstance(parsed, float) else None

    # Calls ------------------------------------------------------------------------------------

    def forward(self, graph: StepGraph, args: Sequence[Any]) -> Any:
        """Run the forward of a call at the level chosen for it.

        Fake tensors take no memory, and their backward never comes: so torch finds the shapes
        between the parts of a graph that it splits at DDP's buckets. Such a call is none of a step.
        """
        if any(isinstance(arg, FakeTensor) for arg in args):
            with self._lock:
                return graph.run(graph.compiled_position(self.limit_of(graph)))(*args)
        sizes = graph.sizes_of(args)
        with self._lock:
            if self._is_idle:
                self._begin(graph, sizes)
            within = self._within()
            self._close_gap()
            self._note_left()
            self._note_measure()
            number = len(self._record.calls)
            with self._meter.unmeasured(self._version):
                is_repeated = is_in_checkpoint()
                position = (
                    self._repeated(graph) if is_repeated else self._position(number, graph, sizes)
                )
                call = RecordedCall(graph, position, sizes, is_repeated)
                self._levels.compile(call)
            start = self._restart()
            step = self._record
            step.calls.append(call)
            self._beginning.note_leaves(args)
            if not graph.has_sizes and not is_repeated and self.ranks is None:
                self._inputs[number] = made_inputs(args)
            self._running += 1
        try:
            outputs, call = self._run(step, number, call, args)
        except BaseException as error:
            with self._lock:
                self._running -= 1
                # A region that recomputes stops once it has what it needs: the graph had run.
                if is_early_stop(error) and step is self._record:
                    self._end_forward(step, number, call, start)
            raise
        with self._lock:
            self._running -= 1
            if step is not self._record:
                return outputs  # Another thread's error has forgotten the step meanwhile.
            self._end_forward(step, number, call, start)
            node = backward_node(outputs)
            if node is not None:
                self._flights[number] = call.held_bytes
                self._leaves[number] = {id(arg) for arg in args if is_parameter(arg)}
                self._most = max(self._most, len(self._flights))
                watch_backward(node, Flight(self, number, step, call, within))
            self._forward_ended = (graph, self._restart())
        return outputs

    @property
    def _is_idle(self) -> bool:
        """Whether no call is in flight, or on its way there."""
        return not self._flights and not self._running

    def _within(self) -> object | None:
        """Return the backward that a forward runs in, with which the step is to end; None if none.

        There a reversible block, or a reentrant checkpoint, runs again, and has its own backward.
        """
        if (running := current_backward()) is None:
            return None
        if self._backward is None:
            self._await(running)
        return self._backward

    def _await(self, backward: object) -> None:
        """Take a backward that runs for the one of the step."""
        self._refuse_second(backward)
        self._backward = backward
        at_engine_exit(self._leave_engine)

    def _end_forward(self, step: StepRecord, number: int, call: RecordedCall, start: int) -> None:
        """Record the forward of a call that began with ``start`` bytes allocated."""
        own = self._peak(f"the forward of call {number + 1}, {call.graph.name}") - start
        outside = start - self._held() - self._meter.start
        step.moments.append(self._moment(outside, tuple(self._flights), number))
        self._calibrate(call, forward=own)
        self._restart()

    def _run(
        self, step: StepRecord, number: int, call: RecordedCall, args: Sequence[Any]
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
                if is_out_of_memory(error) and graph.runs_again and step is self._record:
                    lower = self._lowered(number, call, is_last=tries + 1 >= LOWERED)
                if lower is None or tries == LOWERED:
                    if not is_early_stop(error):
                        with self._lock:
                            if step is self._record:
                                self._forget()
                    raise
            # The error, whose traceback holds tensors, is gone by now.
            states.restore()
            free_memory()
            call = lower
            with self._lock:
                with self._meter.unmeasured(self._version):
                    self._levels.compile(call)
                if step is self._record:
                    step.calls[number] = call
                self._restart()
        raise AssertionError("the last try returns or raises")

    def _lowered(self, number: int, call: RecordedCall, *, is_last: bool) -> RecordedCall | None:
        """Return a call by a plan that takes less than one that ran out of memory, if there is."""
        graph = call.graph
        with self._lock:
            self._levels.take_capacity(self._meter.seen())
            del self._record.calls[number:]
            if self._current is not None and not is_last:
                self._current = self._rest(self._current)
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
            lower = replace(call, position=graph.least(limit, self._away()))
            self._record.calls.append(lower)
            return None if lower == call else lower

    def enter_backward(self, flight: Flight) -> None:
        """Begin to measure the backward of a call."""
        with self._lock:
            if flight.step is not self._record:
                return  # A second backward of an earlier step.
            is_nested = flight.within is not None and flight.within == self._backward
            if not is_nested and (running := current_backward()) != self._backward:
                self._await(running)
            self._close_gap()
            self._note_left()
            self._note_measure()
            if not self._record.has_backward:
                self._collect_after_compiles()
                self._note_kept()
            flight.start = self._restart()

    def _refuse_second(self, backward: object) -> None:
        """Raise :class:`InvalidOption` if another budget's calls are in the same backward."""
        RUNNING.leave(self)  # A backward that failed may not have told of its end.
        other = RUNNING.enter(backward, self)
        if other is None or other._levels.device != self._levels.device:
            return
        self._forget()
        raise InvalidOption(
            f"two budgets of one step: {other.name} and {self.name} have calls in one backward. A "
            "budget is that of the whole step: compile all of it with one Backend object, or give "
            "each graph a budget of its own with scope='graph'."
        )

    def leave_backward(self, flight: Flight) -> None:
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
            outside -= self._meter.start
            self._record.moments.append(self._moment(outside, others, number, is_backward=True))
            self._calibrate(flight.call, backward=own + held)
            self._restart()

    def failed_backward(self, flight: Flight, error: BaseException) -> None:
        """Forget the step of a call; if memory ran out, later ones are to take less."""
        with self._lock:
            if flight.step is not self._record:
                return
            if is_out_of_memory(error):
                self._levels.take_capacity(self._meter.seen())
            self._forget()

    def forget_step(self, flight: Flight) -> None:
        """Learn nothing from the step of a call."""
        with self._lock:
            if flight.step is self._record:
                self._forget()

    def _forget(self) -> None:
        """Drop what was recorded; backwards of its calls are not followed."""
        self._record = StepRecord()
        self._flights.clear()
        self._passed.clear()
        self._inputs.clear()
        self._most = 0
        self._forward_ended = None

    def _leave_engine(self) -> None:
        RUNNING.leave(self)
        with self._lock:
            self._backward = None
            if not self._record.calls:
                return  # An optimizer that stepped inside of the backward has ended the step.
            self._close_gap()
            if self._has_schedule:
                return
            # One that so many backwards have passed by is of an output that is kept and looked at.
            self._passed = {n: self._passed.get(n, 0) + 1 for n in self._flights}
            most = 2 * max(self._most, FEW)
            is_passed = bool(self._flights) and min(self._passed.values()) > most
            if is_passed:
                self._record.is_of_the_step_alone = False
                self._drop_flights(self._flights)
            if self._is_idle:
                self._finish()
            if is_passed:
                self._meter.base = None

    def _drop_flights(self, numbers: Iterable[int]) -> None:
        """Leave calls in flight to what is held outside of the steps to come."""
        for number in tuple(numbers):
            del self._flights[number]
            self._passed.pop(number, None)

    def dropped(self, flight: Flight) -> None:
        """Note that a call's autograd graph is gone."""
        with self._lock:
            if flight.step is self._record:
                self._flights.pop(flight.number, None)

    # Measures ----------------------------------------------------------------------------------

    def _held(self) -> int:
        """Return the bytes held by the calls in flight."""
        return sum(self._flights.values())

    def _away(self) -> int:
        """Return the bytes that the calls in flight have sent away."""
        return sum(self._record.calls[number].away_bytes for number in self._flights)

    def _version(self) -> int:
        """Return a number that changes with every compile."""
        return self._levels.version

    def _peak(self, where: str) -> int:
        """Return the greatest bytes allocated since the latest boundary, and record them."""
        peak = self._meter.peak()
        self._record.is_exact &= self._meter.was_seen
        most = self._meter.most - self._meter.start
        self._record.most_bytes = max(self._record.most_bytes, most)
        if peak - self._meter.start > self._record.peak_bytes:
            self._record.peak_bytes, self._record.peak_at = peak - self._meter.start, where
        return peak

    def _restart(self) -> int:
        """Forget the peak so far; return the bytes allocated now."""
        return self._meter.restart(is_learning=self._current is None)

    def _close_gap(self) -> None:
        """Record the code between two calls."""
        most = max(self._peak("code outside of the graphs"), self._peak_before)
        self._peak_before = 0
        outside = most - self._held() - self._meter.start
        self._record.moments.append(self._moment(outside, tuple(self._flights)))

    def _moment(
        self,
        outside: int,
        held: tuple[int, ...],
        running: int | None = None,
        *,
        is_backward: bool = False,
    ) -> Moment:
        """Return a moment of the step; what calls alone keep of their inputs is theirs."""
        kept = self._record.kept
        keeps = tuple(number for number in (*held, running) if number in kept)
        outside -= sum(sum(kept[number].values()) for number in keeps)
        return Moment(outside, held, running, is_backward, keeps)

    def _collect_after_compiles(self) -> None:
        """Collect garbage before the backward of a step in which graphs were compiled.

        Frames of the compiler, in cycles, hold what the code between the graphs had let go.
        """
        if self._has_compiled:
            self._has_compiled = False
            gc.collect()

    def _note_kept(self) -> None:
        """Record, as the first backward begins, what calls in flight alone keep of their inputs.

        From then on nothing else will take hold of it; up to now, code between the graphs may have.
        """
        for number in self._flights:
            if (inputs := self._inputs.get(number)) is not None:
                self._record.kept[number] = kept_bytes(inputs)
        self._inputs.clear()

    def _note_left(self) -> None:
        """Record what the code after a graph break has allocated since the forward before it."""
        if self._forward_ended is None:
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
        if not self._record.is_of_the_step_alone or not self._meter.was_seen:
            return
        if self._meter.is_exact and call.graph.measured(
            call.position, call.sizes, forward, backward
        ):
            self._levels.version += 1

    # Steps -------------------------------------------------------------------------------------

    def _begin(self, graph: StepGraph, sizes: Sizes) -> None:
        """Begin a step, or go on with the one whose calls so far had their backwards.

        Where a schedule tells of the steps, its micro-batches are one.
        """
        self._forward_ended = None
        is_in_backward = current_backward() is not None
        if self._record.calls and not self._has_schedule:
            if self._backward is None or not is_in_backward:
                self._end()
        if self._record.calls:
            return
        self._backward = None
        levels, meter = self._levels, self._meter_of(graph)
        self._beginning.collect_before(graph)
        # What ran since the outermost module was entered is the step's, and its peak too.
        is_entered = self._beginning.find(meter, is_in_backward=is_in_backward)
        self._refused = meter.refused()
        has_root = self._watch_root()
        self._record.is_whole = is_entered or not (has_root or is_in_backward)
        levels.ask_free()
        self._peak_before = self._peak("code before the first graph") if is_entered else 0
        self._restart()
        levels.begun = self._ended + 1
        is_new, self._begun = levels.begun > self._begun, levels.begun
        outside = meter.allocated() - meter.start
        with meter.unmeasured(self._version):
            if self.ranks is None:
                chosen = levels.choice_for(graph, sizes, outside, is_nested=is_in_backward)
            elif is_new and is_together(levels.begun):
                chosen = choose_together(levels, self.ranks, graph, sizes)
            else:
                chosen = levels.choice_alone(graph, sizes)
            self._current = levels.anticipated(chosen, outside)
        self._limit = 0 if self._current is None else self._current.limit
        # The peak is the user's again once the levels were seen to keep the budget.
        is_unseen = self._current is not None and self._key(self._current) not in self._seen
        if is_unseen and meter.hides(self._limit):
            meter.restart(is_learning=True)

    def _meter_of(self, graph: StepGraph) -> StepMeter:
        """Return the measure of the step's device, which its first graph tells."""
        if self._levels.meter is None:
            self._levels.meter = StepMeter(graph.device)
            before_optimizers(self._optimizer_begins)
            after_optimizers(self._optimizer_stepped)
        return self._levels.meter

    def _watch_root(self) -> bool:
        """Let later steps begin where the outermost module does; return whether there is one.

        What code before its first graph allocates is the step's, such as parameters that are
        gathered.
        """
        root = outermost_module()
        if root is None or self._has_schedule:
            return False
        self._beginning.note_root(root, self._enter_root)
        return True

    def pass_by(self, graph: StepGraph) -> None:
        """Note a call without gradients, for a backward that runs the graph again with them.

        A step that begins in that backward has begun with the outermost module of this call.
        """
        with self._lock:
            if not self._is_idle or self._has_schedule or self._beginning.has_passed:
                return
            self._meter_of(graph)
            root = outermost_module()
            if root is not None:
                self._beginning.note_root(root, self._pass_root)

    def leave_model(self) -> None:
        """Leave the outermost modules as they were before their steps were followed."""
        with self._lock:
            self._beginning.forget_roots()

    def _enter_root(self) -> None:
        """Note the bytes allocated before a step that may begin."""
        with self._lock:
            if self._levels.meter is not None and self._is_idle:
                self._beginning.entered = self._entered()

    def _pass_root(self) -> None:
        """Note the bytes allocated before a step that may begin in a backward."""
        with self._lock:
            if self._backward is not None and current_backward() is None and self._record.calls:
                self._end()  # That backward failed, and has not told of its end.
            if self._is_idle:
                self._beginning.note_passed(self._entered())

    def _entered(self) -> int:
        """Return the bytes allocated where a step may begin, and measure from there."""
        return self._meter.allocated() if self._record.calls else self._restart()

    def _optimizer_begins(self, optimizer: torch.optim.Optimizer) -> None:
        with self._lock:
            self._beginning.is_in_optimizer = True

    def _optimizer_stepped(self, optimizer: torch.optim.Optimizer) -> None:
        with self._lock:
            self._beginning.has_optimizer, self._beginning.is_in_optimizer = True, False
            if self._flights and current_backward() is None and self._record.has_backward:
                # Where their parameters are others now, outputs are only looked at.
                changed = {id(p) for group in optimizer.param_groups for p in group["params"]}
                self._drop_flights([n for n in self._flights if changed & self._leaves[n]])
            if self._is_idle:
                if self._record.calls:
                    self._end()
                self._meter.base = None

    def _end(self) -> None:
        """End the step, of which nothing is learned if it was cut short.

        That is one without a backward, or whose backward raised an error: it never told of its end.
        """
        has_failed = self._backward is not None and current_backward() is None
        if self._record.has_backward and not has_failed:
            self._finish()
            return
        if self._meter.refused() > self._refused:
            # In code outside of the graphs; what ran since may have had more.
            most = self._meter.seen()
            if self._current is not None:
                peak = int(SHORT * self._current.choice.peak_bytes)
                most = min(most, self._meter.start + peak)
            self._levels.take_capacity(most)
        self._backward = None
        self._forget()

    def _finish(self) -> None:
        """End the step: learn from its record, and compare its peak with the budget."""
        record, self._record = self._record, StepRecord()
        self._passed.clear()
        self._most = 0
        self._beginning.note_end(self._meter)
        if not record.calls:
            return
        self._ended += 1
        if not record.is_of_the_step_alone:
            return
        self.last = record
        if self._current is not None and record.peak_bytes == record.most_bytes:
            self._seen.add(self._key(self._current))
        found = self._levels.learn(record)
        if self._meter.is_exact:
            limit = self._limit
            if record.peak_bytes > limit:  # A fraction is of what this step took outside, too.
                limit = max(limit, self._levels.limit(found.learned))
                found.was_over |= record.peak_bytes > limit
            self._warnings.compare(record, limit, self.steps, self._levels.settled_at)

    @staticmethod
    def _key(current: StepChoice) -> Hashable:
        """Return the graphs of a step and their levels."""
        return tuple(graph.number for graph in current.learned.calls), current.choice.levels

    def _position(self, number: int, graph: StepGraph, sizes: Sizes) -> int:
        """Return the plan that a call takes."""
        current, done = self._current, self._record.calls
        if current is not None:
            learned = current.learned
            if number >= len(learned.calls) or learned.calls[number] is not graph:
                self._current = current = self._levels.another(done, graph, sizes)
            elif current.sizes[number] != sizes:
                expected = sizes_with(done, learned, sizes)
                self._current = current = self._levels.rest_of_step(done, learned, expected)
            if current is not None:
                return current.choice.levels[number]
        elif graph.is_alone and not self._flights and self._levels.capacity is None:
            return 0
        if graph.ranks is None or self._levels.capacity is None:
            graph.learn_levels()
        return graph.least(self.limit_of(graph), self._away())

    def _repeated(self, graph: StepGraph) -> int:
        """Return the plan of calls that a checkpoint repeats.

        It is one for all, since the region compares what the two runs save.
        """
        if graph.repeated is None:
            graph.learn_levels()
            graph.repeated = graph.least(self.limit_of(graph), self._away())
        return graph.repeated

    def _rest(self, current: StepChoice) -> StepChoice:
        """Return the choice for the calls to come; those in flight stay at their levels."""
        return self._levels.rest_of_step(self._record.calls, current.learned, current.sizes)

    def limit_of(self, graph: StepGraph) -> int | None:
        """Return a limit on the peak of one graph, which may take all that there is.

        That is the budget, and the memory there is once some call ran out of it.
        """
        levels = self._levels
        limit = budgets.parse(levels.budget)
        if isinstance(limit, int):
            return levels.room(limit)
        level = graph.uncheckpointed()
        if not isinstance(limit, float) or level is None:
            return None if levels.capacity is None else levels.room(levels.capacity)
        # The step is at least this graph.
        return levels.room(int(limit * max(level.forward_bytes, level.backward_bytes)))

    def misfit(self, graph: StepGraph) -> BudgetInfeasible | None:
        """Return the error for a graph that is over a budget in bytes at every level."""
        limit = budgets.parse(self._levels.budget)
        peaks = [max(x.forward_bytes, x.backward_bytes) for x in graph.levels()]
        if graph.is_alone or not isinstance(limit, int) or not peaks or min(peaks) <= limit:
            return None
        level = graph.uncheckpointed()
        assert level is not None
        baseline = max(level.forward_bytes, level.backward_bytes)
        error = infeasible(self._levels.budget, limit, min(peaks), baseline)
        return BudgetInfeasible(
            f"{error} This is graph {graph.number} of the step's, and the budget is that of the "
            "step, which takes more: fxckpt.plan_step tells how much, or the second step of a run "
            "at a budget that each graph fits.",
            floor_bytes=error.floor_bytes,
            budget_bytes=error.budget_bytes,
        )

    def is_known_alone(self) -> bool:
        """Return whether a graph may be compiled for the whole budget: nothing is in flight.

        The loss of a pipeline is never in the graph of its last stage.
        """
        if self.is_of_blocks or self._has_schedule:
            return False
        return self.in_flight == 1 and not self._flights

    def follow(self, in_flight: int) -> None:
        """Take the most forwards in flight from a schedule, which tells of its steps."""
        with self._lock:
            self.in_flight, self._has_schedule = in_flight, True

    def begin_scheduled(self) -> None:
        """Let a step begin here: what the schedule ran to prepare its stages is none."""
        with self._lock:
            if self._levels.meter is not None:
                self._backward, self._meter.base = None, None
                self._forget()
                self._beginning.entered = self._entered()

    def end_scheduled(self) -> None:
        """End the step, all of whose micro-batches had their backwards."""
        with self._lock:
            if self._record.calls and self._is_idle:
                self._end()

    def compiling(self) -> None:
        """Note a compile, whose own allocations are not the step's.

        It takes no lock: a thread with the tracker's may be waiting for this compile to end.
        """
        self._has_compiled = True
        if (meter := self._levels.meter) is not None:
            meter.pollute()

    def set_budget(self, budget: budgets.Budget) -> None:
        """Change the budget, from the next forward on."""
        with self._lock:
            self._levels.set_budget(budget)
            if self._flights and self._current is not None:
                self._current = self._rest(self._current)

    def report(self) -> StepReport | None:
        """Return the report of the latest step that ended, or None before the first."""
        with self._lock:
            record, levels = self.last, self._levels
            if record is None:
                return None
            learned = levels.learned(record)
            return step_report(
                record,
                learned,
                levels.limit(learned),
                steps=levels.steps,
                settled_at=levels.settled_at,
                describes=self._meter.describes,
            )
