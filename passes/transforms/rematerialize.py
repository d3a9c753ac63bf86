"""Rematerialize: make a plan explicit in the joint graph.

Every run of the plan becomes a copied node that belongs to the backward, placed in front of the backward node it was planned for, and the
backward reads copies instead of forward values. A value may have many copies. Views are made again from whichever copy their base has. A
random op that runs again gives out its generator state in the forward (``run_and_save_rng_state``) and is replayed under it in the backward
(``run_with_rng_state``), which puts the generator back; the forward draws as eager would.

Expects the graph the facts were read from. Leaves a joint graph in which every node is bound to its half, so that splitting is trivial.
"""

from __future__ import annotations

import copy
import operator
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from fxckpt.ops.properties import is_random, tensors
from fxckpt.passes.analysis.joint import Facts
from fxckpt.passes.meta import FIRST_RUN_OF, NEVER_STORED, RECOMPUTE_OF, IS_RECOMPUTE
from fxckpt.plans.types import Plan, Recompute
from fxckpt.torch_private import (
    fake_rng_state,
    is_symbolic,
    run_and_save_rng_state,
    run_with_rng_state,
    tag_side,
    untag_side,
)


def _callable(op: fx.Node) -> Any:
    """Return an op's target; as an argument of a higher-order op it is a value like any other."""
    return op.target


def _replace_uses(node: fx.Node, out: fx.Node) -> None:
    """Let every user of ``node`` but the wrapper that now runs it read ``out``."""
    wrapper = out.args[0]
    node.replace_all_uses_with(out, delete_user_cb=lambda user: user is not wrapper)


@dataclass(frozen=True)
class Rematerialized:
    """The forward nodes the backward reads: tensors in joint order, then sizes and scalars."""

    saved: tuple[fx.Node, ...]
    symbolic: tuple[fx.Node, ...]


def rematerialize(
    joint: fx.GraphModule, facts: Facts, plan: Plan, *, num_fwd_outputs: int
) -> Rematerialized:
    """Apply ``plan`` to ``joint`` in place and return what the forward must save."""
    return _Rewriter(joint.graph, facts, plan.schedule, num_fwd_outputs).run()


def taken_in(graph: fx.Graph, facts: Facts) -> frozenset[fx.Node]:
    """Return the backward's own values that are never stored, and what shows them: they are made in front of each that reads them.

    Where they stand in the graph, what they read may not have been made again yet.
    """
    found: set[fx.Node] = set()
    for node in graph.nodes if facts.never_stored else ():
        if node in facts.tangent_closure and node in facts.views:
            if node in facts.never_stored or not found.isdisjoint(node.all_input_nodes):
                found.add(node)
    return frozenset(found)


class _Rewriter:
    """One rewrite of one graph."""

    def __init__(
        self, graph: fx.Graph, facts: Facts, schedule: Sequence[Recompute], num_fwd_outputs: int
    ) -> None:
        self.graph = graph
        self.facts = facts
        self.num_fwd_outputs = num_fwd_outputs
        self.runs: dict[str, list[fx.Node]] = defaultdict(list)
        for run in schedule:
            self.runs[run.before].append(facts.op_node[run.name])
        self.latest: dict[fx.Node, fx.Node] = {}
        self.view_copies: dict[tuple[fx.Node, tuple[fx.Node, ...]], fx.Node] = {}
        self.rng_state: dict[fx.Node, fx.Node] = {}
        self.wrapped: dict[fx.Node, fx.Node] = {}
        self.taken_in = taken_in(graph, facts)

    def run(self) -> Rematerialized:
        original = list(self.graph.nodes)
        for node in original:
            if node.op == "call_function" and node not in self.facts.tangent_closure:
                tag_side(node, backward=False)
        for node in original:
            if node.op == "output":
                self._rewrite_output(node)
            elif node.op == "call_function" and self._is_backward(node):
                self._rewrite(node)
                tag_side(node, backward=True)
        for node in reversed(original):
            if node in self.taken_in:
                self.graph.erase_node(node)
        for node, out in self.wrapped.items():
            _replace_uses(node, out)
            name = node.name
            self.graph.erase_node(node)
            out.name = name
        self.graph.lint()
        return self._what_is_saved()

    def _rewrite(self, node: fx.Node) -> None:
        for op in self.runs.get(node.name, ()):
            self._run_again(op, node)
        node.args = fx.map_arg(node.args, lambda arg: self._in_backward(arg, node))
        node.kwargs = fx.map_arg(node.kwargs, lambda arg: self._in_backward(arg, node))

    def _rewrite_output(self, node: fx.Node) -> None:
        for op in self.runs.get("output", ()):
            self._run_again(op, node)
        (outputs,) = node.args
        assert isinstance(outputs, (tuple, list))
        gradients = [
            self._in_backward(o, node) if isinstance(o, fx.Node) else o
            for o in outputs[self.num_fwd_outputs :]
        ]
        node.args = ((*outputs[: self.num_fwd_outputs], *gradients),)

    def _is_backward(self, node: fx.Node) -> bool:
        """Return whether a node is the backward's own, and stays where it is."""
        return node in self.facts.tangent_closure and node not in self.taken_in

    def _in_backward(self, node: fx.Node, consumer: fx.Node) -> fx.Node:
        """Return what the backward reads in place of ``node``, making views again in front of ``consumer``."""
        if self._is_backward(node) or node.op != "call_function" or is_symbolic(node):
            return node
        if node in self.latest:
            return self.latest[node]
        if node in self.facts.views:
            return self._view_again(node, consumer)
        return node

    def _view_again(self, node: fx.Node, consumer: fx.Node) -> fx.Node:
        stack = [node]
        while True:
            view = stack[-1]
            pending = [arg for arg in view.all_input_nodes if self._present(arg) is None]
            if pending:
                stack.extend(pending)
                continue
            if self._present(view) is None:
                made = self._copy(view, consumer)
                self.view_copies[
                    view, tuple(self._resolve(arg) for arg in view.all_input_nodes)
                ] = made
            stack.pop()
            if not stack:
                return self._resolve(node)

    def _present(self, node: fx.Node) -> fx.Node | None:
        """Return what stands for ``node`` now: its latest copy, or the view of its inputs' latest copies; None if that view is not made yet."""
        if node in self.latest:
            return self.latest[node]
        if node not in self.facts.views or is_symbolic(node) or self._is_backward(node):
            return node
        inputs = [self._present(arg) for arg in node.all_input_nodes]
        return (
            None
            if None in inputs
            else self.view_copies.get((node, tuple(i for i in inputs if i is not None)))
        )

    def _resolve(self, node: fx.Node) -> fx.Node:
        found = self._present(node)
        assert found is not None, f"view {node.name} was not made again"
        return found

    def _copy(self, node: fx.Node, consumer: fx.Node) -> fx.Node:
        with self.graph.inserting_before(consumer):
            made = self.graph.create_node(
                node.op,
                node.target,
                fx.map_arg(node.args, self._resolve),
                fx.map_arg(node.kwargs, self._resolve),
                name=node.name if node in self.taken_in else f"{node.name}_recompute",
            )
        if node in self.taken_in:
            made.meta = copy.copy(node.meta)
            tag_side(made, backward=True)
        else:
            self._mark(made, node)
        if node in self.facts.never_stored:
            made.meta[NEVER_STORED] = True
        return made

    def _mark(self, made: fx.Node, node: fx.Node) -> fx.Node:
        made.meta = copy.copy(node.meta)
        made.meta[RECOMPUTE_OF] = node.name
        # print_readable() shows this key.
        made.meta["custom"] = {**node.meta.get("custom", {}), "recompute_of": node.name}
        tag_side(made, backward=True)
        return made

    def _run_again(self, op: fx.Node, consumer: fx.Node) -> None:
        for arg in op.all_input_nodes:
            if arg in self.facts.views and not is_symbolic(arg):
                self._view_again(arg, consumer)
        if is_random(op):
            made = self._replay(op, consumer)
        else:
            made = self._copy(op, consumer)
        made.meta[IS_RECOMPUTE] = True
        self.latest[op] = made
        for item in [
            u for u in op.users if u.target is operator.getitem and u not in self.facts.views
        ]:
            with self.graph.inserting_before(consumer):
                part = self.graph.create_node(
                    "call_function",
                    operator.getitem,
                    (made, item.args[1]),
                    name=f"{item.name}_recompute",
                )
            self.latest[item] = self._mark(part, item)

    def _replay(self, op: fx.Node, consumer: fx.Node) -> fx.Node:
        state = self._captured_state(op)
        with self.graph.inserting_before(consumer):
            made = self.graph.create_node(
                "call_function",
                run_with_rng_state,
                (state, _callable(op), *fx.map_arg(op.args, self._resolve)),
                fx.map_arg(op.kwargs, self._resolve),
                name=f"{op.name}_recompute",
            )
        return self._mark(made, op)

    def _captured_state(self, op: fx.Node) -> fx.Node:
        """Return the node of the generator state from before ``op`` ran in the forward."""
        if op in self.rng_state:
            return self.rng_state[op]
        state_val = fake_rng_state(next(tensors(op.meta["val"])))
        with self.graph.inserting_after(op):
            both = self.graph.create_node(
                "call_function",
                run_and_save_rng_state,
                (_callable(op), *op.args),
                dict(op.kwargs),
                name=f"{op.name}_and_state",
            )
        with self.graph.inserting_after(both):
            state = self.graph.create_node(
                "call_function", operator.getitem, (both, 0), name=f"{op.name}_rng_state"
            )
        with self.graph.inserting_after(state):
            out = self.graph.create_node("call_function", operator.getitem, (both, 1))
        out.meta = copy.copy(op.meta)
        state.meta = {"val": state_val}
        both.meta = {**op.meta, "val": (state_val, op.meta["val"]), FIRST_RUN_OF: op.name}
        for made in (both, state, out):
            tag_side(made, backward=False)
        self.rng_state[op] = state
        self.wrapped[op] = out
        return state

    def _what_is_saved(self) -> Rematerialized:
        backward = [
            n for n in self.graph.nodes if n.meta.get("partitioner_tag") == "must_be_in_backward"
        ]
        (output,) = self.graph.find_nodes(op="output")
        returned = [o for o in output.args[0][self.num_fwd_outputs :] if isinstance(o, fx.Node)]
        read = {arg for n in backward for arg in n.all_input_nodes} | set(returned)
        in_backward = set(backward) | set(self.facts.tangent_closure)
        read = set(_sizes_for_fractions(read))
        forward = [
            n for n in self.graph.nodes if n in read and n not in in_backward and n.op != "get_attr"
        ]
        symbolic = tuple(n for n in forward if is_symbolic(n))
        return Rematerialized(tuple(n for n in forward if not is_symbolic(n)), symbolic)


def _sizes_for_fractions(nodes: Iterable[fx.Node]) -> Iterator[fx.Node]:
    """Yield the nodes; in place of a fraction, which both halves may compute, the sizes that it is computed from.

    Inductor's cache has no key for a graph that takes a ``SymFloat``.
    """
    todo = list(nodes)
    seen = set(todo)
    for node in todo:
        made_from = (
            node.all_input_nodes
            if node.op == "call_function" and isinstance(node.meta.get("val"), torch.SymFloat)
            else []
        )
        if made_from and all(is_symbolic(arg) for arg in made_from):
            untag_side(node)
            todo.extend(arg for arg in made_from if arg not in seen)
            seen.update(made_from)
        else:
            yield node
