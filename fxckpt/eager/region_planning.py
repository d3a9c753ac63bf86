"""Planning of eager regions: the results to keep, and the time of each recompute.

The first call of a region is recorded with its results held. Its tape becomes a graph, which the
planner and policies of the compiled path plan. The :class:`RegionPlan` applies to this call and to
later calls with the same ops and shapes.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, fx

from fxckpt.eager.region_plan import (
    CallKey,
    Consumer,
    LastUse,
    RegionPlan,
    RegionRecompute,
    unplanned,
)
from fxckpt.eager.tape import Call, ForwardHolds, TensorVersion
from fxckpt.eager.tape_to_fx import INDICES, graph_of
from fxckpt.errors import CaptureError
from fxckpt.ops.properties import is_random
from fxckpt.ops.unseen import unseen
from fxckpt.passes.analysis.eager_liveness import call_of
from fxckpt.passes.analysis.joint import Facts
from fxckpt.passes.graphs import Joint
from fxckpt.passes.meta import HAS_STATE, HELD, HELD_TO, UNTRACKED
from fxckpt.planner.pipeline import PREPARE_EAGER, prepare
from fxckpt.planner.planner import Planner
from fxckpt.plans.types import Plan
from fxckpt.reason import Decision
from fxckpt.torch_private import is_traced_in_backward, outside_trace, tag_side, trace_joint


@outside_trace()  # A mode around the region, such as the user's FakeTensorMode, must see no trace.
def region_plan_of(
    calls: Sequence[Call],
    outputs: Sequence[TensorVersion],
    keys: Sequence[CallKey],
    packed: tuple[int, ...],
    planner: Planner,
    held: ForwardHolds,
) -> RegionPlan:
    """Return the plan of a region with the given calls; an empty one if nothing has a gradient.

    ``held`` is what the recorded forward held beside what its ops read.

    Raises :class:`CaptureError`, and the errors of planning (:class:`BudgetInfeasible`,
    :class:`PolicyConflict`, ...).
    """
    try:
        graph = graph_of(calls, outputs)
        inputs = graph.fake_inputs()
    except Exception as error:
        # Arguments of an op need not be values that a graph can hold.
        raise CaptureError(
            f"the region cannot be written as a graph: {type(error).__name__}: {error}"
        ) from error
    found: list[tuple[fx.GraphModule, int]] = []
    with torch.enable_grad():
        trace_joint(
            _calling(graph.module, len(inputs)), inputs, lambda joint, n: found.append((joint, n))
        )
    if not found:
        return unplanned(keys, packed)
    joint, num_fwd_outputs = found[0]
    _mark_held(joint.graph, held, calls)
    if planner.budget is not None:
        bind_to_autograd(joint.graph)
        planner = replace(planner, is_eager=True)
    given = prepare(Joint(joint, num_fwd_outputs), PREPARE_EAGER)
    facts, plan = planner.plan(given)
    return RegionPlan(
        plan=plan,
        keys=tuple(keys),
        packed=packed,
        kept=_kept(facts, plan, calls, (Decision.SAVED, Decision.OFFLOADED)),
        away=_kept(facts, plan, calls, (Decision.OFFLOADED,)),
        recomputes=_recomputes(facts, plan),
        consumers=_consumers(facts),
        last_uses=_last_uses(facts, plan),
        end=len(facts.program.backward),
    )


def bind_to_autograd(graph: fx.Graph) -> None:
    """Pin the ops of autograd's nodes to the backward: eager code can't move or share them."""
    for node in graph.nodes:
        if is_traced_in_backward(node):
            tag_side(node, backward=True)
            node.meta["ac_graph_id"] = "autograd"


def _mark_held(graph: fx.Graph, held: ForwardHolds, calls: Sequence[Call]) -> None:
    """Mark the forward's ops whose results or generator states are held, and how long."""
    by_number = {call.number: call for call in calls}
    for node in graph.nodes:
        call = by_number.get(call_of(node))
        if call is None or is_traced_in_backward(node):
            continue
        if call.number in held.calls:
            node.meta[HELD] = True
        if call.draw is not None and is_random(node):
            node.meta[HAS_STATE] = True
        paths = () if call.detail is None else call.detail.paths
        node.meta[HELD_TO] = {
            path: held.results[call.number, i]
            for i, path in enumerate(paths)
            if (call.number, i) in held.results
        }


def _calling(module: fx.GraphModule, inputs: int) -> fx.GraphModule:
    """Return a graph of one call, which interprets ``module`` and preserves its metadata."""

    def region(*tensors: Tensor) -> Any:
        with fx.traceback.preserve_node_meta():
            return _Interpreter(module).run(*tensors)

    graph = fx.Graph()
    graph.output(
        graph.call_function(region, tuple(graph.placeholder(f"input_{i}") for i in range(inputs)))
    )
    return fx.GraphModule(torch.nn.Module(), graph)


class _Interpreter(fx.Interpreter):
    """Interpreter that disables gradients for nodes recorded without: autograd rejects them."""

    def run_node(self, n: fx.Node) -> Any:
        with torch.set_grad_enabled(
            torch.is_grad_enabled() and not n.meta.get("custom", {}).get(UNTRACKED)
        ):
            return super().run_node(n)


def _kept(
    facts: Facts, plan: Plan, calls: Sequence[Call], decisions: Sequence[Decision]
) -> dict[int, frozenset[int]]:
    """Return the results of some decisions, without those that the recorder keeps of necessity.

    Values that no call returned stand for what they are computed from: those of the backward, and
    the indices of a mask.
    """
    program, by_number = facts.program, {call.number: call for call in calls}
    reads = {program.storages[w].name: op.reads for op in program.ops for w in op.writes}
    names = [row.name for row in plan.rows if row.decision in decisions and row.name in facts.owner]
    kept: dict[int, set[int]] = {}
    while names:
        name = names.pop()
        node = facts.owner[name]
        is_indices = node.target is unseen and node.args[0] == INDICES
        if is_traced_in_backward(node) or is_indices:
            names += [
                program.storages[s].name
                for s in reads.get(name, ())
                if program.storages[s].name in facts.owner
            ]
            continue
        if HELD in node.meta:
            continue  # It is kept in any case, and is not free to be a choice.
        call = by_number.get(call_of(node))
        if call is not None:
            path = (node.args[1],) if node.target is operator.getitem else ()
            paths = () if call.detail is None else call.detail.paths
            kept.setdefault(call.number, set()).update(
                [paths.index(path)] if path in paths else range(len(call.outputs))
            )
    return {number: frozenset(which) for number, which in kept.items()}


def _recomputes(facts: Facts, plan: Plan) -> tuple[RegionRecompute, ...]:
    """Return the recomputes of a plan by call number, each with its place and its last reader."""
    program = facts.program
    op_of = {op.name: op for op in program.ops}
    end = len(program.backward)
    starts = _starts(facts, plan)
    last_reader = list(range(len(starts)))
    until = [end] * len(starts)
    latest: dict[str, int] = {}
    for i, run in enumerate(plan.schedule):
        for storage in op_of[run.name].reads:
            producer = program.storages[storage].producer
            if producer >= 0 and (maker := program.ops[producer].name) in latest:
                last_reader[latest[maker]] = i
        if run.name in latest:
            until[latest[run.name]] = starts[i]
        latest[run.name] = i
    numbers = [call_of(facts.op_node[run.name]) for run in plan.schedule]
    return tuple(map(RegionRecompute, numbers, starts, last_reader, until))


def _starts(facts: Facts, plan: Plan) -> list[int]:
    """Return the position of the backward op before which each recompute of a plan runs."""
    position = {op.name: i for i, op in enumerate(facts.program.backward)}
    return [position.get(run.before, len(position)) for run in plan.schedule]


def _last_uses(facts: Facts, plan: Plan) -> dict[int, LastUse]:
    """Return the last use of saved results that are recomputed later, by call number."""
    program, starts = facts.program, _starts(facts, plan)
    op_of = {op.name: op for op in program.ops}
    first_run: dict[str, int] = {}
    for i, run in enumerate(plan.schedule):
        first_run.setdefault(run.name, i)
    saved = {s for s, storage in enumerate(program.storages) if storage.name in plan.saved}
    found: dict[int, LastUse] = {}
    for name, first in first_run.items():
        results, number = saved.intersection(op_of[name].writes), call_of(facts.op_node[name])
        if not results or number < 0:
            continue
        recomputes = (i for i in range(first) if results & {*op_of[plan.schedule[i].name].reads})
        positions = (j for j in range(starts[first]) if results & {*program.backward[j].reads})
        last = LastUse(max(recomputes, default=-1), max(positions, default=-1))
        found[number] = last
    return found


def _consumers(facts: Facts) -> dict[int, Consumer]:
    """Return where the backward of each call runs and which calls it reads, by call number."""
    program = facts.program
    nodes = {node.name: node for node in facts.tangent_closure}
    position: dict[int, int] = {}
    roots: dict[int, set[int]] = {}
    for i, op in enumerate(program.backward):
        number = call_of(nodes[op.name]) if op.name in nodes else -1
        producers = [program.storages[s].producer for s in op.reads]
        position[number] = i
        roots.setdefault(number, set()).update(
            call_of(facts.op_node[program.ops[p].name]) for p in producers if p >= 0
        )
    return {
        number: Consumer(position[number], frozenset(roots[number]))
        for number in position
        if number >= 0
    }
