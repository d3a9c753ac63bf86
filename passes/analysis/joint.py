"""Facts: what a joint graph means for planning, as plain data.

Memory belongs to storages. An *op* is a node that fills new storages or has an effect; a node whose outputs all live in
storages of its inputs is a *view*, costs nothing, and is made again wherever it is needed. What remains is a
:class:`~fxckpt.solver.program.Program`.

Forward-computable is everything that does not depend on a tangent, not only what the forward outputs need: the op of such a value
may run in either half. Expects a normalized joint graph with ``meta["val"]``. Leaves the graph alone.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import fx
from torch.utils.checkpoint import CheckpointPolicy

from fxckpt.errors import CaptureError
from fxckpt.ops.properties import (
    has_hidden_effect,
    is_collective,
    is_known_pure,
    is_mutating,
    is_random,
    is_seed,
    only_computes,
    tensors,
)
from fxckpt.ops.registry import registered
from fxckpt.passes.analysis.byte_counts import (
    RNG_STATE_BYTES,
    RNG_STATE_BYTES_OTHER,
    _device_type,
    storage_bytes,
)
from fxckpt.passes.analysis.discrete_ops import discrete_results
from fxckpt.passes.analysis.placement import (
    accumulation_bytes,
    ancestors,
    backward_closure,
    graph_outputs,
    is_held_by_caller,
    tangents_of,
    written_storages,
)
from fxckpt.reason import Reason
from fxckpt.solver.program import FORWARD_ONLY, IN_BACKWARD, Op, Program, Side, Storage
from fxckpt.torch_private import (
    HigherOrderOperator,
    OpOverload,
    is_symbolic,
    storage_id,
    written_after,
)

PREFERENCE = 1e-3
"""How much dearer a second run is counted, within a budget, of what a policy would rather save (cheaper: rather run again): it settles ties."""

Workspace = Callable[[fx.Node], int]

NodePolicy = Callable[[fx.Node], "CheckpointPolicy | None"]


class Cost(Protocol):
    """What facts ask of a cost model."""

    @property
    def name(self) -> str:
        """Name for reports."""
        ...

    def seconds(self, node: fx.Node) -> float:
        """Seconds one run of ``node`` takes."""
        ...

    def flops(self, node: fx.Node) -> int:
        """FLOPs of one run of ``node``."""
        ...


@dataclass(frozen=True)
class Facts:
    """A program and the way back to the graph it was read from."""

    program: Program
    owner: dict[str, fx.Node]
    """Storage name to the node to save."""
    op_node: dict[str, fx.Node]
    """Op name to its node."""
    views: frozenset[fx.Node]
    tangent_closure: frozenset[fx.Node]
    """Nodes that belong to the backward."""
    never_stored: frozenset[fx.Node] = frozenset()
    """Of the views, those that are none, but are taken into the loops of those who read them."""

    def moved_to(self, graph: fx.Graph) -> Facts:
        """Return the same facts of a copy of the graph."""
        by_name = {node.name: node for node in graph.nodes}
        owner, op_node = (
            {key: by_name[n.name] for key, n in nodes.items()}
            for nodes in (self.owner, self.op_node)
        )
        views, closure, never = (
            frozenset(by_name[n.name] for n in nodes)
            for nodes in (self.views, self.tangent_closure, self.never_stored)
        )
        return Facts(self.program, owner, op_node, views, closure, never)


def no_workspace(node: fx.Node) -> int:
    """Plan as if no kernel allocated workspace."""
    return 0


class _Reader:
    """Reads one joint graph into ops and storages; used once by :func:`collect`."""

    def __init__(
        self,
        graph: fx.Graph,
        num_fwd_outputs: int,
        cost: Cost,
        policy: NodePolicy | None,
        workspace: Workspace,
        bind_preferences: bool,
        never_stored: frozenset[fx.Node],
    ) -> None:
        self.graph = graph
        self.cost = cost
        self.policy = policy
        self.workspace = workspace
        self.bind_preferences = bind_preferences
        self.never_stored = never_stored
        self.closure = backward_closure(graph)
        self.plain: dict[Any, bool] = {}
        """By target: :func:`only_computes`."""
        outputs = graph_outputs(graph)
        self.fwd_outputs = [o for o in outputs[:num_fwd_outputs] if isinstance(o, fx.Node)]
        self.gradients = outputs[num_fwd_outputs:]
        self.bwd_outputs = [o for o in self.gradients if isinstance(o, fx.Node)]
        effects = [
            n
            for n in graph.nodes
            if n.op == "call_function"
            and n not in self.closure
            and not self._is_plain(n)
            and (
                is_random(n)
                or is_mutating(n)
                or is_collective(n)
                or has_hidden_effect(n)
                or not is_known_pure(n)
            )
        ]
        self.required_forward = ancestors([*self.fwd_outputs, *effects])
        self.decisions = discrete_results(graph)
        self.requested: set[fx.Node] = set()
        """What a policy demands to run again."""
        self.mutated = set(written_storages(n for n in (*effects, *self.closure) if is_mutating(n)))
        self.mutated |= {
            storage_id(t) for n in written_after(graph) for t in tensors(n.meta.get("val"))
        }
        self.storages: list[Storage] = []
        self.tangents: list[int] = []
        self.holds: dict[fx.Node, tuple[int, ...]] = {}
        self.index: dict[int, int] = {}
        self.stands_for: dict[int, tuple[int, ...]] = {}
        """By storage that is never stored: what it is made from."""
        self.free: set[int] = set()
        self.views: set[fx.Node] = set()
        self.owner: dict[str, fx.Node] = {}
        self.op_node: dict[str, fx.Node] = {}
        self.ops: list[Op] = []
        self.backward: list[Op] = []

    def run(self) -> Facts:
        for node in self.graph.find_nodes(op="placeholder"):
            for tensor in tensors(node.meta.get("val")):
                if node in self.closure:
                    self._add_tangent(node, tensor)
                else:
                    self.free.add(storage_id(tensor))
            self.holds[node] = self._held(node.meta.get("val"))
        for node in self.graph.nodes:
            if node.op == "get_attr":
                self.holds[node] = ()
                self.free.update(storage_id(t) for t in tensors(node.meta.get("val")))
            elif node.op == "call_function":
                self._read(node)
            elif node.op == "output":
                self._finish()
            elif node.op != "placeholder":
                raise CaptureError(
                    f"node {node.name!r} is a {node.op}; a joint graph has only call_function nodes. "
                    "Trace the model with make_fx or AOTAutograd first."
                )
        for position in {i for o in self.fwd_outputs for i in self.holds[o]}:
            old = self.storages[position]
            self.storages[position] = replace(old, is_output=True, is_savable=True)
        program = Program(
            tuple(self.ops), tuple(self.backward), tuple(self.storages), tuple(self.tangents)
        )
        views = frozenset(self.views)
        return Facts(
            program,
            self.owner,
            self.op_node,
            views,
            frozenset(self.closure),
            self.never_stored & views,
        )

    def _finish(self) -> None:
        read = {i for op in self.backward for i in op.reads}
        # Compiled code lets go of an input when its last reader has run, and else when it returns.
        stays = {
            i
            for n in tangents_of(self.graph)
            for i in self.holds[n]
            if i not in read or is_held_by_caller(n)
        }
        reads = sorted(stays.union(*(self.holds[o] for o in self.bwd_outputs)))
        inputs = [n for n in self.graph.find_nodes(op="placeholder") if n not in self.closure]
        accumulated = accumulation_bytes(inputs, self.gradients)
        self.backward.append(
            Op("output", Side.BACKWARD, 0.0, 0, tuple(reads), (), workspace_bytes=accumulated)
        )

    def _add_tangent(self, node: fx.Node, tensor: torch.Tensor) -> None:
        if storage_id(tensor) not in self.index:
            self.index[storage_id(tensor)] = len(self.storages)
            self.tangents.append(len(self.storages))
            self.storages.append(Storage(node.name, storage_bytes(tensor), IN_BACKWARD))

    def _is_plain(self, node: fx.Node) -> bool:
        if node.target not in self.plain:
            self.plain[node.target] = only_computes(node)
        return self.plain[node.target]

    def _reads(self, node: fx.Node) -> tuple[int, ...]:
        return tuple(dict.fromkeys([i for arg in node.all_input_nodes for i in self.holds[arg]]))

    def _read(self, node: fx.Node) -> None:
        parent = node.args[0] if node.target is operator.getitem else None
        if isinstance(parent, fx.Node) and self.op_node.get(parent.name) is parent:
            self._read_getitem(node)
            return
        value = node.meta.get("val")
        if value is None and not isinstance(node.target, (OpOverload, HigherOrderOperator)):
            value = ()
        ids = [storage_id(t) for t in tensors(value)]
        makes = any(
            i not in self.free and i not in self.index and i not in self.stands_for for i in ids
        )
        if is_symbolic(node):
            self.holds[node] = ()
            if node not in self.closure:
                self.views.add(node)
            return
        if (
            ids
            and not makes
            and (
                self._is_plain(node)
                or not (is_mutating(node) or not is_known_pure(node) or is_random(node))
            )
        ):
            self.views.add(node)
            self.holds[node] = self._held(value)
            return
        if node in self.never_stored and (node in self.closure or self._placement(node)[0] is None):
            self.views.add(node)
            self.holds[node] = self._reads(node)
            self.stands_for.update((i, self.holds[node]) for i in ids)
            return
        self._add_op(node, value, self._reads(node))

    def _held(self, value: Any) -> tuple[int, ...]:
        found: dict[int, None] = {}
        for i in (storage_id(t) for t in tensors(value)):
            found.update(
                dict.fromkeys((self.index[i],) if i in self.index else self.stands_for.get(i, ()))
            )
        return tuple(found)

    def _read_getitem(self, node: fx.Node) -> None:
        self.holds[node] = self._held(node.meta.get("val"))
        for i in self.holds[node]:
            storage = self.storages[i]
            parent = node.args[0]
            assert isinstance(parent, fx.Node)
            if storage.name.startswith(f"{parent.name}#"):
                self.storages[i] = replace(storage, name=node.name)
                self.owner[node.name] = node

    def _add_op(self, node: fx.Node, value: Any, reads: tuple[int, ...]) -> None:
        in_backward = node in self.closure
        side = (
            Side.BACKWARD
            if in_backward
            else (Side.FORWARD if node in self.required_forward else Side.EITHER)
        )
        producer = IN_BACKWARD if in_backward else len(self.ops)
        no_recompute, savable = (None, True) if in_backward else self._placement(node)
        is_tuple = not isinstance(value, torch.Tensor)
        writes = []
        for position, tensor in enumerate(tensors(value)):
            sid = storage_id(tensor)
            if sid in self.free or sid in self.index:
                continue
            name = f"{node.name}#{position}" if is_tuple else node.name
            self.index[sid] = len(self.storages)
            writes.append(len(self.storages))
            self.storages.append(Storage(name, storage_bytes(tensor), producer, False, savable))
            if not is_tuple:
                self.owner[name] = node
        self.holds[node] = self._held(value)
        state = None
        if not in_backward and is_random(node) and no_recompute is None:
            nbytes = RNG_STATE_BYTES.get(_device_type(node), RNG_STATE_BYTES_OTHER)
            if node not in self.requested and sum(self.storages[i].bytes for i in writes) <= nbytes:
                for i in writes:
                    self.storages[i] = replace(self.storages[i], is_savable=True)
                no_recompute = Reason.SMALLER_THAN_STATE
            else:
                state = len(self.storages)
                self.storages.append(Storage(f"{node.name}.rng_state", nbytes, FORWARD_ONLY))
        seconds = self.cost.seconds(node) * (1.0 if in_backward else self._tilt(node))
        op = Op(
            node.name,
            side,
            seconds,
            self.cost.flops(node),
            reads,
            tuple(writes),
            no_recompute,
            state,
            self.workspace(node),
        )
        self.op_node[node.name] = node
        (self.backward if in_backward else self.ops).append(op)

    def _placement(self, node: fx.Node) -> tuple[Reason | None, bool]:
        """Return (why it may not run again, whether its value may be saved).

        What must not run twice comes first; then the user's policy, the model's own checkpoint regions, and last what only prefers.
        """
        decided = self.policy(node) if self.policy is not None else None
        must_run = decided is CheckpointPolicy.MUST_RECOMPUTE or self._awaits_requested(node)
        reason = self._never_twice(node) or (None if must_run else self._not_unasked(node, decided))
        if reason is not None:
            return reason, True
        if must_run:
            self.requested.add(node)
            return None, False
        if decided is CheckpointPolicy.PREFER_RECOMPUTE:
            return None, not self.bind_preferences
        if decided is CheckpointPolicy.PREFER_SAVE:
            return None, True
        return None, self._is_savable_in_region(node)

    def _tilt(self, node: fx.Node) -> float:
        """Return what a policy's preference makes of an op's time."""
        decided = (
            self.policy(node) if self.policy is not None and not self.bind_preferences else None
        )
        sign = (
            {CheckpointPolicy.PREFER_SAVE: 1, CheckpointPolicy.PREFER_RECOMPUTE: -1}.get(decided, 0)
            if decided is not None
            else 0
        )
        return 1.0 + sign * PREFERENCE

    def _never_twice(self, node: fx.Node) -> Reason | None:
        """Return why a second run would be wrong."""
        if not self._is_plain(node) and (
            is_mutating(node)
            or has_hidden_effect(node)
            or not (is_known_pure(node) or is_collective(node))
        ):
            return Reason.EFFECT
        if is_seed(node) or (is_random(node) and node.kwargs.get("generator") is not None):
            return Reason.RANDOM_WITHOUT_STATE
        if self.mutated and any(
            storage_id(t) in self.mutated
            for a in node.all_input_nodes
            for t in tensors(a.meta.get("val"))
        ):
            return Reason.MUTATED_INPUT
        return None

    def _not_unasked(self, node: fx.Node, decided: CheckpointPolicy | None) -> Reason | None:
        """Return why an op is run again only where a policy demands it."""
        if is_collective(node):
            return Reason.COLLECTIVE
        if decided is CheckpointPolicy.MUST_SAVE:
            return Reason.POLICY
        if registered(node.target).recompute is False:
            return Reason.REGISTERED
        tag = node.meta.get("recompute") if decided is None else None
        if tag is CheckpointPolicy.MUST_SAVE:
            return Reason.REGION
        return (
            Reason.DECISION
            if node in self.decisions and tag is not CheckpointPolicy.MUST_RECOMPUTE
            else None
        )

    def _awaits_requested(self, node: fx.Node) -> bool:
        """Return whether a collective belongs to one that is to run again: the wait is run again with what it waits for."""
        return is_collective(node) and any(arg in self.requested for arg in node.all_input_nodes)

    def _is_savable_in_region(self, node: fx.Node) -> bool:
        tag = node.meta.get("recompute")
        if tag not in (CheckpointPolicy.MUST_RECOMPUTE, CheckpointPolicy.PREFER_RECOMPUTE):
            # What only the backward asks for would be saved in place of what the region gives up.
            return node in self.required_forward or all(
                self.storages[i].is_savable for i in self._reads(node)
            )
        region = node.meta.get("ac_graph_id")
        leaves = any(
            u in self.required_forward and u.meta.get("ac_graph_id") != region
            for u in _through_views(node)
        )
        binds = tag is CheckpointPolicy.MUST_RECOMPUTE or self.bind_preferences
        return leaves or not binds


def _through_views(node: fx.Node) -> Iterator[fx.Node]:
    """Yield what reads a value, be it through views."""
    held = {storage_id(t) for t in tensors(node.meta.get("val"))}
    for user in node.users:
        if user.op == "call_function" and any(
            storage_id(t) in held for t in tensors(user.meta.get("val"))
        ):
            yield from _through_views(user)
        else:
            yield user


def collect(
    joint: fx.GraphModule,
    *,
    num_fwd_outputs: int,
    cost: Cost,
    policy: NodePolicy | None = None,
    workspace: Workspace = no_workspace,
    bind_preferences: bool = False,
    never_stored: frozenset[fx.Node] = frozenset(),
) -> Facts:
    """Read a joint graph into a :class:`Program`.

    ``num_fwd_outputs`` leading outputs of the graph belong to the forward. Raises :class:`CaptureError` for a node without value
    metadata or of a kind that joint graphs do not have. ``workspace`` tells the workspace of a node's kernel. With ``bind_preferences`` what a
    checkpoint region would rather recompute may not be saved. What is ``never_stored`` (:mod:`~fxckpt.passes.inductor.fusion_model`) is treated as a view of
    what it reads.
    """
    for node in joint.graph.nodes:
        if (
            node.op == "call_function"
            and isinstance(node.target, OpOverload)
            and "val" not in node.meta
        ):
            if any(str(r.type).startswith(("Tensor", "List")) for r in node.target._schema.returns):
                raise CaptureError(
                    f"node {node.name!r} ({node.target}) has no meta['val']: its shape is unknown. "
                    "Trace under FakeTensorMode, or run FakeTensorProp on the graph first."
                )
    return _Reader(
        joint.graph, num_fwd_outputs, cost, policy, workspace, bind_preferences, never_stored
    ).run()
