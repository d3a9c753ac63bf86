"""Partitioner: the planner as the partitioner of AOTAutograd or Inductor.

:class:`fxckpt.Backend` compiles through :meth:`Partitioner.partition`; code that has no backend of
ours calls the object itself.
"""

from __future__ import annotations

import hashlib
import logging
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from torch import fx

from fxckpt import budgets, repro
from fxckpt.costs.devices import device_named
from fxckpt.costs.models import CostModel
from fxckpt.errors import (
    STRICT,
    BudgetInfeasible,
    FxckptError,
    InvalidOption,
    PlanningFailed,
    is_defect,
    is_strict,
)
from fxckpt.inductor.plan_cache import PlanCache
from fxckpt.inductor.planner import InductorPlanner
from fxckpt.ops.registry import registrations
from fxckpt.passes.analysis.budget_regions import budget_regions
from fxckpt.passes.analysis.graph_memory import emitted_peak
from fxckpt.passes.graphs import Joint
from fxckpt.planner.planner import LevelChooser, Planner, device_of, planner_of
from fxckpt.planner.ranks import Ranks
from fxckpt.plans.types import Plan
from fxckpt.policies.torch_form import FunctionPolicy
from fxckpt.reports.compile_report import Fallback, Report
from fxckpt.tiers import Tier, tier_of
from fxckpt.torch_private import (
    CaptureDone,
    assuming,
    growing_sizes,
    guard_sizes,
    holds_python,
    inline_joint_regions,
    is_region,
    keep_ranges,
    region_keys,
    split_region,
    through_dynamo,
    traced_nodes,
)
from fxckpt.torch_private.inductor.default_partitioner import (
    copied,
    partition_by_default,
    remembered,
)
from fxckpt.torch_private.inductor.known_sizes import write_known_sizes
from fxckpt.torch_private.inductor.lowering import Lowerings
from fxckpt.torch_private.inductor.options import CustomPartitionerFn
from fxckpt.torch_private.versions import is_newer
from fxckpt.utils.progress import searching

log = logging.getLogger("fxckpt")

OPTIONS = ("budget", "policy", "cost", "verify", "max_slowdown", "offload", "tile", "device")

ALONE = (
    "planned by a Partitioner: a budget is for each graph alone. fxckpt.Backend keeps a step of "
    "many graphs within one budget."
)
"""Note in reports of a Partitioner: no budget of a step."""
FUSED = (
    "Inductor orders the ops of the halves as it likes: the least budget that can be met is higher "
    "than with fxckpt.Backend, which holds it to the plan's order and frees buffers early."
)
"""Note in reports where Inductor compiles."""
NOT_SENT = (
    "offload={!r}: where Inductor compiles the halves of a Partitioner, it orders their ops as it "
    "likes, and values that are sent away would stay on the device for longer than planned. Use "
    "fxckpt.Backend(offload=...), which holds it to the plan's order."
)
"""Error for an offload where Inductor compiles in an order of its own."""
NO_TILES = (
    "tile={0!r}: where Inductor compiles the halves of a Partitioner, it orders their ops as it "
    "likes, and all tiles could be live at once. Use fxckpt.Backend(tile={0!r}), which holds it to "
    "the plan's order, or leave tile out."
)
"""Error for tiles where Inductor compiles in an order of its own."""
NO_WAY = "verify={!r} is not a way to verify. Use 'exact' or None."
"""Error for an unknown ``verify``."""
NOT_BITWISE = (
    "verify='exact' compares bits, and Inductor compiles the two runs of an op separately, so that "
    "they may differ in the last one. Look for the op with fxckpt.Backend(inner='aot_eager', "
    "verify='exact')."
)
"""Error for ``verify="exact"`` where Inductor compiles."""
MEANWHILE = "\nTo run the model meanwhile, leave out fxckpt."
"""What to do about a defect that ends the run."""
ALONE_IN_GROUP = (
    "This rank alone compiles the graph at these sizes, and an error here would leave the others "
    "waiting for it: it takes the least peak that was found."
)
"""Warning of a graph over its budget that the other ranks of the group do not compile."""
CACHED = "A graph whose code was in torch's caches is not planned again, and not listed."
"""Note in reports where torch's caches are on."""

Halves = tuple[fx.GraphModule, fx.GraphModule]


class Partitioner(CustomPartitionerFn):
    """A partitioner of joint graphs that keeps the peak of each within a budget.

    One object with two faces. As a ``partition_fn`` it serves ``functorch.compile.aot_function``,
    ``aot_module``, ``aot_module_simplified`` and ``torch._dynamo.backends.common.aot_autograd``. As
    ``torch._inductor.config.custom_partitioner_fn`` it plans whatever Inductor compiles, whoever
    calls ``torch.compile``.

    :class:`fxckpt.Backend` is built on it and does more with Inductor: there the schedule is held
    to the plan's order, buffers are freed early near the budget, and what was lowered to be judged
    is compiled as it is. Here Inductor schedules as it likes; a plan is still judged by lowering
    both halves, but the halves are lowered a second time to be compiled, and the least budget that
    can be met is higher. A budget holds for each graph alone. A hit in AOTAutograd's cache skips
    the partitioner: the code is that of the plan made before, and :attr:`plans` does not list it.

    Parameters
    ----------
    budget, policy, cost, verify, max_slowdown:
        As for :class:`fxckpt.Backend`. ``verify="exact"`` is for inner compilers that call ops as
        they are.
    offload, tile:
        As for :class:`fxckpt.Backend`; Inductor is refused when it asks for a partition.
    scope:
        What a budget is for: ``"graph"``, each graph, is all that a partitioner sees.
    device:
        Name of the device whose figures price the ops, such as ``"H100"``: a plan made here is for
        a step that runs there. None is the device of the graph's values.

    Raises
    ------
    InvalidBudget, InvalidOption
        At construction, for invalid arguments.
    BudgetInfeasible
        When a graph is compiled, if no plan fits.

    Examples
    --------
    >>> import torch, fxckpt
    >>> from functorch.compile import aot_function, make_boxed_func
    >>> partitioner = fxckpt.Partitioner(budget=0.9)
    >>> def run(gm, inputs): return make_boxed_func(gm.forward)
    >>> def step(x, w): return ((x @ w).sin().exp() @ w).sin().exp().sum()
    >>> compiled = aot_function(step, fw_compiler=run, partition_fn=partitioner)
    >>> compiled(torch.randn(256, 64), torch.randn(64, 64, requires_grad=True)).backward()
    >>> len(partitioner.plans)
    1
    """

    def __init__(
        self,
        budget: budgets.Budget = None,
        policy: Any = None,
        cost: str | CostModel = "roofline",
        verify: str | None = None,
        max_slowdown: float | None = None,
        scope: str = "graph",
        offload: Tier | str | None = None,
        tile: int | str | None = None,
        device: str | None = None,
    ) -> None:
        if scope != "graph":
            raise InvalidOption(
                f"scope={scope!r}: a Partitioner sees one graph at a time, so that its budget is "
                "for each graph. Use scope='graph', or fxckpt.Backend for a whole step."
            )
        if verify not in (None, "exact"):
            raise InvalidOption(NO_WAY.format(verify))
        goal = budgets.within(budget, max_slowdown)
        self.planner = planner_of(
            goal,
            policy,
            cost,
            exact=verify == "exact",
            offload=tier_of(offload),
            # The compilers of a partition_fn may take graphs that write nothing for granted.
            in_place=False,
            tile=tile,
            device=None if device is None else device_named(device),
        )
        self.options = (budget, policy, cost, verify, max_slowdown, offload, tile, device)
        self._is_of_step, self._is_inductors = False, False
        self._plans: list[Plan] = []
        self._fallbacks: list[Fallback] = []

    def __repr__(self) -> str:
        given = zip(OPTIONS, self.options, strict=True)
        return f"Partitioner({', '.join(f'{name}={value!r}' for name, value in given)})"

    @property
    def plans(self) -> tuple[Plan, ...]:
        """The plan of every graph with a backward, in compile order."""
        return tuple(self._plans)

    @property
    def fallbacks(self) -> tuple[Fallback, ...]:
        """The graphs that could not be planned and took torch's own partition."""
        return tuple(self._fallbacks)

    def expect_several_graphs(self) -> None:
        """Allow that what the policy names is missing in a graph: it may be in another one."""
        if self.planner.policy is not None:
            self.planner = replace(self.planner, policy=self.planner.policy.lenient())

    def expect_ops(self) -> None:
        """Let ops write into operands that die, as the halves are run op by op."""
        self.planner = replace(self.planner, in_place=True)

    def expect_replays(self) -> None:
        """Price ops for CUDA graphs, which replay kernels without launching them."""
        self.planner = replace(self.planner, replays=True)

    def expect_steps(self) -> None:
        """Let sizes grow under one plan, as a step knows the bytes of its graphs at every size."""
        self._is_of_step = True

    def join(self, ranks: Ranks) -> None:
        """Plan as one with the other ranks of a group, where :meth:`partition` is told to."""
        self.planner = replace(self.planner, ranks=ranks)

    def report(self) -> Report:
        """Return one table per partitioned graph, and what a backend does more; print it."""
        limits = (ALONE, FUSED if self._is_inductors else "", "" if self.plans else CACHED)
        return Report(self.plans, fallbacks=self.fallbacks, limits=tuple(filter(None, limits)))

    def __call__(self, gm: fx.GraphModule, joint_inputs: Sequence[object], **kwargs: Any) -> Halves:
        """Partition a joint graph; called by AOTAutograd, or by Inductor with its name."""
        is_inductor = kwargs.pop("compiler", None) == "inductor"
        lowerings = Lowerings(None) if is_inductor else None
        self._is_inductors |= is_inductor
        try:
            if lowerings is not None and self.planner.exact:
                raise InvalidOption(NOT_BITWISE)
            if lowerings is not None and self.planner.offload is not None:
                raise InvalidOption(NOT_SENT.format(self.planner.offload))
            if lowerings is not None and self.planner.tile is not None:
                raise InvalidOption(NO_TILES.format(self.planner.tile))
            return self.partition(gm, joint_inputs, lowerings=lowerings, **kwargs)
        except FxckptError as error:
            raise through_dynamo(error) from error

    def partition(
        self,
        joint: fx.GraphModule,
        joint_inputs: Sequence[object],
        *,
        num_fwd_outputs: int,
        lowerings: Lowerings | None = None,
        choose_level: LevelChooser | None = None,
        together: bool = False,
        is_agreed: bool = False,
        **given: Any,
    ) -> Halves:
        """Return the forward and the backward of a joint graph, which is used up; keep the plan.

        With ``together`` all ranks of the group are to plan this graph now, and none goes on if one
        cannot; ``is_agreed`` says that its plans are those of all ranks. A region of
        ``nested_compile_region`` comes before the graph that it is in: its halves save everything,
        and the plan of the whole is that of its ops too.
        """
        if is_region(joint_inputs):
            try:
                return split_region(joint, num_fwd_outputs=num_fwd_outputs, **given)
            except Exception as error:
                raise _failed(error) from error
        joint = inline_joint_regions(joint)
        ranks = self.planner.ranks
        partition = partial(
            self._partition,
            joint,
            joint_inputs,
            num_fwd_outputs=num_fwd_outputs,
            lowerings=lowerings,
            choose_level=choose_level,
            is_agreed=is_agreed,
            given=given,
        )
        if ranks is None or not together:
            return partition(ranks=None)
        try:
            halves = partition(ranks=ranks)
        except Exception as error:
            # To leave a capture is no failure: it was as far as all were to come.
            if not isinstance(error, CaptureDone):
                ranks.fail(error)
            raise
        ranks.confirm("the halves of a graph")
        return halves

    def _partition(
        self,
        joint: fx.GraphModule,
        joint_inputs: Sequence[object],
        *,
        num_fwd_outputs: int,
        lowerings: Lowerings | None,
        choose_level: LevelChooser | None,
        is_agreed: bool,
        ranks: Ranks | None,
        given: Mapping[str, Any],
    ) -> Halves:
        """Return the halves of a joint graph, planned by this process or by the ranks together.

        ``lowerings`` lowers halves where Inductor compiles them. ``choose_level`` chooses the
        schedule of a graph whose budget is that of a step. A defect of the planner ends no run that
        asked for no budget: see :meth:`_fall_back`.
        """
        original = remembered(joint)
        planner = replace(self.planner, ranks=ranks, is_agreed=is_agreed)
        if choose_level is not None:
            planner = replace(planner, budget=None, choose_level=choose_level)
        # Tiles are chosen with a plan, and levels of a step are plans without tiles.
        grows = self._is_of_step and self.planner.tile is None
        is_held = self.planner.budget is not None and not grows
        growing = growing_sizes(joint) if is_held else []
        if not isinstance(budgets.parse(self.planner.budget), int):
            # A share of the uncheckpointed peak is of that at these sizes.
            guard_sizes(growing, spare=1)
            growing = []
        keep_ranges(joint)

        def planned(
            planner: Planner, joint: fx.GraphModule
        ) -> tuple[fx.GraphModule, fx.GraphModule, Plan]:
            return self._planned(
                planner, joint, num_fwd_outputs=num_fwd_outputs, lowerings=lowerings, **given
            )

        try:
            with searching(f"plan of graph {len(self._plans) + 1}"):
                try:
                    forward, backward, plan = planned(planner, joint)
                except BudgetInfeasible as error:
                    if self.planner.ranks is None or ranks is not None:
                        raise
                    warnings.warn(f"{error} {ALONE_IN_GROUP}", stacklevel=2)
                    forward, backward, plan = planned(replace(planner, budget="min"), original())
            guard_sizes(growing, _growth(growing, forward, backward, plan, num_fwd_outputs))
        except CaptureDone:
            raise
        except Exception as error:
            if not is_defect(error):
                raise
            if ranks is not None:
                raise _failed(error) from error  # None of the ranks has a partition of its own.
            # Dynamo takes some exceptions as a reason to run the model uncompiled, in silence and
            # without a budget.
            failed = _failed(error)
            inner = None if lowerings is None else "inductor"
            guard_sizes(growing, spare=1)
            return self._fall_back(original(), joint_inputs, failed, num_fwd_outputs, inner, given)
        self._plans.append(plan)
        if lowerings is not None:
            # The lowerings that judged the plan may have found symbols to be numbers.
            write_known_sizes(forward)
            write_known_sizes(backward)
        return forward, backward

    def replan(self, joint: fx.GraphModule, *, num_fwd_outputs: int, inner: str | None) -> Plan:
        """Return the plan of a joint graph, which is used up.

        A defect raises its own error. ``inner`` is ``"inductor"`` where Inductor compiles halves.
        """
        lowerings = Lowerings(None) if inner == "inductor" else None
        if self.planner.budget is not None:
            guard_sizes(growing_sizes(joint), spare=1)
        halves = self._planned(
            self.planner, joint, num_fwd_outputs=num_fwd_outputs, lowerings=lowerings
        )
        return halves[2]

    def _planned(
        self,
        planner: Planner,
        joint: fx.GraphModule,
        *,
        num_fwd_outputs: int,
        lowerings: Lowerings | None,
        **given: Any,
    ) -> tuple[fx.GraphModule, fx.GraphModule, Plan]:
        """Return the halves of a joint graph, which is used up, and their plan.

        On a torch newer than any tested one, a graph whose lowering cannot be read is planned as
        for a compiler that does not fuse.
        """
        if lowerings is None or holds_python(joint.graph):
            return planner.partition(Joint(joint, num_fwd_outputs))
        unread = copied(joint) if is_newer() else None
        try:
            return self._planned_for_inductor(planner, joint, num_fwd_outputs, lowerings, given)
        except Exception as error:
            if unread is None or not is_defect(error) or is_strict():
                raise
            log.warning(
                "the plan is that of the unfused graph, as the lowering of an untested torch "
                "cannot be read (%s: %s)",
                type(error).__name__,
                error,
            )
            return planner.partition(Joint(unread, num_fwd_outputs))

    def _planned_for_inductor(
        self,
        planner: Planner,
        joint: fx.GraphModule,
        num_fwd_outputs: int,
        lowerings: Lowerings,
        given: Mapping[str, Any],
    ) -> tuple[fx.GraphModule, fx.GraphModule, Plan]:
        if planner.choose_level is None:
            # A rank of other sizes than the first one's has a plan of its own.
            planner = replace(planner, is_agreed=False)
        # Memory is let go between Inductor's calls alone, so that a fetch finds less than planned.
        planner = replace(planner, search=replace(planner.search, fetches_early=False))
        timed = lowerings.compile_alone if planner.cost == "measured" else None
        holds_order = lowerings.keep_order is not None
        is_kept = holds_order and planner.choose_level is None and planner.ranks is None
        fused = InductorPlanner(
            planner,
            lowerings.lower if holds_order else _without_early_frees(lowerings),
            PlanCache.beside_inductor() if is_kept else None,
            source_digest(),
            timed if holds_order else None,
        )
        return fused.partition(Joint(joint, num_fwd_outputs), **given)

    def _fall_back(
        self,
        joint: fx.GraphModule,
        joint_inputs: Sequence[object],
        failed: FxckptError,
        num_fwd_outputs: int,
        inner: str | None,
        given: Mapping[str, Any],
    ) -> Halves:
        """Return torch's own partition of a graph that could not be planned, with one warning.

        Raises ``failed`` under ``FXCKPT_STRICT=1``, where a plan was to be applied, where a region
        has a budget of its own, and where the simulated peak of torch's partition is over the
        budget.
        """
        cause = failed.__cause__
        has_region = any(map(region_keys, joint.graph.nodes))
        if is_strict() or self.planner.is_fixed or has_region:
            raise failed from cause
        path = self._save_repro(joint, num_fwd_outputs, failed, inner)
        try:
            halves = partition_by_default(
                copied(joint), joint_inputs, num_fwd_outputs=num_fwd_outputs, inner=inner, **given
            )
            if inner is not None:
                for half in halves:
                    write_known_sizes(half)
            peak = emitted_peak(*halves, num_fwd_outputs=num_fwd_outputs)
            limit = self._limit(joint, joint_inputs, num_fwd_outputs)
        except Exception as error:
            log.debug("torch's own partition of the graph failed too: %s", error)
            raise failed from cause
        if limit is not None and peak > limit:
            raise failed from cause
        graph = len(self._plans) + len(self._fallbacks) + 1
        self._fallbacks.append(Fallback(graph, str(cause or failed), path, peak))
        ignored = "" if self.planner.policy is None else ", which ignores the policy"
        warnings.warn(
            f"{str(failed).removesuffix(MEANWHILE)}\nGraph {graph} takes torch's own partition, "
            f"unplanned{ignored}. Repro: {path}; 'fxckpt doctor FILE' plans it again. {STRICT}=1 "
            "makes this an error.",
            stacklevel=2,
        )
        return halves

    def _save_repro(
        self, joint: fx.GraphModule, num_fwd_outputs: int, failed: FxckptError, inner: str | None
    ) -> str:
        """Return the path of the repro, or why there is none: a full disk must not end the run."""
        try:
            settings = dict(zip(OPTIONS, self.options, strict=True))
            return str(
                repro.save(
                    joint, num_fwd_outputs, repr(self), failed, settings=settings, inner=inner
                )
            )
        except OSError as error:
            return f"not written ({error})"

    def _limit(
        self, joint: fx.GraphModule, joint_inputs: Sequence[object], num_fwd_outputs: int
    ) -> int | None:
        """Return the budget in bytes of a graph that could not be planned."""
        if self.planner.budget is None:
            return None
        saved_all = partition_by_default(
            copied(joint), joint_inputs, num_fwd_outputs=num_fwd_outputs, inner=None
        )
        peak = emitted_peak(*saved_all, num_fwd_outputs=num_fwd_outputs)
        return self.planner.budget_bytes(self.planner.budget, peak, device_of(joint.graph))

    def uuid(self) -> str | None:
        """Return the key of torch's caches: the options, and the version of fxckpt's own code.

        The budgets of regions, and the modules that a policy may name, belong to the graph that
        Dynamo compiles; torch's keys lack them. So do the ops that were registered. None, which
        leaves the caches out, for what no text tells from others: a policy or cost model in Python
        of the user's own, a closure that counts an op's FLOPs, and ``budget="auto"``.
        """
        cost, ops = self.planner.cost, registrations()
        if (
            budgets.parse(self.planner.budget) == "auto"
            or not isinstance(cost, str)
            or _holds_function(self.planner.policy)
            or ops is None
        ):
            return None
        nodes = traced_nodes()
        parts = [
            source_digest(),
            repr(replace(self.planner, known=())),
            *(plan.digest for plan in self.planner.known),
            *(region.line for region in budget_regions(nodes)),
            ops,
        ]
        if self.planner.policy is not None:
            # The paths alone: the stacks are keyed by addresses.
            stacks = [list((node.meta.get("nn_module_stack") or {}).values()) for node in nodes]
            parts.append(hashlib.sha256(repr(stacks).encode()).hexdigest())
        return " ".join(filter(None, parts))

    def __deepcopy__(self, memo: dict[int, Any]) -> Partitioner:
        # Inductor copies its configuration; the plans must still reach the object the user holds.
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        # Inductor pickles its configuration to make keys of it.
        return (str, (self.uuid() or repr(self),))


def _growth(
    sizes: Sequence[Any],
    forward: fx.GraphModule,
    backward: fx.GraphModule,
    plan: Plan,
    num_fwd_outputs: int,
) -> int:
    """Return how many times as large sizes may get, within a budget of bytes, by the same plan."""
    limit = plan.budget_bytes
    if not sizes or limit is None:
        return 1

    def peak(factor: int) -> int:
        with assuming(sizes, factor):
            return emitted_peak(forward, backward, num_fwd_outputs=num_fwd_outputs)

    # The workspace of kernels is at most that of attention, which grows with the square of a size.
    beyond = max(0, max(plan.peak_bytes, plan.compiled_peak_bytes or 0) - peak(1))
    factor = 1
    while factor < GROWTH and peak(2 * factor) + beyond * (2 * factor) ** 2 <= limit:
        factor *= 2
    return factor


GROWTH = 2**16
"""Most times that sizes may grow without another plan."""


def _failed(error: Exception) -> FxckptError:
    """Return the error that says that planning failed, with its cause."""
    if isinstance(error, FxckptError):
        return error
    failed = PlanningFailed(
        f"planning failed, which is a defect of fxckpt: {type(error).__name__}: {error}{MEANWHILE}"
    )
    failed.__cause__ = error
    return failed


def _without_early_frees(lowerings: Lowerings) -> Any:
    """Return a ``lower`` that offers no early frees, which need the backend's own compile."""

    def lower(*given: Any) -> Any:
        return replace(lowerings.lower(*given), freeing_early=None)

    return lower


def _holds_function(policy: Any) -> bool:
    """Return whether a policy, or a part of it, is a function of the user's."""
    if isinstance(policy, FunctionPolicy):
        return True
    if isinstance(policy, tuple):
        return any(map(_holds_function, policy))
    parts = fields(policy) if is_dataclass(policy) else ()
    return any(_holds_function(getattr(policy, part.name)) for part in parts)


def source_digest() -> str:
    """Return a hash of this package's own code, so that caches know when it changes."""
    import fxckpt.passes

    folders = [Path(__file__).parent, Path(str(fxckpt.passes.__file__)).parent]
    digest = hashlib.sha256()
    for path in sorted(p for folder in folders for p in folder.rglob("*.py")):
        digest.update(path.name.encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()
