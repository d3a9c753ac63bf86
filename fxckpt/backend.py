"""Entry point of torch.compile: ``torch.compile(model, backend="fxckpt")``.

A :class:`Backend` compiles a graph that Dynamo captured by AOTAutograd, or by Inductor, with a
:class:`~fxckpt.partitioner.Partitioner` as the partitioner of its joint graph; the inner compiler
compiles the forward and the backward half.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from difflib import get_close_matches
from typing import Any

from torch import fx

from fxckpt import budgets
from fxckpt.costs.models import CostModel
from fxckpt.errors import BudgetInfeasible, FxckptError, InvalidOption
from fxckpt.partitioner import Partitioner, source_digest
from fxckpt.passes.meta import ORDER
from fxckpt.plans.types import Plan
from fxckpt.policies import policy_named
from fxckpt.profiling import record_runs
from fxckpt.reports.compile_report import Break, Report, outputs_bytes
from fxckpt.torch_private import (
    aot_autograd,
    boxed,
    break_after,
    inline_regions,
    is_cut_short,
    keep_saved_values,
    make_boxed,
    through_dynamo,
)
from fxckpt.torch_private.inductor.execution_order import KeepExecutionOrder
from fxckpt.torch_private.inductor.lowering import Lowerings
from fxckpt.torch_private.inductor.options import (
    CustomPartitionerFn,
    inductor_backend,
    inductor_options,
)
from fxckpt.torch_private.versions import warn_of_newer

InnerCompiler = Callable[[fx.GraphModule, Sequence[Any]], Callable[..., Any]]
INNER_NAMES = ("inductor", "aot_eager")
BUDGET, POLICY = "FXCKPT_BUDGET", "FXCKPT_POLICY"
"""Environment variables of ``backend="fxckpt"``."""
OPTIONS = ("budget", "policy", "inner", "cost", "verify", "mode", "options", "max_slowdown")


class Backend:
    """A ``torch.compile`` backend that checkpoints activations within a budget.

    Parameters
    ----------
    budget:
        Peak of the bytes that one forward and backward allocate beyond those allocated before it,
        for each compiled graph: an int or a string (``"2GiB"``), a fraction in (0, 1] of the
        uncheckpointed peak (or ``"60%"``), ``"min"`` (the least peak that is found), or ``"auto"``
        (the device's free memory, less the optimizer state to come and a margin). None recomputes
        only what is free to recompute.
    policy:
        One of :mod:`fxckpt.policies`, a list of them, or torch's own form: a function
        ``policy(ctx, op, *args, **kwargs)`` that returns a ``CheckpointPolicy``, or a list of ops
        to save. MUST_SAVE and MUST_RECOMPUTE bind at any budget; ops that must not run twice
        (mutation, effects, unknown ops) are saved all the same, and the plan gives the reason.
        PREFER_SAVE and PREFER_RECOMPUTE are followed without a budget, and settle ties with one. A
        policy takes precedence over the checkpoint regions in the model. A :class:`Plan` is applied
        unchanged.
    inner:
        Compiler of the two halves: ``"inductor"``, ``"aot_eager"``, or a callable
        ``(gm, example_inputs) -> callable`` that gets the forward graph, then the backward graph.
    cost:
        ``"roofline"``, ``"flops"``, ``"measured"``, or a cost model object
        (:class:`fxckpt.costs.models.CostModel`), such as the roofline of another device:
        ``fxckpt.costs.DeviceRoofline.of("A100")``.
    verify:
        ``"exact"`` compares every recomputed value bitwise with a checksum of the forward's;
        :class:`RecomputeMismatch` names the first op that differs. It takes time and memory beyond
        the plan, and excludes ``inner="inductor"``, which compiles the two runs of an op
        differently.
    mode, options:
        Mode (``"reduce-overhead"``, ``"max-autotune"``, ...) and configuration of Inductor, as
        ``torch.compile`` takes them; only with ``inner="inductor"``.
    max_slowdown:
        In place of a budget: the least memory for at most this much extra time, as a share of the
        uncheckpointed step's (``0.1`` is 10 %), by the cost model.

    Raises
    ------
    InvalidBudget, InvalidOption
        At construction, for invalid arguments.
    BudgetInfeasible
        At the first call of the compiled model, if no plan fits.
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
    ) -> None:
        if verify not in (None, "exact"):
            raise InvalidOption(f"verify={verify!r} is not a way to verify. Use 'exact' or None.")
        if not callable(inner) and inner not in INNER_NAMES:
            raise InvalidOption(
                f"inner={inner!r} is not an inner compiler. Use one of "
                f"{', '.join(map(repr, INNER_NAMES))}, or a callable "
                '(gm, example_inputs) -> callable. Example: fxckpt.Backend(inner="aot_eager").'
            )
        if verify == "exact" and inner == "inductor":
            raise InvalidOption(
                "verify='exact' compares bits, and Inductor compiles the two runs of an op "
                "separately, so that they may differ in the last one. Look for the op with "
                "inner='aot_eager': fxckpt.Backend(inner='aot_eager', verify='exact')."
            )
        if inner != "inductor" and (mode or options):
            raise InvalidOption(
                f"mode={mode!r}, options={options!r} are Inductor's, and inner={inner!r} is not. "
                "Leave them out, or use inner='inductor'."
            )
        self._inductor = inductor_options(mode, options)
        self.partitioner = Partitioner(budget, policy, cost, verify, max_slowdown)
        if self._inductor.get("triton.cudagraphs"):
            self.partitioner.expect_replays()
        """Plans the graphs."""
        self.inner = inner
        """The compiler of the halves."""
        self._breaks: list[Break] = []
        self._options = (budget, policy, inner, cost, verify, mode, options, max_slowdown)
        # Dynamo prints this name in its own errors.
        self.__name__ = "fxckpt"

    def __repr__(self) -> str:
        given = zip(OPTIONS, self._options, strict=True)
        return f"Backend({', '.join(f'{name}={value!r}' for name, value in given)})"

    @property
    def plans(self) -> tuple[Plan, ...]:
        """The plan of every graph with a backward, in compile order."""
        return self.partitioner.plans

    def report(self) -> Report:
        """Return one table per compiled graph, and where the model broke into graphs; print it."""
        return Report(self.plans, tuple(self._breaks), self.partitioner.fallbacks)

    def __call__(self, gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        """Compile one captured graph; called by Dynamo."""
        warn_of_newer()
        gm = inline_regions(gm)
        if is_cut_short(gm):
            self.partitioner.expect_several_graphs()
        planned = len(self.plans)
        compiled = self._compile(gm, example_inputs)
        if is_cut_short(gm):
            reason, source = break_after(gm)
            has_plan = len(self.plans) > planned
            held = outputs_bytes(self.plans[-1]) if has_plan else 0
            self._breaks.append(Break(len(self.plans) if has_plan else None, reason, source, held))
        return compiled

    def _compile(self, gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        try:
            if self.inner == "inductor":
                keep_order = KeepExecutionOrder(ORDER)
                lowerings = Lowerings(keep_order)
                partitioner = _InductorPartitioner(self, lowerings)
                run: Callable[..., Any] = inductor_backend(
                    gm, example_inputs, partitioner, keep_order, self._inductor, lowerings.compile
                )
                return run
            compiler = make_boxed(self.inner) if callable(self.inner) else boxed

            def compile_backward(half: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
                keep_saved_values()
                return (
                    compiler(half, inputs)
                    if callable(self.inner)
                    else boxed(half, inputs, record=record_runs)
                )

            compile_graph = aot_autograd(
                fw_compiler=compiler,
                bw_compiler=compile_backward,
                inference_compiler=compiler,
                partition_fn=self.partitioner.split,
                keep_inference_input_mutations=True,
            )
            return compile_graph(gm, example_inputs)  # type: ignore[no-any-return]
        except BudgetInfeasible as error:
            broke = is_cut_short(gm) or self._breaks
            raise through_dynamo(error.among(len(self.plans) + 1) if broke else error) from error
        except FxckptError as error:
            raise through_dynamo(error) from error


class _InductorPartitioner(CustomPartitionerFn):
    """A backend's partitioner as Inductor calls it, with the lowerings of one compile.

    Two with equal options and equal code have equal uuids.
    """

    def __init__(self, backend: Backend, lowerings: Lowerings) -> None:
        self._backend, self._lowerings = backend, lowerings

    def __call__(
        self, gm: fx.GraphModule, joint_inputs: Sequence[object], **kwargs: Any
    ) -> tuple[fx.GraphModule, fx.GraphModule]:
        kwargs.pop("compiler")
        return self._backend.partitioner.split(
            gm, joint_inputs, lowerings=self._lowerings, **kwargs
        )

    def uuid(self) -> str:
        return f"{source_digest()} {self._backend!r}"

    def __deepcopy__(self, memo: dict[int, Any]) -> _InductorPartitioner:
        # Inductor copies its configuration; the plans must still reach the user's backend.
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return (str, (self.uuid(),))


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
        if unknown:
            raise InvalidOption(
                f"unknown argument {next(iter(unknown))!r} for backend='fxckpt'. Give "
                "options={...}, or mode=...."
            )
        if options is not None and not isinstance(options, Mapping):
            raise InvalidOption(
                f"options={options!r} is a {type(options).__name__}. Give a dict: "
                "options={'budget': '2GiB'}."
            )
        ours = {name: value for name, value in (options or {}).items() if name in OPTIONS}
        inductor = {name: value for name, value in (options or {}).items() if name not in OPTIONS}
        if mode is not None:
            ours["mode"] = mode
        if inductor:
            _refuse_misspelt(inductor)
            ours["options"] = {**(ours.get("options") or {}), **inductor}
        backend = Backend(**by_environment(ours))
    except FxckptError as error:
        raise through_dynamo(error) from error
    return backend(gm, example_inputs)


def by_environment(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return options with the budget and the policy that the environment gives, if they lack one.

    ``FXCKPT_BUDGET`` is a budget, ``FXCKPT_POLICY`` the name of one of :mod:`fxckpt.policies` or
    ``MODULE:NAME``. They serve programs that pass no options to a backend, such as trainers.

    Raises
    ------
    InvalidBudget, InvalidOption
        A variable is not usable.
    """
    given = dict(options)
    budget, policy = (os.environ.get(name, "") for name in (BUDGET, POLICY))
    is_planned = isinstance(given.get("policy"), Plan)
    if budget and not is_planned and not {"budget", "max_slowdown"} & set(given):
        given["budget"] = budgets.from_text(budget)
    if policy and "policy" not in given:
        given["policy"] = policy_named(policy)
    return given


def _refuse_misspelt(options: Mapping[str, Any]) -> None:
    """Raise :class:`InvalidOption` for options that Inductor does not know either."""
    try:
        inductor_options(None, options)
    except InvalidOption as error:
        near = [
            match
            for name in options
            for match in get_close_matches(str(name).lower(), OPTIONS, 1, cutoff=0.8)
        ]
        hint = f"Did you mean {near[0]!r}? " if near else ""
        raise InvalidOption(
            f"{error} {hint}Options of backend='fxckpt': {', '.join(OPTIONS)}. "
            "Example: torch.compile(model, backend='fxckpt', options={'budget': '2GiB'})."
        ) from error
