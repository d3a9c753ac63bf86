"""Plans of regions: what an eager region keeps, and when what it does not keep runs again.

The first call of a region is recorded with its results held, so that its tape, as a graph, can be planned by the compile door's own planner and
policies; a plan is then a :class:`RegionPlan` for this call and for later ones that go the same way, op by op and shape by shape.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, fx

from fxckpt.eager.region_plan import CallKey, Consumer, RegionPlan, Rerun, unplanned
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
from fxckpt.torch_private import partitioner_tag, tag_side, trace_joint


def region_plan_of(
    calls: Sequence[Call],
    outputs: Sequence[TensorVersion],
    did: Sequence[CallKey],
    packed: tuple[int, ...],
    planner: Planner,
) -> RegionPlan:
    """Return the course of a region whose calls are given; one without a plan if nothing in it has a gradient.

    Raises :class:`BudgetInfeasible`, :class:`PolicyConflict` and what else planning raises, and :class:`CaptureError`.
    """
    try:
        graph = graph_of(calls, outputs)
        inputs = graph.fake_inputs()
    except Exception as error:
        # What an op was given need not be what a graph can hold.
        raise CaptureError(
            f"the region cannot be written as a graph: {type(error).__name__}: {error}"
        ) from error
    found: list[tuple[fx.GraphModule, int]] = []
    with torch.enable_grad():
        trace_joint(
            _calling(graph.module, len(inputs)), inputs, lambda joint, n: found.append((joint, n))
        )
    if not found:
        return unplanned(did, packed)
    joint, num_fwd_outputs = found[0]
    if planner.budget is not None:
        bind_to_autograd(joint.graph)
        planner = replace(planner, is_eager=True)
    prepare(Joint(joint, num_fwd_outputs))
    facts, plan = planner.plan(joint, num_fwd_outputs=num_fwd_outputs)
    return RegionPlan(
        plan=plan,
        seen=tuple(did),
        packed=packed,
        kept=_kept(facts, plan, calls),
        reruns=_reruns(facts, plan),
        consumers=_consumers(facts),
        end=len(facts.program.backward),
    )


def bind_to_autograd(graph: fx.Graph) -> None:
    """Leave what autograd's nodes compute in the backward, and apart from the forward: nobody can move or share it there."""
    for node in graph.nodes:
        if partitioner_tag(node) == "is_backward":
            tag_side(node, backward=True)
            node.meta["ac_graph_id"] = "autograd"


def _calling(module: fx.GraphModule, inputs: int) -> fx.GraphModule:
    """Return a graph of one call, of ``module`` node by node under its metadata."""

    def region(*tensors: Tensor) -> Any:
        with fx.traceback.preserve_node_meta():
            return _Interpreter(module).run(*tensors)

    graph = fx.Graph()
    graph.output(
        graph.call_function(region, tuple(graph.placeholder(f"input_{i}") for i in range(inputs)))
    )
    return fx.GraphModule(torch.nn.Module(), graph)


class _Interpreter(fx.Interpreter):
    """Runs what was written without gradients without them: autograd would refuse it."""

    def run_node(self, n: fx.Node) -> Any:
        with torch.set_grad_enabled(
            torch.is_grad_enabled() and not n.meta.get("custom", {}).get(UNTRACKED)
        ):
            return super().run_node(n)


def _number(node: fx.Node) -> int:
    """Return the number of the call that a node is, or is a part of; -1 for none."""
    number = node.meta.get("custom", {}).get(CALL, -1)
    return number if isinstance(number, int) else -1


def _kept(facts: Facts, plan: Plan, calls: Sequence[Call]) -> dict[int, frozenset[int]]:
    """Return which results are kept. In place of what only the backward computes, what it computes that of is kept."""
    program, by_number = facts.program, {call.number: call for call in calls}
    reads = {program.storages[w].name: op.reads for op in program.ops for w in op.writes}
    names = [
        row.name for row in plan.rows if row.decision is Decision.SAVED and row.name in facts.owner
    ]
    kept: dict[int, set[int]] = {}
    while names:
        name = names.pop()
        node = facts.owner[name]
        if partitioner_tag(node) == "is_backward":
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


def _reruns(facts: Facts, plan: Plan) -> tuple[Rerun, ...]:
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
    return tuple(map(Rerun, numbers, starts, last_reader, until))


def _consumers(facts: Facts) -> dict[int, Consumer]:
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
