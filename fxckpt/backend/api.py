"""Entry point of torch.compile: ``torch.compile(model, backend="fxckpt")``.

A :class:`Backend` compiles a graph that Dynamo captured by AOTAutograd, or by Inductor, with a
:class:`~fxckpt.partitioner.Partitioner` as the partitioner of its joint graph; the inner compiler
compiles the forward and the backward half.
"""

from __future__ import annotations

import hashlib
import itertools
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property, partial
from itertools import accumulate
from typing import Any

import torch
from torch import fx

from fxckpt import budgets
from fxckpt.backend.missing_plan import MissingPlan
from fxckpt.backend.options import (
    OPTIONS,
    InnerCompiler,
    by_environment,
    call_text,
    check_inner,
    check_offload,
    check_scope,
    check_tile_with,
    given_by_name,
)
from fxckpt.backend.shared_budget import SharedBudget
from fxckpt.costs.models import CostModel
from fxckpt.errors import BudgetInfeasible, FxckptError, InvalidOption
from fxckpt.inductor.whole_backward import WholeBackward
from fxckpt.partitioner import Partitioner, source_digest
from fxckpt.passes.analysis.placement import inputs_read_in_backward
from fxckpt.passes.meta import LAST_READER, ORDER
from fxckpt.passes.whole_backward.dead_operands import write_where_dead
from fxckpt.passes.whole_backward.gradient_copies import delay_gradient_copies
from fxckpt.planner.planner import LevelChooser, device_of
from fxckpt.planner.ranks import Neighbour, Ranks, group_of
from fxckpt.plans.types import Plan
from fxckpt.profiling import record_runs
from fxckpt.reports.compile_report import Break, Origin, Report, outputs_bytes
from fxckpt.solver.figures import structure_of
from fxckpt.step.graph import StepGraph
from fxckpt.step.tracker import StepTracker
from fxckpt.tiers import Tier
from fxckpt.torch_private import (
    CaptureDone,
    KeptGraph,
    ModuleCompiler,
    after_optimizers,
    aot_autograd,
    around_each_step,
    boxed,
    break_after,
    calling_line,
    calls_of,
    code_in_progress,
    inline_regions,
    is_cut_short,
    is_in_a_forward,
    is_in_compiled_backward,
    keep_saved_values,
    make_boxed,
    may_act_before_failing,
    symbols_of,
    through_dynamo,
    untraced,
    watching_donations,
)
from fxckpt.torch_private.inductor.execution_order import KeepExecutionOrder
from fxckpt.torch_private.inductor.lowering import Lowerings
from fxckpt.torch_private.inductor.options import (
    CustomPartitionerFn,
    inductor_backend,
    inductor_options,
)
from fxckpt.torch_private.versions import warn_of_newer


class Backend:
    """A ``torch.compile`` backend that checkpoints activations within a budget.

    Parameters
    ----------
    budget:
        Peak of the bytes that one forward and backward allocate beyond those allocated before it,
        for each compiled graph or for the step (``scope``): an int or a string (``"2GiB"``), a
        fraction in (0, 1] of the uncheckpointed peak (or ``"60%"``), ``"min"`` (the least peak that
        is found for each graph), or ``"auto"`` (the device's free memory, less the optimizer state
        to come and a margin). None recomputes only what is free to recompute.
    policy:
        One of :mod:`fxckpt.policies`, a list of them, or torch's own form: a function
        ``policy(ctx, op, *args, **kwargs)`` that returns a ``CheckpointPolicy``, or a list of ops
        to save. MUST_SAVE, MUST_RECOMPUTE and, with ``offload``, MUST_CPU_OFFLOAD bind at any
        budget; ops that must not run twice (mutation, effects, unknown ops) are saved all the same,
        and the plan gives the reason. The PREFER answers are followed without a budget, and settle
        ties with one. A policy takes precedence over the checkpoint regions in the model. A
        :class:`Plan` is applied unchanged.
    inner:
        Compiler of the two halves: ``"inductor"``, ``"aot_eager"``, or a callable
        ``(gm, example_inputs) -> callable`` that gets the forward graph, then the backward graph.
    cost:
        ``"roofline"``, ``"flops"``, ``"measured"``, or a cost model object
        (:class:`fxckpt.costs.models.CostModel`), such as the roofline of another device:
        ``fxckpt.costs.DeviceRoofline.of("A100")``.
    verify:
        ``"exact"`` compares every recomputed value bitwise with a checksum of the forward's;
        :class:`RecomputeMismatch` names the first op that differs, and :class:`OffloadMismatch` a
        value that came back with other bits than were sent away. It takes time and memory beyond
        the plan, and excludes ``inner="inductor"``, which compiles the two runs of an op
        differently.
    mode, options:
        Mode (``"reduce-overhead"``, ``"max-autotune"``, ...) and configuration of Inductor, as
        ``torch.compile`` takes them; only with ``inner="inductor"``.
    max_slowdown:
        In place of a budget: the least memory for at most this much extra time, as a share of the
        uncheckpointed step's (``0.1`` is 10 %), by the cost model; for each graph.
    scope:
        ``"step"``: the budget is that of all graphs which this object compiles, and of what is
        allocated between them. A model that is one graph has one plan; of several graphs each has
        a few, compiled when first used, and the first step runs cautiously and is measured.
        ``"graph"``: each compiled graph has the whole budget.
    in_flight:
        Most forwards of one graph whose backwards are still to come, such as the micro-batches of a
        pipeline. All steps but the first learn it; with more than 1 the first runs cautiously.
    strict:
        Whether a step whose measured peak is over the budget raises :class:`BudgetExceeded`, at the
        end of its backward, in place of one warning.
    offload:
        Where saved values may be sent in place of being kept or recomputed, to be fetched in the
        backward: one of :mod:`fxckpt.tiers`, or the limit of a :class:`fxckpt.tiers.Host`
        (``"64GiB"``). The budget is of the device alone. None keeps them there. It needs a model on
        the CPU.
    group:
        A process group whose ranks plan as one, or ``"world"``: each graph is planned once, at the
        largest sizes and slowest costs of all ranks, and every rank has that plan. If one cannot go
        on, all raise with its number. By default the group of torch's own compiles, if
        ``torch._dynamo.config.enable_compiler_collectives`` is on, else each rank by itself. See
        ``docs/distributed.md``.
    tile:
        ``"auto"`` may unroll regions of independent rows, such as a head with its loss or an MLP,
        into tiles: ordinary ops on a part of the rows at a time, in a number chosen by the cost
        model, where that makes the step faster within the budget, or fit. A number asks for as
        many. Sums over rows (the loss, gradients of weights) are added up in another order. It
        needs a model that is one graph. See ``docs/tiles.md``.

    Raises
    ------
    InvalidBudget, InvalidOption
        At construction, for invalid arguments.
    BudgetInfeasible
        At a call of the compiled model, if the step does not fit at any plan: at the first one if
        the model is one graph, else when the first step was measured.
    SlowdownInfeasible
        Likewise, if what the policy has recomputed takes longer than ``max_slowdown``.

    Examples
    --------
    >>> import torch, fxckpt
    >>> from torch import nn
    >>> model = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.GELU()) for _ in range(6)))
    >>> backend = fxckpt.Backend(budget=0.9, inner="aot_eager")
    >>> torch.compile(model, backend=backend)(torch.randn(256, 8)).sum().backward()
    >>> backend.plans[0].peak_bytes <= backend.plans[0].budget_bytes
    True
    """

    def __init__(
        self,
        budget: budgets.Budget = None,
        policy: Any = None,
        inner: str | InnerCompiler = "inductor",
        cost: str | CostModel = "roofline",
        verify: str | None = None,
        mode: str | None = None,
        options: Mapping[str, Any] | None = None,
        max_slowdown: float | None = None,
        scope: str = "step",
        in_flight: int = 1,
        strict: bool = False,
        offload: Tier | str | None = None,
        group: Any = None,
        tile: int | str | None = None,
    ) -> None:
        check_scope(scope, in_flight, strict)
        check_inner(inner, verify, mode, options)
        self._inductor = inductor_options(mode, options)
        check_offload(offload, group, self._inductor)
        self.partitioner = Partitioner(
            budget, policy, cost, verify, max_slowdown, offload=offload, tile=tile
        )
        """Plans the graphs."""
        check_tile_with(self.partitioner.planner.tile, group)
        self._replays = bool(self._inductor.get("triton.cudagraphs"))
        """Whether CUDA graphs replay the halves."""
        self.inner = inner
        """The compiler of the halves."""
        self._breaks: list[Break] = []
        is_of_step = scope == "step" and budgets.is_in_bytes(budget)
        name = call_text(budget, policy=policy, inner=inner, in_flight=in_flight)
        self.step = StepTracker(budget, in_flight, strict, name) if is_of_step else None
        """Runs the calls of a step, if the budget is one of a step."""
        self._prepare_partitioner()
        limit = None if is_of_step else budgets.parse(budget)
        self._shared = SharedBudget(limit) if isinstance(limit, int) else None
        """Tells of calls that hold more than the budget together, if each graph has all of it."""
        self._graphs: list[StepGraph] = []
        self._missing_plan = MissingPlan(self, self._breaks, is_strict=strict)
        if budget is not None or max_slowdown is not None:
            self._missing_plan.watch_optimizers()
        given = (budget, policy, inner, cost, verify, mode, options)
        self._options = (*given, max_slowdown, scope, in_flight, strict, offload, group, tile)
        self._group, self._has_joined = group, False
        self._planned_code: set[int] = set()
        """Dynamo's numbers of the code that has a plan."""
        self._ranks: Ranks | None = None
        self._is_stage = False
        """Whether it compiles the stages of a pipeline."""
        self._neighbour: Neighbour | None = None
        self._hashes: list[tuple[str, str]] = []
        """Hashes of the plans, for the neighbour to compare."""
        # Dynamo prints this name in its own errors.
        self.__name__ = "fxckpt"

    def _prepare_partitioner(self) -> None:
        """Tell the partitioner how the halves will be run."""
        if self._replays:
            self.partitioner.expect_replays()
        if self.inner == "aot_eager":
            self.partitioner.expect_ops()
        if self.step is not None:
            self.partitioner.expect_steps()

    def __repr__(self) -> str:
        given = zip(OPTIONS, self._options, strict=True)
        return f"Backend({', '.join(f'{name}={value!r}' for name, value in given)})"

    @property
    def plans(self) -> tuple[Plan, ...]:
        """The plan of every graph with a backward, in compile order."""
        return self.partitioner.plans

    @property
    def is_waiting(self) -> bool:
        """Whether nothing is to be compiled yet, as by a callback whose training has not begun.

        Steps of optimizers in the meantime, of other models, do not tell that a plan is missing.
        """
        return self._missing_plan.is_waiting

    @is_waiting.setter
    def is_waiting(self, is_waiting: bool) -> None:
        self._missing_plan.is_waiting = is_waiting

    @cached_property
    def modules(self) -> ModuleCompiler:
        """Compiles modules in place with this backend, apart from all that others compile."""
        return ModuleCompiler(self)

    @untraced
    def report(self) -> Report:
        """Return the figures of the latest step, the plans and the graph breaks; print it."""
        step = None if self.step is None else self.step.report()
        origins = {
            id(level.plan): Origin(graph.number, graph.name)
            for graph in self._graphs
            for level in graph.plans
        }
        return Report(
            self.plans,
            tuple(self._breaks),
            self.partitioner.fallbacks,
            step,
            origins=() if self.step is None else tuple(origins.get(id(p)) for p in self.plans),
        )

    def __call__(self, gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        """Compile one captured graph; called by Dynamo."""
        warn_of_newer()
        self._join()
        gm = inline_regions(gm)
        if is_cut_short(gm):
            self.partitioner.expect_several_graphs()
        planned, fell_back = len(self.plans), len(self.partitioner.fallbacks)
        self._missing_plan.note_call()
        if self.step is None:
            agrees = self._is_together()
            partition = partial(self.partitioner.partition, together=agrees, is_agreed=agrees)
            compiled = self._compile(gm, example_inputs, partition)
        else:
            compiled = self._compile_for_step(gm, example_inputs, self.step)
        has_plan = len(self.plans) > planned
        if has_plan and (code := code_in_progress()) is not None:
            self._planned_code.add(code)
        if has_plan and self._shared is not None:
            if not any(isinstance(x, torch.SymInt) for x in example_inputs):
                compiled = self._shared.watched(compiled, self.plans[-1])
        if has_plan and self.step is None and self.inner == "inductor":
            compiled = watching_donations(compiled)
        if not has_plan and len(self.partitioner.fallbacks) == fell_back:
            self._missing_plan.note_forward_only(example_inputs)
        if is_cut_short(gm):
            reason, source = break_after(gm)
            held = outputs_bytes(self.plans[-1]) if has_plan else 0
            self._breaks.append(Break(len(self.plans) if has_plan else None, reason, source, held))
        return compiled

    def _join(self) -> None:
        """Find the ranks that plan as one with this one, at the first compile."""
        if self._has_joined:
            return
        self._has_joined = True
        try:
            group = group_of(self._group)
        except InvalidOption as error:
            raise through_dynamo(error) from error
        if group is None and not self._is_stage:
            self._neighbour = Neighbour.of_world(f"backend {next(_numbers[''])}")
            if self._neighbour is not None:
                after_optimizers(self._tell_of_divergence)
        elif group is not None:
            self._ranks = Ranks.of(group, f"backend {next(_numbers[group.group_name])}")
        if self._ranks is not None:
            self.partitioner.join(self._ranks)
            if self.step is not None:
                self.step.ranks = self._ranks

    def _tell_of_divergence(self, optimizer: torch.optim.Optimizer) -> None:
        """Warn once where the next rank has another plan of a graph, and neither was asked to."""
        # The store goes with the process group.
        if self._neighbour is None or not torch.distributed.is_initialized():
            return
        self._hashes += map(_hashes_of, self.plans[len(self._hashes) :])
        if (found := self._neighbour.differing(self._hashes)) is not None:
            plan, rank = found
            self._neighbour = None
            warnings.warn(
                f"rank {rank} has another plan of graph {plan + 1} than this rank, of the same "
                "program: their sizes, costs or measured peaks differ, and each rank plans by "
                "itself. fxckpt.Backend(..., group='world') plans once for all.",
                stacklevel=2,
            )

    def _compile_for_step(
        self, gm: fx.GraphModule, example_inputs: Sequence[Any], step: StepTracker
    ) -> Callable[..., Any]:
        """Compile a graph whose calls take their levels from the step."""
        is_together = self._is_together()
        compiler = _LevelCompiler(self, gm, example_inputs, is_together)
        graph = compiler.graph = StepGraph(
            len(self._graphs) + 1,
            calling_line(),
            device_of(gm.graph),
            compiler,
            self.partitioner.planner.search,
            symbols_of(example_inputs),
            ranks=self._ranks if is_together else None,
        )
        step.compiling()
        goes_on = self._breaks_before_backward(gm)
        graph.break_after = break_after(gm) if goes_on else None
        is_alone = not (self._breaks or goes_on or is_in_a_forward())
        run = (
            graph.compile_alone(step.share)
            if is_alone and step.is_known_alone()
            else graph.compile_cautiously(step.limit_of)
        )
        if (misfit := step.misfit(graph)) is not None:
            raise through_dynamo(misfit)
        if not graph.plans:  # No output has a gradient, or the graph could not be planned.
            return _passing(step, graph, run)
        self._graphs.append(graph)
        return lambda *args: step.forward(graph, args)

    def _is_together(self) -> bool:
        """Return whether all ranks of the group compile the graph in progress.

        A second plan of some code may be for the sizes of this rank alone, and the others would not
        come. What was compiled without gradients, such as for an evaluation, had no plan.
        """
        is_early = self.step is not None and not self.step.steps
        is_first = code_in_progress() not in self._planned_code
        return self._ranks is not None and (is_early or is_first)

    @staticmethod
    def _breaks_before_backward(gm: fx.GraphModule) -> bool:
        """Return whether more of the model follows a graph: it ends before the backward call."""
        return is_cut_short(gm) and "backward" not in break_after(gm)[0].lower()

    @untraced
    def set_budget(self, budget: budgets.Budget) -> None:
        """Change the budget, from the next forward on.

        Raises :class:`InvalidOption` for a backend without a budget of a step.

        >>> import fxckpt
        >>> backend = fxckpt.Backend(budget="2GiB")
        >>> backend.set_budget("1.5GiB")
        """
        budgets.validate(budget)
        if self.step is None:
            raise InvalidOption(
                f"set_budget({budget!r}): only a budget of a step can be changed. Give the backend "
                "one to begin with: fxckpt.Backend(0.8, scope='step')."
            )
        if not budgets.is_in_bytes(budget):
            raise InvalidOption(
                f"set_budget({budget!r}) is no budget of a step. Give bytes ('1.5GiB'), a fraction "
                "or 'auto'."
            )
        self.step.set_budget(budget)

    def __deepcopy__(self, memo: dict[int, Any]) -> Backend:
        """Return the backend itself: copies of a model have one budget."""
        return self

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[()]]:
        """Pickle the options: what is compiled and measured stays in this process."""
        return partial(Backend, **dict(zip(OPTIONS, self._options, strict=True))), ()

    def follow(self, schedule: Any) -> int:
        """Read the micro-batches in flight on this rank from a pipeline's schedule; return them.

        ``schedule`` is one of ``torch.distributed.pipelining``, of stages whose modules were
        compiled with this backend; call it before the first step. The number takes the place of
        ``in_flight``. A step begins once the schedule has its stages ready, with their buffers for
        what other stages send, and ends with ``schedule.step``. No rank compares its plans with
        those of another, as stages are other programs.

        Raises :class:`InvalidOption` for a backend without a budget of a step, for another object,
        and for a schedule without backwards.
        """
        if self.step is None:
            raise InvalidOption(
                "follow(schedule): only a budget of a step depends on the micro-batches in flight. "
                "Give the backend one to begin with: fxckpt.Backend(0.8, scope='step')."
            )
        self._is_stage = True
        in_flight = _most_in_flight(calls_of(schedule))
        self.step.follow(in_flight)
        around_each_step(schedule, self.step.begin_scheduled, self.step.end_scheduled)
        return in_flight

    def _compile(
        self, gm: fx.GraphModule, example_inputs: Sequence[Any], partition: Callable[..., Any]
    ) -> Callable[..., Any]:
        try:
            if self.inner == "inductor":
                whole = WholeBackward.of(self.plans, gm, example_inputs)
                keep_order = KeepExecutionOrder(
                    ORDER, "a half" if whole is None else str(whole), LAST_READER
                )
                lowerings = Lowerings(keep_order)

                def compile_half(*given: Any, **named: Any) -> Any:
                    if self.step is not None:
                        self.step.compiling()  # A backward is compiled when it is first run.
                    if whole is not None and named.get("is_inference"):
                        return whole.compile(lowerings, *given, **named)
                    return lowerings.compile(*given, **named)

                partitioner = _InductorPartitioner(self, lowerings, partition)
                run: Callable[..., Any] = inductor_backend(
                    gm, example_inputs, partitioner, keep_order, self._inductor, compile_half
                )
                return run if whole is None else whole.guarded(run)
            compiler = make_boxed(self.inner) if callable(self.inner) else boxed

            def compile_backward(half: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
                keep_saved_values()
                return (
                    compiler(half, inputs)
                    if callable(self.inner)
                    else boxed(half, inputs, record=record_runs)
                )

            def compile_whole(whole: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
                if self.inner == "aot_eager" and is_in_compiled_backward():
                    delay_gradient_copies(whole.graph)
                    write_where_dead(whole.graph)
                return compiler(whole, inputs)

            compile_graph = aot_autograd(
                fw_compiler=compiler,
                bw_compiler=compile_backward,
                inference_compiler=compile_whole,
                partition_fn=partition,
                keep_inference_input_mutations=True,
            )
            return compile_graph(gm, example_inputs)  # type: ignore[no-any-return]
        except CaptureDone:
            raise
        except BudgetInfeasible as error:
            broke = is_cut_short(gm) or self._breaks
            told = error if self.step is None else error.within_step()
            told = error.among(len(self.plans) + 1) if broke else told
            raise through_dynamo(told) from error
        except FxckptError as error:
            raise through_dynamo(error) from error


def _passing(step: StepTracker, graph: StepGraph, run: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that tells a step of its calls, which are none of the step's own."""

    def passing(*args: Any) -> Any:
        step.pass_by(graph)
        return run(*args)

    return passing


def _most_in_flight(calls: Sequence[tuple[int, int, bool]]) -> int:
    """Return the most forwards of all stages whose backwards are still to come."""
    changes = (-1 if is_backward else 1 for _, _, is_backward in calls)
    return max(accumulate(changes))


def _hashes_of(plan: Plan) -> tuple[str, str]:
    """Return a hash of the program that a plan is of, and one of its decisions."""
    program = "unknown" if plan.snapshot is None else structure_of(plan.snapshot.program)
    decisions = f"{plan.saved} {plan.schedule}".encode()
    return program, hashlib.sha256(decisions).hexdigest()[:16]


class _LevelCompiler:
    """Compiles one graph of a step anew for each of its levels."""

    graph: StepGraph
    """The graph, which is made with its compiler."""

    def __init__(
        self,
        backend: Backend,
        gm: fx.GraphModule,
        example_inputs: Sequence[Any],
        is_together: bool,
    ) -> None:
        self._backend, self._is_together = backend, is_together
        self._count = len(example_inputs)
        self._kept = KeptGraph.of(gm, example_inputs)
        self._first = [(gm, example_inputs)]
        """Emptied at the first compile: the real inputs of the first call are not kept for good."""

    def __call__(self, chooser: LevelChooser | None, now: bool) -> tuple[Any, Plan | None]:
        """Return the compiled graph, None where the capture was left, and its plan.

        ``now`` says that all ranks of the group compile it.
        """
        backend = self._backend
        count = len(backend.plans)
        partition = partial(self._partition, chooser, now)

        def compile_graph(module: fx.GraphModule, inputs: Sequence[Any]) -> Any:
            return backend._compile(module, inputs, partition)

        try:
            run = (
                compile_graph(*self._first.pop())
                if self._first
                else self._kept.compile(compile_graph)
            )
        except CaptureDone:
            run = None
        return run, backend.plans[-1] if len(backend.plans) > count else None

    def _partition(
        self,
        chooser: LevelChooser | None,
        now: bool,
        joint: fx.GraphModule,
        *given: Any,
        **named: Any,
    ) -> Any:
        """Return the halves at the level chosen, and note whether a forward may run again."""
        backend = self._backend
        if not self.graph.plans:  # The graph of every level is the same.
            count, read = inputs_read_in_backward(joint.graph)
            self.graph.inputs_read = read if count == self._count else None
        halves = backend.partitioner.partition(
            joint,
            *given,
            choose_level=chooser,
            together=self._is_together and now,
            is_agreed=self._is_together,
            **named,
        )
        self.graph.runs_again = not backend._replays and not may_act_before_failing(
            halves[0].graph, in_order=backend.inner == "aot_eager"
        )
        return halves


class _InductorPartitioner(CustomPartitionerFn):
    """A backend's partitioner as Inductor calls it, with the lowerings of one compile.

    Two with equal options and equal code have equal uuids.
    """

    def __init__(
        self, backend: Backend, lowerings: Lowerings, partition: Callable[..., Any]
    ) -> None:
        self._backend, self._lowerings, self._partition = backend, lowerings, partition

    def __call__(
        self, gm: fx.GraphModule, joint_inputs: Sequence[object], **kwargs: Any
    ) -> tuple[fx.GraphModule, fx.GraphModule]:
        kwargs.pop("compiler")
        halves: tuple[fx.GraphModule, fx.GraphModule] = self._partition(
            gm, joint_inputs, lowerings=self._lowerings, **kwargs
        )
        return halves

    def uuid(self) -> str | None:
        # A rank that found its code in a cache would leave the others waiting.
        return None if self._backend._ranks else f"{source_digest()} {self._backend!r}"

    def __deepcopy__(self, memo: dict[int, Any]) -> _InductorPartitioner:
        # Inductor copies its configuration; the plans must still reach the user's backend.
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return (str, (self.uuid() or repr(self._backend),))


def fxckpt_backend(
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    *,
    options: Mapping[str, Any] | None = None,
    mode: str | None = None,
    **unknown: Any,
) -> Callable[..., Any]:
    """Compile one captured graph, for ``backend="fxckpt"``.

    ``options`` are the arguments of :class:`Backend`, and Inductor's own; where they leave out
    budget and policy, those of :func:`by_environment` hold.
    """
    try:
        backend = _backend_of(by_environment(given_by_name(options, mode, unknown)))
        _latest[:] = [backend]
    except FxckptError as error:
        raise through_dynamo(error) from error
    return backend(gm, example_inputs)


def report() -> Report:
    """Return the report of the backend that ``backend="fxckpt"`` made last; it prints as text.

    For programs that hold no :class:`Backend`, such as trainers that take a backend by name.

    Raises :class:`InvalidOption` if nothing was compiled by name.

    >>> import torch, fxckpt
    >>> model = torch.nn.Sequential(*(torch.nn.Linear(8, 8), torch.nn.GELU()) * 6)
    >>> options = {"budget": 0.9, "inner": "aot_eager"}
    >>> compiled = torch.compile(model, backend="fxckpt", options=options)
    >>> compiled(torch.randn(256, 8)).sum().backward()
    >>> step = fxckpt.report().step
    >>> step.measured_peak_bytes <= step.budget_bytes
    True
    """
    if not _latest:
        raise InvalidOption(
            "nothing was compiled with backend='fxckpt' in this process yet: run a step first. A "
            "fxckpt.Backend has a report of its own, backend.report()."
        )
    return _latest[0].report()


_numbers: defaultdict[str, Iterator[int]] = defaultdict(itertools.count)
"""Numbers of the backends of each group, in the order of their first compiles, for ranks to name
them; those without a group have the empty name."""
_backends: dict[str, Backend] = {}
"""Backends of ``backend="fxckpt"`` by their options: graphs of equal options are of one step."""
_latest: list[Backend] = []
"""The backend that was made, or used for a new graph, last by name; empty before the first."""
_shared_budgets: dict[str, SharedBudget] = {}
"""Calls in flight of backends with equal options, where a budget is for each graph."""


def _backend_of(options: Mapping[str, Any]) -> Backend:
    """Return the backend that all graphs compiled with these options share."""
    backend = Backend(**options)
    backend._missing_plan.tell_with_equals()
    if backend.step is None:
        if backend._shared is not None:
            backend._shared = _shared_budgets.setdefault(repr(backend), backend._shared)
        return backend
    return _backends.setdefault(repr(backend), backend)
