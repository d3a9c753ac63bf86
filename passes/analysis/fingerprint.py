"""Fingerprint: a joint graph as text, one line a node.

A plan keeps the fingerprint of its graph, and is applied to graphs of the same fingerprint only.

Expects a normalized joint graph. Leaves the graph alone.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Mapping
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from fxckpt.errors import InvalidPlan, PlanMismatch
from fxckpt.ops.properties import is_collective, tensors
from fxckpt.passes.analysis.joint import Facts
from fxckpt.plans.types import Plan
from fxckpt.torch_private import size_hint, stream_of


def fingerprint(graph: fx.Graph) -> tuple[str, ...]:
    """Return the lines of a graph: name, op and arguments of a node, dtype and shape of its value.

    The order of the inputs depends on the capture and is no part of a plan. So inputs are numbered
    in the order in which ops read them; gradients, and the writes into inputs at the end of the
    step, are listed in that order. Numbers and group names are left out of a graph that
    communicates, as they may be those of a rank: the offset of its shard, its part of a mesh.
    """
    called = _input_names(graph)
    is_of_rank = any(map(is_collective, graph.nodes))
    *body, output = (node for node in graph.nodes if node not in called)
    writes = list(itertools.takewhile(lambda node: _is_last_write(node, called), reversed(body)))
    del body[len(body) - len(writes) :]
    writes.sort(key=lambda node: list(called).index(node.args[0]))
    return (
        *(f"{name}: {_type(node)}" for node, name in called.items()),
        *(f"{node.name}: {_call(node, called, is_of_rank)}{_stream(node)}" for node in body),
        # Their names are left out: they are numbered in the order of the capture.
        *(_call(node, called, is_of_rank) for node in writes),
        _output(output, called),
    )


def _input_names(graph: fx.Graph) -> dict[fx.Node, str]:
    """Return names for the primals, in the order of their first readers; unread ones come last."""
    primals = {
        node
        for node in graph.find_nodes(op="placeholder")
        if str(node.target).startswith("primals")
    }
    read = dict.fromkeys(
        arg
        for node in graph.nodes
        if node.op == "call_function"
        for arg in node.all_input_nodes
        if arg in primals
    )
    unread = sorted(primals - read.keys(), key=lambda node: (_type(node), node.name))
    return {node: f"input_{i}" for i, node in enumerate((*read, *unread), 1)}


def _is_last_write(node: fx.Node, called: Mapping[fx.Node, str]) -> bool:
    return node.target is torch.ops.aten.copy_.default and node.args[0] in called and not node.users


def _stream(node: fx.Node) -> str:
    found = stream_of(node)
    return "" if found is None else f" on stream {found}"


def _call(node: fx.Node, called: Mapping[fx.Node, str], is_of_rank: bool = False) -> str:
    if node.op == "get_attr" and (body := _body(node)):
        return f"body {body}"
    if node.op != "call_function":
        return _type(node)
    named = [f"{key}={_argument(value, called, is_of_rank)}" for key, value in node.kwargs.items()]
    target = (
        getattr(node.target, "__name__", "")
        if not hasattr(node.target, "_schema")
        else str(node.target)
    )
    arguments = ", ".join([*(_argument(arg, called, is_of_rank) for arg in node.args), *named])
    return f"{target}({arguments}) -> {_type(node)}"


def _body(node: fx.Node) -> str:
    """Return a hash of a subgraph that is an argument of a higher-order op; "" for a tensor."""
    held = node.graph.owning_module and getattr(node.graph.owning_module, str(node.target), None)
    if not isinstance(held, fx.GraphModule):
        return ""
    lines = "\n".join(_body_line(each) for each in held.graph.nodes)
    return hashlib.sha256(lines.encode()).hexdigest()[:16]


def _body_line(node: fx.Node) -> str:
    return f"{node.name} = {_call(node, {})} {node.args if node.op == 'output' else ''}"


def _output(node: fx.Node, called: Mapping[fx.Node, str]) -> str:
    outputs = pytree.arg_tree_leaves(*node.args)
    count = len(outputs) - len(called)
    primals = [n for n in node.graph.find_nodes(op="placeholder") if n in called]
    gradients = dict(zip(primals, outputs[count:], strict=True))
    returned = _argument(outputs[:count], called)
    return f"output: {returned}, gradients: {_argument([gradients[n] for n in called], called)}"


def _argument(value: Any, called: Mapping[fx.Node, str], is_of_rank: bool = False) -> str:
    """Return an argument as text; of a rank's own, numbers and texts are left out."""
    if isinstance(value, fx.Node):
        return called.get(value, value.name)
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(_argument(item, called, is_of_rank) for item in value)}]"
    if is_of_rank and isinstance(value, (int, float, str)) and not isinstance(value, bool):
        return "_"
    if isinstance(value, torch.SymInt):
        return str(size_hint(value))
    # The address of a generator differs from process to process.
    return type(value).__name__ if isinstance(value, torch.Generator) else repr(value)


def _type(node: fx.Node) -> str:
    """Return dtype and shape of every tensor of a node; of a size, its hint."""
    value = node.meta.get("val")
    return (
        str(size_hint(value))
        if isinstance(value, torch.SymInt)
        else ", ".join(map(_tensor, tensors(value)))
    )


def _tensor(tensor: torch.Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')}{[size_hint(n) for n in tensor.shape]}"


def refuse_unknown_ops(plan: Plan, facts: Facts) -> None:
    """Raise :class:`~fxckpt.errors.InvalidPlan` for a schedule that does not fit its own graph."""
    backward = {op.name for op in facts.program.backward}
    for run in plan.schedule:
        if run.name not in facts.op_node or run.name in backward or run.before not in backward:
            raise InvalidPlan(
                f"the plan recomputes {run.name!r} before {run.before!r}, but the graph it names "
                "has no such op in the forward, or none in the backward. The plan was changed by "
                "hand: plan again."
            )


def refuse_another_graph(plan: Plan, lines: tuple[str, ...]) -> None:
    """Raise :class:`~fxckpt.errors.PlanMismatch` unless ``lines`` are the plan's fingerprint."""
    if plan.graph == lines:
        return
    if not plan.graph:
        raise PlanMismatch(
            "this plan does not know its graph: it was not made by this version of fxckpt. "
            "Plan again."
        )
    pairs = zip(plan.graph, lines, strict=False)
    where = next(
        (i for i, (then, now) in enumerate(pairs) if then != now), min(len(plan.graph), len(lines))
    )
    then = plan.graph[where] if where < len(plan.graph) else "nothing more"
    now = lines[where] if where < len(lines) else "nothing more"
    raise PlanMismatch(
        f"the plan was made for another graph, of {len(plan.graph)} nodes; this one has "
        f"{len(lines)}. They first differ at node {where}:\n"
        f"  the plan's: {then}\n  this one's: {now}\n"
        "Give the model and inputs of the shapes that it was planned with, or plan again: "
        "rewrite(gm, policy, budget=...)."
    )
