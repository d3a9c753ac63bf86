"""Pipeline: every pass of a compile, in order.

A joint graph is prepared (:data:`PREPARE`), planned (:mod:`fxckpt.planner.planner`), and emitted as
a forward and a backward half that follow the plan (:data:`EMIT`). An eager region's graph is
planned as it runs (:data:`PREPARE_EAGER`), and nothing is emitted. With Inductor as the inner
compiler the tuples are :data:`PREPARE_INDUCTOR` and :data:`EMIT_INDUCTOR`, and :data:`FREE_EARLY`
once its lowering is known. A graph that is planned for another device is first put there
(:class:`Place`). A pass is a frozen value with a ``name`` that maps one state to the next:
:class:`~fxckpt.passes.graphs.Joint` while preparing, :class:`Emission` while emitting. Between any
two passes, one hook lints the graphs, verifies the halves against the plan and logs the time of the
pass.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal, Protocol, TypeVar

import torch
from torch import fx

from fxckpt.passes.analysis.joint import Facts
from fxckpt.passes.graphs import Joint
from fxckpt.passes.inductor.channels_last import to_channels_last
from fxckpt.passes.inductor.copy_views_alone import copy_views_alone
from fxckpt.passes.inductor.draw_as_traced import draw_as_traced
from fxckpt.passes.inductor.execution_order import mark_execution_order
from fxckpt.passes.inductor.fusion_model import is_extern_kernel
from fxckpt.passes.inductor.isolate_matmuls import isolate_matmuls
from fxckpt.passes.inductor.lower_tiles import lower_tiles
from fxckpt.passes.inductor.preserve_strides import preserve_strides
from fxckpt.passes.inductor.rejoin_views import rejoin_views
from fxckpt.passes.inductor.save_views import save_views
from fxckpt.passes.inductor.sink_reshapes import sink_reshapes
from fxckpt.passes.invariants import verify
from fxckpt.passes.losses.loss_backward import join_loss_backward
from fxckpt.passes.losses.loss_storages import hold_loss_elements
from fxckpt.passes.transforms.bind_sizes import bind_sizes
from fxckpt.passes.transforms.drop_statistics import drop_statistics
from fxckpt.passes.transforms.in_place import write_in_place
from fxckpt.passes.transforms.merge_common_subexpressions import merge_common_subexpressions
from fxckpt.passes.transforms.offload_ops import insert_offload_ops
from fxckpt.passes.transforms.partition import partition
from fxckpt.passes.transforms.place import place
from fxckpt.passes.transforms.raise_getitems import raise_getitems
from fxckpt.passes.transforms.recompute_checks import insert_checks
from fxckpt.passes.transforms.rematerialize import Rematerialized, rematerialize
from fxckpt.passes.transforms.storage_copies import copy_whole_storages
from fxckpt.passes.transforms.take_names import take_names
from fxckpt.plans.types import Plan
from fxckpt.torch_private import unwrap_syncs, wrap_syncs
from fxckpt.torch_private.inductor.layouts import changes_layout
from fxckpt.torch_private.inductor.lowering import free_early

log = logging.getLogger("fxckpt")

State = TypeVar("State")


@dataclass(frozen=True)
class Emission:
    """A planned joint graph on its way to two halves."""

    joint: Joint
    facts: Facts
    plan: Plan
    exact: bool = False
    """Whether the backward compares recomputed values with checksums of the forward's."""
    tier: int | None = None
    """Number of the tier that values are sent to; None for plans that send none."""
    rematerialized: Rematerialized | None = None
    """Saved values of the rewritten joint graph; None until it is rematerialized."""
    halves: tuple[fx.GraphModule, fx.GraphModule] | None = None
    """Forward and backward; None until the joint graph is partitioned."""

    @property
    def forward(self) -> fx.GraphModule:
        """The forward half."""
        assert self.halves is not None
        return self.halves[0]

    @property
    def backward(self) -> fx.GraphModule:
        """The backward half."""
        assert self.halves is not None
        return self.halves[1]


class Pass(Protocol[State]):
    """One step of the pipeline."""

    @property
    def name(self) -> str:
        """Name in logs and in ``passes/README.md``."""
        ...

    def __call__(self, state: State, /) -> State:
        """Return the state after the pass; its graphs are rewritten in place."""
        ...


@dataclass(frozen=True)
class OnJoint:
    """A rewrite of the joint graph before planning."""

    rewrite: Callable[[fx.Graph], object]

    @property
    def name(self) -> str:
        """Name of the rewrite."""
        return self.rewrite.__name__

    def __call__(self, state: Joint, /) -> Joint:
        """Rewrite the joint graph in place."""
        self.rewrite(state.module.graph)
        return state


@dataclass(frozen=True)
class Place:
    """A joint graph that was traced on the CPU, put on the device that is planned for."""

    device: torch.device
    name: str = "place"

    def __call__(self, state: Joint, /) -> Joint:
        """Rewrite the joint graph in place."""
        place(state.module.graph, self.device)
        return state


@dataclass(frozen=True)
class Rematerialize:
    """Copies what the plan recomputes into the backward."""

    name: str = "rematerialize"

    def __call__(self, state: Emission, /) -> Emission:
        """Rewrite the joint graph in place."""
        joint, facts, plan = state.joint, state.facts, state.plan
        num_fwd_outputs = joint.num_fwd_outputs
        result = rematerialize(joint.module, facts, plan, num_fwd_outputs=num_fwd_outputs)
        return replace(state, rematerialized=result)


@dataclass(frozen=True)
class InsertChecks:
    """Compares recomputed values with checksums of the forward's, where that was asked for."""

    name: str = "insert_checks"

    def __call__(self, state: Emission, /) -> Emission:
        """Rewrite the joint graph in place."""
        joint, result = state.joint, state.rematerialized
        if not state.exact:
            return state
        assert result is not None
        result = insert_checks(joint.module, result, num_fwd_outputs=joint.num_fwd_outputs)
        return replace(state, rematerialized=result)


@dataclass(frozen=True)
class InsertOffloadOps:
    """Sends saved values away from the device, where the plan says so."""

    name: str = "insert_offload_ops"

    def __call__(self, state: Emission, /) -> Emission:
        """Rewrite the joint graph in place."""
        result, tier = state.rematerialized, state.tier
        assert result is not None
        if tier is None:
            return state
        module, facts, plan = state.joint.module, state.facts, state.plan
        result = insert_offload_ops(module, result, facts, plan, tier, exact=state.exact)
        return replace(state, rematerialized=result)


@dataclass(frozen=True)
class SaveViews:
    """Saves a view in place of its base where extern kernels of the backward read that alone."""

    name: str = "save_views"

    def __call__(self, state: Emission, /) -> Emission:
        """Rewrite the joint graph in place."""
        assert state.rematerialized is not None
        result = save_views(
            state.joint.module, state.rematerialized, is_extern_kernel=is_extern_kernel
        )
        return replace(state, rematerialized=result)


@dataclass(frozen=True)
class Partition:
    """Splits the joint graph into the two halves."""

    name: str = "partition"

    def __call__(self, state: Emission, /) -> Emission:
        """Return the state with the halves; the joint graph is used up."""
        joint, result = state.joint, state.rematerialized
        assert result is not None
        halves = partition(joint.module, result, num_fwd_outputs=joint.num_fwd_outputs)
        return replace(state, halves=halves)


@dataclass(frozen=True)
class OnHalves:
    """A rewrite of both halves."""

    rewrite: Callable[[fx.Graph], object]

    @property
    def name(self) -> str:
        """Name of the rewrite."""
        return self.rewrite.__name__

    def __call__(self, state: Emission, /) -> Emission:
        """Rewrite the halves in place."""
        for half in (state.forward, state.backward):
            self.rewrite(half.graph)
        return state


@dataclass(frozen=True)
class WriteInPlace:
    """Writes results into operands that die, where the facts allow it."""

    name: str = "write_in_place"

    def __call__(self, state: Emission, /) -> Emission:
        """Rewrite the halves in place."""
        for half in (state.forward, state.backward):
            write_in_place(half.graph, state.facts.in_place)
        return state


def _always(state: Emission) -> bool:
    return True


def _keeps_order(state: Emission) -> bool:
    return state.plan.keeps_order


def _changes_layout(state: Emission) -> bool:
    return state.plan.keeps_order and changes_layout(state.forward)


def _sends(state: Emission) -> bool:
    return bool(state.plan.offloads)


def _frees_early(state: Emission) -> bool:
    return state.plan.frees_early


@dataclass(frozen=True)
class OnHalf:
    """A rewrite of one half, of emissions to which it applies."""

    half: Literal["forward", "backward"]
    rewrite: Callable[[fx.Graph], object]
    applies: Callable[[Emission], bool] = _always

    @property
    def name(self) -> str:
        """Name of the rewrite."""
        return self.rewrite.__name__

    def __call__(self, state: Emission, /) -> Emission:
        """Rewrite the half in place where the rewrite applies."""
        if self.applies(state):
            half = state.forward if self.half == "forward" else state.backward
            self.rewrite(half.graph)
        return state


PREPARE: tuple[Pass[Joint], ...] = (
    OnJoint(unwrap_syncs),
    OnJoint(take_names),
    OnJoint(drop_statistics),
    OnJoint(fx.Graph.eliminate_dead_code),
    OnJoint(merge_common_subexpressions),
    OnJoint(raise_getitems),
    OnJoint(copy_whole_storages),
    OnJoint(hold_loss_elements),
    OnJoint(join_loss_backward),
)
"""From AOTAutograd's joint graph to the graph that is planned."""

PREPARE_EAGER: tuple[Pass[Joint], ...] = (
    OnJoint(unwrap_syncs),
    OnJoint(take_names),
    OnJoint(drop_statistics),
    OnJoint(raise_getitems),
)
"""As :data:`PREPARE`, for a graph whose ops run in Python and in autograd's nodes as they are."""

PREPARE_INDUCTOR: tuple[Pass[Joint], ...] = (
    OnJoint(unwrap_syncs),
    OnJoint(take_names),
    OnJoint(drop_statistics),
    OnJoint(fx.Graph.eliminate_dead_code),
    OnJoint(rejoin_views),
    OnJoint(merge_common_subexpressions),
    OnJoint(raise_getitems),
    OnJoint(copy_views_alone),
    OnJoint(sink_reshapes),
)
"""As :data:`PREPARE`, for a compiler that writes kernels of its own."""

EMIT: tuple[Pass[Emission], ...] = (
    Rematerialize(),
    InsertChecks(),
    InsertOffloadOps(),
    Partition(),
    OnHalves(raise_getitems),
    OnHalves(bind_sizes),
    WriteInPlace(),
)
"""From the planned joint graph to the two halves."""

FREE_EARLY: tuple[Pass[Emission], ...] = (OnHalf("backward", free_early, _frees_early),)
"""For halves once they are lowered: only the lowering tells that a plan must free early.

Among :data:`EMIT_INDUCTOR` it serves a plan of which that is known.
"""

EMIT_INDUCTOR: tuple[Pass[Emission], ...] = (
    Rematerialize(),
    InsertOffloadOps(),
    SaveViews(),
    Partition(),
    OnHalves(raise_getitems),
    OnHalves(bind_sizes),
    OnHalves(lower_tiles),
    OnHalf("backward", isolate_matmuls, _keeps_order),
    OnHalf("backward", to_channels_last, _changes_layout),
    OnHalf("backward", mark_execution_order, _keeps_order),
    OnHalf("forward", mark_execution_order, _sends),
    OnHalf("backward", preserve_strides),
    OnHalves(draw_as_traced),
    *FREE_EARLY,
    OnHalves(wrap_syncs),
)
"""As :data:`EMIT`, with the rewrites that keep Inductor's schedule to the plan."""


def prepare(joint: Joint, passes: tuple[Pass[Joint], ...] = PREPARE) -> Joint:
    """Return the joint graph that is planned; the given one is rewritten in place."""
    joint = _run(passes, joint, _check_joint)
    joint.module.recompile()
    return joint


def emit_halves(
    emission: Emission, passes: tuple[Pass[Emission], ...] = EMIT
) -> tuple[fx.GraphModule, fx.GraphModule]:
    """Return the forward and the backward that follow a plan; the joint graph is used up.

    Raises :class:`~fxckpt.errors.VerifyError` where a pass breaks what the plan promises.
    """
    emission = _run(passes, emission, _check_emission)
    for half in (emission.forward, emission.backward):
        half.recompile()
    return emission.forward, emission.backward


def _run(passes: tuple[Pass[State], ...], state: State, check: Callable[[State], None]) -> State:
    """Run passes in order, and the hook between them."""
    for step in passes:
        begin = time.perf_counter()
        state = step(state)
        took = time.perf_counter() - begin
        check(state)
        log.debug("%s took %.1f ms", step.name, 1e3 * took)
    return state


def _check_joint(joint: Joint) -> None:
    joint.module.graph.lint()


def _check_emission(emission: Emission) -> None:
    if emission.halves is None:
        emission.joint.module.graph.lint()
        return
    for half in emission.halves:
        half.graph.lint()
    verify(*emission.halves, emission.plan)
