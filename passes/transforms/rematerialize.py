"""Rematerialize: make a plan explicit in the joint graph.

Every recompute of the plan becomes a copy of the forward node, bound to the backward and placed in
front of the backward node that the plan names, and the backward reads copies in place of forward
values. A value may have many copies. A view is copied for each copy of its base. A recomputed
random op also returns its generator state in the forward (``run_and_save_rng_state``), and the
backward runs it under that state (``run_with_rng_state``), which restores the generator. The
forward draws the numbers that eager would.

Expects the graph the facts were read from. Leaves a joint graph in which every node is bound to its
half, so that splitting is trivial.
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
from fxckpt.ops.recompute_forms import recompute_form
from fxckpt.passes.analysis.joint import Facts
from fxckpt.passes.meta import FIRST_RUN_OF, IS_RECOMPUTE, NEVER_STORED, RECOMPUTE_OF
from fxckpt.plans.types import Plan, Recompute
from fxckpt.torch_private import (
    fake_rng_state,
    is_pinned_to_backward,
    is_symbolic,
    run_and_save_rng_state,
    run_with_rng_state,
    tag_side,
    untag_side,
)


@dataclass(frozen=True)
class Rematerialized:
    """The forward nodes the backward reads: tensors in joint order, then sizes and scalars."""

    saved: tuple[fx.Node, ...]
    symbolic: tuple[fx.Node, ...]


def rematerialize(
    joint: fx.GraphModule, facts: Facts, plan: Plan, *, num_fwd_outputs: int
) -> Rematerialized:
    """Apply ``plan`` to ``joint`` in place, and return the values that the forward must save."""
    return _Rewriter(joint.graph, facts, plan.schedule, num_fwd_outputs).run()


def inlined_values(graph: fx.Graph, facts: Facts) -> frozenset[fx.Node]:
    """Return the backward's own values that are never stored, and the views of these.

    Each is moved in front of each of its readers: where it stands, its operands may not be
    recomputed yet.
    """
    found: set[fx.Node] = set()
    for node in graph.nodes if facts.never_stored else ():
        if node in facts.tangent_closure and node in facts.views:
            if node in facts.never_stored or not found.isdisjoint(node.all_input_nodes):
                found.add(node)
    return frozenset(found)


class _Rewriter:
    """Rewrite of one joint graph by one schedule."""

    def __init__(
        self, graph: fx.Graph, facts: Facts, schedule: Sequence[Recompute], num_fwd_outputs: int
    ) -> None:
        self.graph = graph
        self.facts = facts
        self.num_fwd_outputs = num_fwd_outputs
        self.recomputes: dict[str, list[fx.Node]] = defaultdict(list)
        """Ops to recompute, by the name of the backward node that they precede."""
        for recompute in schedule:
            self.recomputes[recompute.before].append(facts.op_node[recompute.name])
        self.latest: dict[fx.Node, fx.Node] = {}
        """Latest copies of recomputed ops and of the items of their tuples."""
        self.view_copies: dict[tuple[fx.Node, tuple[fx.Node, ...]], fx.Node] = {}
        """Copies of views, by the view and the arguments of the copy."""
        outputs = (s for s in facts.program.storages if s.is_output and s.producer >= 0)
        self.outputs = {facts.owner[s.name] for s in outputs}
        """Values that the user holds, which the backward reads where the forward left them."""
        self.rng_states = _RngStates(graph)
        self.inlined = inlined_values(graph, facts)

    def run(self) -> Rematerialized:
        """Rewrite the graph, and return the values to save."""
        original = list(self.graph.nodes)
        for node in original:
            if node.op == "call_function" and node not in self.facts.tangent_closure:
                tag_side(node, backward=False)
        for node in original:
            if node.op == "output":
                self._rewrite_output(node)
            elif node.op == "call_function" and self._stays_in_backward(node):
                self._rewrite(node)
                tag_side(node, backward=True)
        for node in reversed(original):
            if node in self.inlined:
                self.graph.erase_node(node)
        self.rng_states.replace_ops()
        self.graph.lint()
        return self._saved_values()

    def _rewrite(self, node: fx.Node) -> None:
        for op in self.recomputes.get(node.name, ()):
            self._recompute(op, node)
        node.args = fx.map_arg(node.args, lambda arg: self._in_backward(arg, node))
        node.kwargs = fx.map_arg(node.kwargs, lambda arg: self._in_backward(arg, node))

    def _rewrite_output(self, node: fx.Node) -> None:
        for op in self.recomputes.get("output", ()):
            self._recompute(op, node)
        (outputs,) = node.args
        assert isinstance(outputs, (tuple, list))
        gradients = [
            self._in_backward(o, node) if isinstance(o, fx.Node) else o
            for o in outputs[self.num_fwd_outputs :]
        ]
        node.args = ((*outputs[: self.num_fwd_outputs], *gradients),)

    def _stays_in_backward(self, node: fx.Node) -> bool:
        """Return whether a node belongs to the backward and keeps its place."""
        return node in self.facts.tangent_closure and node not in self.inlined

    def _in_backward(self, node: fx.Node, consumer: fx.Node) -> fx.Node:
        """Return the node that the backward reads in place of ``node``; views are copied."""
        if self._stays_in_backward(node) or node.op != "call_function" or is_symbolic(node):
            return node
        if node in self.latest:
            return self.latest[node]
        if node in self.facts.views:
            return self._copy_view(node, consumer)
        return node

    def _copy_view(self, node: fx.Node, consumer: fx.Node) -> fx.Node:
        """Copy a view, and the views it reads, in front of ``consumer``."""
        stack = [node]
        while True:
            view = stack[-1]
            pending = [arg for arg in view.all_input_nodes if self._present(arg) is None]
            if pending:
                stack.extend(pending)
                continue
            if self._present(view) is None:
                arguments = tuple(self._resolve(arg) for arg in view.all_input_nodes)
                self.view_copies[view, arguments] = self._copy(view, consumer)
            stack.pop()
            if not stack:
                return self._resolve(node)

    def _present(self, node: fx.Node) -> fx.Node | None:
        """Return the node that the backward reads for ``node`` at this point.

        That is its latest copy, or a view of the latest copies of its arguments; None if there is
        no such view yet.
        """
        if node in self.latest:
            return self.latest[node]
        if node not in self.facts.views or is_symbolic(node) or self._stays_in_backward(node):
            return node
        arguments = tuple(self._present(arg) for arg in node.all_input_nodes)
        known = tuple(arg for arg in arguments if arg is not None)
        return self.view_copies.get((node, known)) if known == arguments else None

    def _resolve(self, node: fx.Node) -> fx.Node:
        found = self._present(node)
        assert found is not None, f"view {node.name} has no copy"
        return found

    def _copy(self, node: fx.Node, consumer: fx.Node) -> fx.Node:
        """Copy a node in front of ``consumer``."""
        is_inlined = node in self.inlined
        form = recompute_form(node)
        with self.graph.inserting_before(consumer):
            copied = self.graph.create_node(
                node.op,
                node.target if form is None else form.target,
                fx.map_arg(node.args if form is None else form.args, self._resolve),
                fx.map_arg(node.kwargs, self._resolve),
                name=node.name if is_inlined else f"{node.name}_recompute",
            )
        if is_inlined:
            copied.meta = copy.copy(node.meta)
            tag_side(copied, backward=True)
        else:
            _mark_copy(copied, node)
        if form is not None:
            copied.meta["val"] = node.meta["val"][: form.results]
        if node in self.facts.never_stored:
            copied.meta[NEVER_STORED] = True
        return copied

    def _recompute(self, op: fx.Node, consumer: fx.Node) -> None:
        """Recompute an op, and the items of its tuple, in front of ``consumer``."""
        for arg in op.all_input_nodes:
            if arg in self.facts.views and not is_symbolic(arg):
                self._copy_view(arg, consumer)
        copy_op = self._copy_random if is_random(op) else self._copy
        copied = self.latest[op] = copy_op(op, consumer)
        copied.meta[IS_RECOMPUTE] = True
        items = [u for u in op.users if u.target is operator.getitem and u not in self.facts.views]
        if (form := recompute_form(op)) is not None:
            items = [item for item in items if item in form.items(op)]
        for item in (i for i in items if i not in self.outputs):
            with self.graph.inserting_before(consumer):
                self.latest[item] = self.graph.create_node(
                    "call_function",
                    operator.getitem,
                    (copied, item.args[1]),
                    name=f"{item.name}_recompute",
                )
            _mark_copy(self.latest[item], item)

    def _copy_random(self, op: fx.Node, consumer: fx.Node) -> fx.Node:
        """Copy a random op in front of ``consumer``, under the generator state of its first run."""
        state = self.rng_states.state_before(op)
        with self.graph.inserting_before(consumer):
            copied = self.graph.create_node(
                "call_function",
                run_with_rng_state,
                (state, _target(op), *fx.map_arg(op.args, self._resolve)),
                fx.map_arg(op.kwargs, self._resolve),
                name=f"{op.name}_recompute",
            )
        _mark_copy(copied, op)
        return copied

    def _saved_values(self) -> Rematerialized:
        """Return the forward nodes that the rewritten backward reads."""
        backward = [n for n in self.graph.nodes if is_pinned_to_backward(n)]
        (output,) = self.graph.find_nodes(op="output")
        returned = [o for o in output.args[0][self.num_fwd_outputs :] if isinstance(o, fx.Node)]
        in_backward = set(backward) | set(self.facts.tangent_closure)
        read = {arg for n in backward for arg in n.all_input_nodes} | set(returned)
        read = set(_sizes_for_fractions(read))
        forward = [
            n for n in self.graph.nodes if n in read and n not in in_backward and n.op != "get_attr"
        ]
        symbolic = tuple(n for n in forward if is_symbolic(n))
        return Rematerialized(tuple(n for n in forward if not is_symbolic(n)), symbolic)


class _RngStates:
    """Generator states that random ops of the forward return, so that they can be recomputed."""

    def __init__(self, graph: fx.Graph) -> None:
        self.graph = graph
        self._state: dict[fx.Node, fx.Node] = {}
        self._result: dict[fx.Node, fx.Node] = {}
        """Results of the calls that replace random ops."""

    def state_before(self, op: fx.Node) -> fx.Node:
        """Return the node of the generator state from before ``op`` ran in the forward."""
        if op in self._state:
            return self._state[op]
        state_val = fake_rng_state(next(tensors(op.meta["val"])))
        with self.graph.inserting_after(op):
            both = self.graph.create_node(
                "call_function",
                run_and_save_rng_state,
                (_target(op), *op.args),
                dict(op.kwargs),
                name=f"{op.name}_and_state",
            )
        with self.graph.inserting_after(both):
            state = self.graph.create_node(
                "call_function", operator.getitem, (both, 0), name=f"{op.name}_rng_state"
            )
        with self.graph.inserting_after(state):
            result = self.graph.create_node("call_function", operator.getitem, (both, 1))
        result.meta = copy.copy(op.meta)
        state.meta = {"val": state_val}
        both.meta = {**op.meta, "val": (state_val, op.meta["val"]), FIRST_RUN_OF: op.name}
        for node in (both, state, result):
            tag_side(node, backward=False)
        self._state[op] = state
        self._result[op] = result
        return state

    def replace_ops(self) -> None:
        """Replace the random ops by the calls that also return the state, under their names."""
        for op, result in self._result.items():
            op.replace_all_uses_with(result)
            name = op.name
            self.graph.erase_node(op)
            result.name = name


def _target(op: fx.Node) -> Any:
    """Return the target of an op as an argument of a higher-order op, a value like any other."""
    return op.target


def _mark_copy(copied: fx.Node, node: fx.Node) -> None:
    """Give a copy the metadata of its original, and bind it to the backward."""
    copied.meta = copy.copy(node.meta)
    copied.meta[RECOMPUTE_OF] = node.name
    # print_readable() shows this key.
    copied.meta["custom"] = {**node.meta.get("custom", {}), "recompute_of": node.name}
    tag_side(copied, backward=True)


def _sizes_for_fractions(nodes: Iterable[fx.Node]) -> Iterator[fx.Node]:
    """Yield the nodes, with a ``SymFloat`` replaced by the sizes that it is computed from.

    Both halves compute it, because Inductor's cache has no key for a graph that takes one.
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
