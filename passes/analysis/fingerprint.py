"""Fingerprint: a joint graph as text, one line a node, by which a plan knows the graph it was made for."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Mapping
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from fxckpt.errors import InvalidPlan, PlanMismatch
from fxckpt.ops.properties import tensors
from fxckpt.passes.analysis.joint import Facts
from fxckpt.plans.types import Plan
from fxckpt.torch_private import size_hint


def fingerprint(graph: fx.Graph) -> tuple[str, ...]:
    """Return the lines of a normalized joint graph: name, op, arguments, and shape and dtype of what it gives.

    Every way of capture lists inputs in an order of its own, of which a plan says nothing. Here they are called by the order in which ops read
    them; their gradients, and what the step writes into them at its end, are listed in that order too.
    """
    called = _called(graph)
    *body, output = (node for node in graph.nodes if node not in called)
    writes = list(itertools.takewhile(lambda node: _is_last_write(node, called), reversed(body)))
    del body[len(body) - len(writes) :]
    writes.sort(key=lambda node: list(called).index(node.args[0]))
    return (
        *(f"{name}: {_made(node)}" for node, name in called.items()),
        *(f"{node.name}: {_call(node, called)}" for node in body),
        # Their names count them in the order of the capture.
        *(_call(node, called) for node in writes),
        _output(output, called),
    )


def _called(graph: fx.Graph) -> dict[fx.Node, str]:
    """Return what the primals are called, in the order in which they are read; those that nobody reads come last."""
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
    unread = sorted(primals - read.keys(), key=lambda node: (_made(node), node.name))
    return {node: f"input_{i}" for i, node in enumerate((*read, *unread), 1)}


def _is_last_write(node: fx.Node, called: Mapping[fx.Node, str]) -> bool:
    return node.target is torch.ops.aten.copy_.default and node.args[0] in called and not node.users


def _call(node: fx.Node, called: Mapping[fx.Node, str]) -> str:
    if node.op == "get_attr" and (body := _body(node)):
        return f"body {body}"
    if node.op != "call_function":
        return _made(node)
    named = [f"{key}={_argument(value, called)}" for key, value in node.kwargs.items()]
    target = (
        getattr(node.target, "__name__", "")
        if not hasattr(node.target, "_schema")
        else str(node.target)
    )
    return f"{target}({', '.join([*(_argument(arg, called) for arg in node.args), *named])}) -> {_made(node)}"


def _body(node: fx.Node) -> str:
    """Return a hash of the subgraph that a higher-order op is given; "" for a tensor."""
    held = node.graph.owning_module and getattr(node.graph.owning_module, str(node.target), None)
    if not isinstance(held, fx.GraphModule):
        return ""
    return hashlib.sha256("\n".join(_line(each) for each in held.graph.nodes).encode()).hexdigest()[
        :16
    ]


def _line(node: fx.Node) -> str:
    return f"{node.name} = {_call(node, {})} {node.args if node.op == 'output' else ''}"


def _output(node: fx.Node, called: Mapping[fx.Node, str]) -> str:
    outputs = pytree.arg_tree_leaves(*node.args)
    count = len(outputs) - len(called)
    primals = [n for n in node.graph.find_nodes(op="placeholder") if n in called]
    gradients = dict(zip(primals, outputs[count:], strict=True))
    return f"output: {_argument(outputs[:count], called)}, gradients: {_argument([gradients[n] for n in called], called)}"


def _argument(value: Any, called: Mapping[fx.Node, str]) -> str:
    if isinstance(value, fx.Node):
        return called.get(value, value.name)
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(_argument(item, called) for item in value)}]"
    if isinstance(value, torch.SymInt):
        return str(size_hint(value))
    # A generator's address differs from process to process.
    return type(value).__name__ if isinstance(value, torch.Generator) else repr(value)


def _made(node: fx.Node) -> str:
    value = node.meta.get("val")
    return (
        str(size_hint(value))
        if isinstance(value, torch.SymInt)
        else ", ".join(map(_tensor, tensors(value)))
    )


def _tensor(tensor: torch.Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')}{[size_hint(n) for n in tensor.shape]}"


def refuse_unknown_ops(plan: Plan, facts: Facts) -> None:
    """Raise :class:`InvalidPlan` for a plan of this graph that runs again what is no op of its forward, or nowhere in its backward."""
    places = {op.name for op in facts.program.backward}
    for run in plan.schedule:
        if run.name not in facts.op_node or run.name in places or run.before not in places:
            raise InvalidPlan(
                f"the plan runs {run.name!r} again before {run.before!r}: the graph it names has no such op of the forward, or of the backward. "
                "It was changed by hand: plan again."
            )


def refuse_another_graph(plan: Plan, lines: tuple[str, ...]) -> None:
    """Raise :class:`PlanMismatch` unless ``lines`` are those of the graph that ``plan`` was made for, saying what differs."""
    if plan.graph == lines:
        return
    if not plan.graph:
        raise PlanMismatch(
            "this plan does not know its graph: it was not made by this version of fxckpt. Plan again."
        )
    pairs = zip(plan.graph, lines, strict=False)
    where = next(
        (i for i, (then, now) in enumerate(pairs) if then != now), min(len(plan.graph), len(lines))
    )
    then = plan.graph[where] if where < len(plan.graph) else "nothing more"
    now = lines[where] if where < len(lines) else "nothing more"
    raise PlanMismatch(
        f"the plan was made for another graph, of {len(plan.graph)} nodes; this one has {len(lines)}. They first differ at node {where}:\n"
        f"  the plan's: {then}\n  this one's: {now}\n"
        "Give the model and inputs of the shapes that it was planned with, or plan again: rewrite(gm, policy, budget=...)."
    )
