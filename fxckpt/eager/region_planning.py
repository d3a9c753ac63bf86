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

from fxckpt.eager.region_plan import CallKey, Consumer, RegionPlan, RegionRecompute, unplanned
from fxckpt.eager.tape import Call, TensorVersion
from fxckpt.eager.tape_to_fx import graph_of
from fxckpt.errors import CaptureError
from fxckpt.passes.analysis.joint import Facts
from fxckpt.passes.graphs import Joint
from fxckpt.passes.meta import CALL, UNTRACKED
from fxckpt.planner.pipeline import prepare
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
) -> RegionPlan:
    """Return the plan of a region with the given calls; an empty one if nothing has a gradient.

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
    if planner.budget is not None:
        bind_to_autograd(joint.graph)
        planner = replace(planner, is_eager=True)
    given = prepare(Joint(joint, num_fwd_outputs))
    facts, plan = planner.plan(given)
    return RegionPlan(
        plan=plan,
        keys=tuple(keys),
        packed=packed,
        kept=_kept(facts, plan, calls, (Decision.SAVED, Decision.OFFLOADED)),
        away=_kept(facts, plan, calls, (Decision.OFFLOADED,)),
        recomputes=_recomputes(facts, plan),
        consumers=_consumers(facts),
        end=len(facts.program.backward),
    )


def bind_to_autograd(graph: fx.Graph) -> None:
    """Pin the ops of autograd's nodes to the backward: eager code can't move or share them."""
    for node in graph.nodes:
        if is_traced_in_backward(node):
            tag_side(node, backward=True)
            node.meta["ac_graph_id"] = "autograd"


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


def _number(node: fx.Node) -> int:
    """Return the number of the call that a node belongs to, or -1."""
    number = node.meta.get("custom", {}).get(CALL, -1)
    return number if isinstance(number, int) else -1


def _kept(
    facts: Facts, plan: Plan, calls: Sequence[Call], decisions: Sequence[Decision]
) -> dict[int, frozenset[int]]:
    """Return the results of some decisions; of values of the backward, those that they read."""
    program, by_number = facts.program, {call.number: call for call in calls}
    reads = {program.storages[w].name: op.reads for op in program.ops for w in op.writes}
    names = [row.name for row in plan.rows if row.decision in decisions and row.name in facts.owner]
    kept: dict[int, set[int]] = {}
    while names:
        name = names.pop()
        node = facts.owner[name]
        if is_traced_in_backward(node):
            names += [
                program.storages[s].name
                for s in reads.get(name, ())
                if program.storages[s].name in facts.owner
            ]
            continue
        call = by_number.get(_number(node))
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
    position = {op.name: i for i, op in enumerate(program.backward)}
    op_of = {op.name: op for op in program.ops}
    end = len(program.backward)
    starts = [position.get(run.before, end) for run in plan.schedule]
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
    numbers = [_number(facts.op_node[run.name]) for run in plan.schedule]
    return tuple(map(RegionRecompute, numbers, starts, last_reader, until))


def _consumers(facts: Facts) -> dict[int, Consumer]:
    """Return where the backward of each call runs and which calls it reads, by call number."""
    program = facts.program
    nodes = {node.name: node for node in facts.tangent_closure}
    position: dict[int, int] = {}
    roots: dict[int, set[int]] = {}
    for i, op in enumerate(program.backward):
        number = _number(nodes[op.name]) if op.name in nodes else -1
        producers = [program.storages[s].producer for s in op.reads]
        position[number] = i
        roots.setdefault(number, set()).update(
            _number(facts.op_node[program.ops[p].name]) for p in producers if p >= 0
        )
    return {
        number: Consumer(position[number], frozenset(roots[number]))
        for number in position
        if number >= 0
    }
