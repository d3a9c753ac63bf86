"""Fingerprint: a joint graph as text, one line a node, by which a plan knows the graph it was made for."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from fxckpt.errors import InvalidPlan, PlanMismatch
from fxckpt.passes.facts import Facts
from fxckpt.passes.kinds import tensors
from fxckpt.plan import Plan
from fxckpt.torch_private import size_hint


def fingerprint(graph: fx.Graph) -> tuple[str, ...]:
    """Return the lines of a normalized joint graph: name, op, arguments, and shape and dtype of what it gives."""
    return tuple(_line(node) for node in graph.nodes)


def _line(node: fx.Node) -> str:
    value = node.meta.get("val")
    made = _argument(value) if isinstance(value, torch.SymInt) else ", ".join(map(_tensor, tensors(value)))
    if node.op == "output":
        return f"output: {_argument(node.args)}"
    if node.op != "call_function":
        return f"{node.name}: {made}"
    named = [f"{key}={_argument(value)}" for key, value in node.kwargs.items()]
    target = getattr(node.target, "__name__", "") if not hasattr(node.target, "_schema") else str(node.target)
    return f"{node.name}: {target}({', '.join([*map(_argument, node.args), *named])}) -> {made}"


def _tensor(tensor: torch.Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')}{[size_hint(n) for n in tensor.shape]}"


def _argument(value: Any) -> str:
    if isinstance(value, fx.Node):
        return value.name
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(_argument, value))}]"
    if isinstance(value, torch.SymInt):
        return str(size_hint(value))
    # A generator's address differs from process to process.
    return type(value).__name__ if isinstance(value, torch.Generator) else repr(value)


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
        raise PlanMismatch("this plan does not know its graph: it was not made by this version of fxckpt. Plan again.")
    pairs = zip(plan.graph, lines, strict=False)
    where = next((i for i, (then, now) in enumerate(pairs) if then != now), min(len(plan.graph), len(lines)))
    then = plan.graph[where] if where < len(plan.graph) else "nothing more"
    now = lines[where] if where < len(lines) else "nothing more"
    raise PlanMismatch(
        f"the plan was made for another graph, of {len(plan.graph)} nodes; this one has {len(lines)}. They first differ at node {where}:\n"
        f"  the plan's: {then}\n  this one's: {now}\n"
        "Give the model and inputs of the shapes that it was planned with, or plan again: rewrite(gm, policy, budget=...)."
    )
