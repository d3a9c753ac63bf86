"""Facts of a joint graph: its program, as plain data for planning, and the nodes of its ops.

Memory belongs to storages. An *op* is a node that fills new storages or has an effect. A node whose
outputs all live in storages of its inputs is a *view*: it costs nothing, and every reader in the
backward gets its own copy. The rest is a :class:`~fxckpt.solver.program.Program`.

Every op that depends on no tangent may run in either half, whether or not the forward outputs need
it.

Expects a normalized joint graph with ``meta["val"]``. Leaves the graph alone.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import fx

from fxckpt.costs.models import CostModel
from fxckpt.errors import CaptureError
from fxckpt.ops.properties import is_known_pure, is_mutating, is_random, tensors
from fxckpt.passes.analysis.byte_counts import rng_state_bytes
from fxckpt.passes.analysis.placement import (
    JointPlacement,
    accumulation_bytes,
    is_held_by_caller,
    tangents_of,
)
from fxckpt.passes.analysis.recompute_rules import NodePolicy, RecomputeRules
from fxckpt.passes.analysis.storage_table import StorageTable, Writable
from fxckpt.reason import Reason
from fxckpt.solver.program import IN_BACKWARD, Op, Program, Side
from fxckpt.torch_private import HigherOrderOperator, OpOverload, is_symbolic, storage_id

Workspace = Callable[[fx.Node], int]
"""Bytes that the kernel of a node allocates and frees before it returns."""


@dataclass(frozen=True)
class Facts:
    """A program and its nodes in the graph it was read from."""

    program: Program
    owner: dict[str, fx.Node]
    """Nodes to save, by the name of their storage."""
    op_node: dict[str, fx.Node]
    """Nodes of the ops, by their name."""
    views: frozenset[fx.Node]
    """Views, sizes of the forward, and values that are never stored."""
    tangent_closure: frozenset[fx.Node]
    """Nodes that must run in the backward."""
    never_stored: frozenset[fx.Node] = frozenset()
    """Members of ``views`` that compute, but are inlined into their readers."""
    in_place: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    """Positions of the arguments that an op may write its result into, by the op's name."""

    def moved_to(self, graph: fx.Graph) -> Facts:
        """Return the facts of a copy of the graph."""
        by_name = {node.name: node for node in graph.nodes}
        owner, op_node = (
            {key: by_name[n.name] for key, n in nodes.items()}
            for nodes in (self.owner, self.op_node)
        )
        views, closure, never = (
            frozenset(by_name[n.name] for n in nodes)
            for nodes in (self.views, self.tangent_closure, self.never_stored)
        )
        return replace(
            self,
            owner=owner,
            op_node=op_node,
            views=views,
            tangent_closure=closure,
            never_stored=never,
        )


def no_workspace(node: fx.Node) -> int:
    """Return 0, for plans that ignore workspace."""
    return 0


class _ProgramReader:
    """Reads the nodes of one joint graph in order, each a view or an op."""

    def __init__(
        self,
        graph: fx.Graph,
        placement: JointPlacement,
        rules: RecomputeRules,
        cost: CostModel,
        workspace: Workspace,
        never_stored: frozenset[fx.Node],
        writable: Writable,
    ) -> None:
        self.graph = graph
        self.placement = placement
        self.rules = rules
        self.cost = cost
        self.workspace = workspace
        self.never_stored = never_stored
        self.writable = writable
        self.in_place: dict[str, tuple[int, ...]] = {}
        self.table = StorageTable()
        self.views: set[fx.Node] = set()
        self.op_node: dict[str, fx.Node] = {}
        self.ops: list[Op] = []
        self.backward: list[Op] = []

    def run(self) -> Facts:
        """Return the facts."""
        for node in self.graph.find_nodes(op="placeholder"):
            if node in self.placement.closure:
                self.table.add_tangent(node)
            else:
                self.table.add_input(node)
        for node in self.graph.nodes:
            if node.op == "get_attr":
                self.table.add_constant(node)
            elif node.op == "call_function":
                self._read(node)
            elif node.op == "output":
                self._read_output()
            elif node.op != "placeholder":
                raise CaptureError(
                    f"node {node.name!r} is a {node.op}; a joint graph has only call_function "
                    "nodes. Trace the model with make_fx or AOTAutograd first."
                )
        for node in self.placement.fwd_outputs:
            self.table.mark_output(node)
        table = self.table
        ops = tuple(self._apart_if_output(op) for op in self.ops)
        program = Program(ops, tuple(self.backward), tuple(table.storages), tuple(table.tangents))
        views = frozenset(self.views)
        return Facts(
            program=program,
            owner=table.owner,
            op_node=self.op_node,
            views=views,
            tangent_closure=frozenset(self.placement.closure),
            never_stored=self.never_stored & views,
            in_place=self.in_place,
        )

    def _takes(self, node: fx.Node, writes: tuple[int, ...]) -> tuple[int, ...]:
        """Return the storages that the result of an op may be written into, and note which."""
        found: dict[int, int] = {}
        for position in self.writable.operands(node) if len(writes) == 1 else ():
            operand = node.args[position]
            assert isinstance(operand, fx.Node)
            held = self.table.holds[operand]
            if len(held) == 1 and self.table.bytes_of(held) == self.table.bytes_of(writes):
                found.setdefault(held[0], position)
        if found:
            self.in_place[node.name] = tuple(found.values())
        return tuple(found)

    def _apart_if_output(self, op: Op) -> Op:
        """Return an op that writes no output in place: the user must not be given a view."""
        if op.takes and any(self.table.storages[s].is_output for s in op.writes):
            del self.in_place[op.name]
            return replace(op, takes=())
        return op

    def _read(self, node: fx.Node) -> None:
        """Read a ``call_function`` node."""
        parent = node.args[0] if node.target is operator.getitem else None
        if isinstance(parent, fx.Node) and self.op_node.get(parent.name) is parent:
            self.table.add_item(node, parent)
            return
        value = node.meta.get("val")
        if value is None and not isinstance(node.target, (OpOverload, HigherOrderOperator)):
            value = ()
        if is_symbolic(node):
            self.table.holds[node] = ()
            if node not in self.placement.closure:
                self.views.add(node)
        elif self._is_view(node, value):
            self.views.add(node)
            self.table.alias(node, value)
        elif self._is_inlined(node):
            self.views.add(node)
            self.table.inline(node, value)
        elif node in self.placement.closure:
            self._read_backward_op(node, value)
        else:
            self._read_forward_op(node, value)

    def _is_view(self, node: fx.Node, value: Any) -> bool:
        """Return whether a node computes nothing and has no storage of its own."""
        ids = [storage_id(t) for t in tensors(value)]
        if not ids or any(self.table.is_new(i) for i in ids):
            return False
        return self.placement.pure_targets.only_computes(node) or not (
            is_mutating(node) or not is_known_pure(node) or is_random(node)
        )

    def _is_inlined(self, node: fx.Node) -> bool:
        """Return whether a node is never stored; one that may not be recomputed is."""
        return node in self.never_stored and (
            node in self.placement.closure or self._rule_for(node)[0] is None
        )

    def _rule_for(self, node: fx.Node) -> tuple[Reason | None, bool]:
        storages = self.table.storages
        return self.rules.rule_for(
            node, reads_are_savable=all(storages[i].is_savable for i in self.table.reads(node))
        )

    def _read_backward_op(self, node: fx.Node, value: Any) -> None:
        """Add an op of the backward, and the storages that it fills."""
        reads = self.table.reads(node)
        writes = self.table.fill(
            node,
            value,
            producer=IN_BACKWARD,
            is_tuple=not isinstance(value, torch.Tensor),
            is_savable=True,
        )
        self.op_node[node.name] = node
        self.backward.append(
            Op(
                node.name,
                Side.BACKWARD,
                self.cost.seconds(node),
                self.cost.flops(node),
                reads,
                writes,
                workspace_bytes=self.workspace(node),
                takes=self._takes(node, writes),
            )
        )

    def _read_forward_op(self, node: fx.Node, value: Any) -> None:
        """Add an op of the forward, its storages and, if it is random, its generator state."""
        reads = self.table.reads(node)
        no_recompute, is_savable = self._rule_for(node)
        writes = self.table.fill(
            node,
            value,
            producer=len(self.ops),
            is_tuple=not isinstance(value, torch.Tensor),
            is_savable=is_savable,
        )
        rng_state = None
        if is_random(node) and no_recompute is None:
            nbytes = rng_state_bytes(node)
            if node not in self.rules.requested and self.table.bytes_of(writes) <= nbytes:
                self.table.allow_saving(writes)
                no_recompute = Reason.SMALLER_THAN_STATE
            else:
                rng_state = self.table.add_rng_state(node, nbytes)
        is_required = node in self.placement.required_forward
        self.op_node[node.name] = node
        self.ops.append(
            Op(
                node.name,
                Side.FORWARD if is_required else Side.EITHER,
                self.cost.seconds(node) * self.rules.time_factor(node),
                self.cost.flops(node),
                reads,
                writes,
                no_recompute,
                rng_state,
                self.workspace(node),
                self._takes(node, writes),
            )
        )

    def _read_output(self) -> None:
        """Add the return of the backward, an op that reads all storages that live to the end."""
        read = {i for op in self.backward for i in op.reads}
        # Compiled code frees an input after its last reader, and an unread one when it returns.
        stays = {
            i
            for n in tangents_of(self.graph)
            for i in self.table.holds[n]
            if i not in read or is_held_by_caller(n)
        }
        gradients = self.placement.gradients
        returned = (self.table.holds[g] for g in gradients if isinstance(g, fx.Node))
        reads = tuple(sorted(stays.union(*returned)))
        placeholders = self.graph.find_nodes(op="placeholder")
        inputs = [n for n in placeholders if n not in self.placement.closure]
        accumulated = accumulation_bytes(inputs, gradients)
        self.backward.append(
            Op("output", Side.BACKWARD, 0.0, 0, reads, (), workspace_bytes=accumulated)
        )


def read_facts(
    joint: fx.GraphModule,
    *,
    num_fwd_outputs: int,
    cost: CostModel,
    policy: NodePolicy | None = None,
    workspace: Workspace = no_workspace,
    bind_preferences: bool = False,
    never_stored: frozenset[fx.Node] = frozenset(),
    is_agreed: bool = False,
    in_place: bool = False,
) -> Facts:
    """Return the facts of a joint graph whose first ``num_fwd_outputs`` outputs are the forward's.

    ``workspace`` gives the bytes that the kernel of a node allocates beside its outputs. With
    ``bind_preferences``, values that a policy or a checkpoint region would rather recompute may not
    be saved. With ``is_agreed`` all ranks have one plan. A node of ``never_stored``
    (:mod:`~fxckpt.passes.inductor.fusion_model`) counts as a view of its arguments. With
    ``in_place``, ops may write their results into operands that die.

    Raises :class:`~fxckpt.errors.CaptureError` for a node without value metadata, or of a kind that
    joint graphs do not have.
    """
    _refuse_unknown_shapes(joint.graph)
    placement = JointPlacement.of(joint.graph, num_fwd_outputs)
    rules = RecomputeRules(
        joint.graph, placement, policy, bind_preferences=bind_preferences, is_agreed=is_agreed
    )
    writable = Writable.of(joint.graph, placement.mutated) if in_place else Writable()
    return _ProgramReader(
        joint.graph, placement, rules, cost, workspace, never_stored, writable
    ).run()


def _refuse_unknown_shapes(graph: fx.Graph) -> None:
    """Raise :class:`CaptureError` for an op that returns tensors and has no ``meta["val"]``."""
    for node in graph.nodes:
        is_op = node.op == "call_function" and isinstance(node.target, OpOverload)
        if not is_op or "val" in node.meta:
            continue
        if any(str(r.type).startswith(("Tensor", "List")) for r in node.target._schema.returns):
            raise CaptureError(
                f"node {node.name!r} ({node.target}) has no meta['val']: its shape is unknown. "
                "Trace under FakeTensorMode, or run FakeTensorProp on the graph first."
            )
