"""Small joint graphs, and graphs as text that no torch version writes differently."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.checkpoint import CheckpointPolicy

from fxckpt.costs.models import FlopCost
from fxckpt.passes.analysis.joint import Facts, read_facts
from fxckpt.passes.graphs import Joint
from fxckpt.planner.planner import Planner
from fxckpt.plans.types import Plan
from fxckpt.policies import as_policy


def traced(function: Callable[..., Any], *inputs: Tensor) -> fx.GraphModule:
    """Trace a function on fake tensors.

    With parameters named ``primals`` and ``tangents``, its graph is a joint graph.
    """
    return make_fx(function, tracing_mode="fake")(*inputs)


def text_of(graph: fx.Graph) -> str:
    """The names, ops and arguments of a graph, one node a line."""
    return "\n".join(text for _, text in lines_of(graph))


def lines_of(graph: fx.Graph) -> list[tuple[fx.Node, str]]:
    """The nodes of a graph, each with its line."""
    return [(node, _line(node)) for node in graph.nodes]


def _line(node: fx.Node) -> str:
    if node.op == "placeholder":
        return f"{node.name}: input"
    arguments = [
        *map(_argument, node.args),
        *(f"{k}={_argument(v)}" for k, v in node.kwargs.items()),
    ]
    if node.op == "output":
        return f"return {', '.join(arguments)}"
    if node.op == "get_attr":
        return f"{node.name} = {node.target}"
    return f"{node.name} = {_op(node.target)}({', '.join(arguments)})"


def _argument(value: Any) -> str:
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(_argument, value))}]"
    if isinstance(value, fx.Node):
        return value.name
    return _op(value) if callable(value) else repr(value)


def _op(target: Any) -> str:
    packet = getattr(target, "overloadpacket", target)
    return getattr(packet, "__name__", str(packet))


def planned(joint: fx.GraphModule, *, recomputes: bool = True) -> tuple[Facts, Plan]:
    """The facts of a joint graph with one forward output, and a plan to recompute all or none."""
    answer = CheckpointPolicy.MUST_RECOMPUTE if recomputes else CheckpointPolicy.MUST_SAVE
    policy = as_policy(lambda ctx, op, *args, **kwargs: answer)
    planner = Planner(policy=policy, cost="flops", measure_workspace=False)
    return planner.plan(Joint(joint, 1))


def facts_of(joint: fx.GraphModule, **options: Any) -> Facts:
    """The facts of a joint graph with one forward output."""
    return read_facts(joint, num_fwd_outputs=1, cost=FlopCost(), **options)


def chain(primals: Tensor, tangents: Tensor) -> tuple[Tensor, Tensor]:
    """``y = x.sin().sin()`` and its gradient."""
    hidden = primals.sin()
    return hidden.sin(), tangents * hidden.cos() * primals.cos()


def dropped(primals: Tensor, tangents: Tensor) -> tuple[Tensor, Tensor]:
    """A random mask, and a gradient that reads a view of it."""
    mask = torch.bernoulli(primals, 0.5)
    return mask.exp(), mask.t() * tangents


def storages_of(graph: fx.Graph) -> str:
    """Return a line for each value: the bytes of its fake storage, and where in it it begins."""
    values = ((text, node.meta.get("val")) for node, text in lines_of(graph))
    return "\n".join(
        f"{text}: {v.untyped_storage().nbytes()} B from {v.storage_offset()}"
        for text, v in values
        if isinstance(v, Tensor)
    )
