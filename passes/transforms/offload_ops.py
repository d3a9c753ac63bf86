"""Offload ops: send saved values away in the forward, and fetch them in the backward.

A value is sent right after the op that computes it. Its last reader is the op ``sent``, placed
where the plan lets go of its memory; the forward saves the copy in its place. The backward fetches
the copy where the plan takes memory for it, and waits for it right before the first reader. Views
of the value are made of the fetched one.

Expects a rematerialized joint graph. Leaves one whose backward nodes follow all others.
:func:`movable_storages` says which values can be sent.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor, fx

from fxckpt.errors import OffloadMismatch, VerifyError
from fxckpt.passes.analysis.joint import Facts
from fxckpt.passes.meta import AWAY, CHECKSUM_OF, FIRST_RUN_OF, IS_RECOMPUTE, LAST_READER, VIEW_OF
from fxckpt.passes.transforms.recompute_checks import checksum
from fxckpt.passes.transforms.rematerialize import Rematerialized
from fxckpt.plans.types import Offload, Plan
from fxckpt.solver.program import Program
from fxckpt.solver.schedule import forward_ops
from fxckpt.tiers.ops import fetch, fetched, send, sent
from fxckpt.torch_private import (
    FakeTensor,
    fake_like,
    fake_twin,
    is_pinned_to_backward,
    storage_id,
    tag_side,
)


def movable_storages(facts: Facts, device: torch.device) -> frozenset[int]:
    """Return the storages that may be sent away from a device.

    They are written by an op of the forward, are owned by a node with one plain strided tensor,
    and are no forward outputs, which the user holds in any case.
    """
    return frozenset(
        i
        for i, storage in enumerate(facts.program.storages)
        if storage.producer >= 0
        and storage.is_savable
        and not storage.is_output
        and storage.bytes > 0
        and (owner := facts.owner.get(storage.name)) is not None
        and _is_plain(owner.meta.get("val"), device)
    )


def _is_plain(value: object, device: torch.device) -> bool:
    return (
        isinstance(value, torch.Tensor)
        and type(value) in (torch.Tensor, FakeTensor)
        and value.layout is torch.strided
        and value.device == device
        and not value.is_quantized
    )


def insert_offload_ops(
    joint: fx.GraphModule,
    result: Rematerialized,
    facts: Facts,
    plan: Plan,
    tier: int,
    *,
    exact: bool = False,
) -> Rematerialized:
    """Send values of ``joint`` away in place, as the plan says; return the values to save now.

    With ``exact``, the forward saves a checksum of each value that it sends, and what comes back is
    compared with it.
    """
    if not plan.offloads:
        return result
    rewriter = _OffloadRewriter(joint.graph, result, facts, plan, tier)
    saved, checksums = {}, []
    for offload in rewriter.ordered(plan):
        value = rewriter.node_of(offload)
        saved[value], back = rewriter.send_and_fetch(value, offload)
        if exact:
            checksums.append(rewriter.check(value, back))
    joint.graph.lint()
    return replace(result, saved=(*(saved.get(n, n) for n in result.saved), *checksums))


def arrived(value: Tensor, expected: Tensor, name: str) -> Tensor:
    """Return a value that came back if its checksum is ``expected``.

    Raises :class:`~fxckpt.errors.OffloadMismatch` if it differs; ``name`` is the value's.
    """
    if not torch.equal(checksum(value), expected):
        raise OffloadMismatch(
            f"{name!r} came back from where it was sent with other bits: the gradients would be "
            "wrong. Its storage was written to after it was computed, or the memory or the disk "
            "that it was on is faulty. Leave it on the device: a policy that has it recomputed, or "
            "no offload=."
        )
    return value


class _OffloadRewriter:
    """Rewrite of one joint graph."""

    def __init__(
        self, graph: fx.Graph, result: Rematerialized, facts: Facts, plan: Plan, tier: int
    ) -> None:
        self.graph = graph
        self.tier = tier
        self.forward_ops = plan.forward_ops
        (self.output,) = graph.find_nodes(op="output")
        for node in [n for n in graph.nodes if is_pinned_to_backward(n)]:
            self.output.prepend(node)
        self.saved: dict[str, fx.Node] = {}
        for node in result.saved:
            self.saved.setdefault(str(node.meta.get(CHECKSUM_OF, node.name)), node)
        self.storages = [storage_id(n.meta["val"]) for n in self.saved.values() if _is_tensor(n)]
        self.positions = self._positions(facts.program, plan)
        """The node at each position of the plan's profile; after the forward, the first of the
        backward."""
        if len(self.positions) != len(plan.profile):
            raise VerifyError(
                f"the plan is of {len(plan.profile)} ops, the graph of {len(self.positions)}"
            )
        self.begin = next(n for n in graph.nodes if is_pinned_to_backward(n) or n is self.output)
        """First node of the backward."""

    def _positions(self, program: Program, plan: Plan) -> list[fx.Node]:
        """Return the nodes of the plan's profile: the forward's ops, then the backward's."""
        named = {n.name: n for n in self.graph.nodes}
        index = {s.name: i for i, s in enumerate(program.storages)}
        saved = tuple(sorted(index[name] for name in plan.saved if name in index))
        own = {op.name for op in program.backward}
        return [
            *(_begins(named[program.ops[o].name]) for o in forward_ops(program, saved)),
            *(
                n
                for n in self.graph.nodes
                if n.meta.get(IS_RECOMPUTE)
                or (n.name in own and (is_pinned_to_backward(n) or n is self.output))
            ),
        ]

    def ordered(self, plan: Plan) -> list[Offload]:
        """Return the values to send in the order of their fetches; of one op, the first read."""
        order = {node: i for i, node in enumerate(self.graph.nodes)}
        begin = order[self.begin]

        def read(offload: Offload) -> int:
            users = self.node_of(offload).users
            return min(order[user] for user in users if order[user] >= begin)

        return sorted(plan.offloads, key=lambda o: (o.last, read(o)))

    def node_of(self, offload: Offload) -> fx.Node:
        """Return the node that is saved for a value."""
        return self.saved[offload.name]

    def send_and_fetch(self, value: fx.Node, offload: Offload) -> tuple[fx.Node, fx.Node]:
        """Send a value away and fetch it; return the node to save, and the node for its readers."""
        if self.storages.count(storage_id(value.meta["val"])) > 1:
            raise VerifyError(f"{value.name!r} is sent away, and another saved value shares it")
        order = {node: i for i, node in enumerate(self.graph.nodes)}
        readers = sorted(
            (user for user in value.users if order[user] >= order[self.begin]),
            key=order.__getitem__,
        )
        let_go = self.begin
        if offload.first < self.forward_ops:
            let_go = self.positions[offload.first]
        begins = min(self.positions[offload.last + 1], readers[0], key=order.__getitem__)
        held_val = fake_twin(value.meta["val"], torch.device("cpu"))
        # The storage id stays, since views that were made of the value are made of what comes back.
        back_val = value.meta["val"]
        with self.graph.inserting_after(value):
            held = self._call(send, (value, self.tier), f"{value.name}_send", held_val)
        with self.graph.inserting_before(let_go):
            kept = self._call(sent, (held, value, self.tier), f"{value.name}_sent", held_val)
        for node in (held, kept):
            node.meta |= {AWAY: value.name, VIEW_OF: value.name}
        kept.meta[LAST_READER] = True
        with self.graph.inserting_before(begins):
            to = (kept, self.tier, value.meta["val"].device)
            begun = self._call(fetch, to, f"{value.name}_fetch", back_val, backward=True)
        with self.graph.inserting_before(readers[0]):
            of = (begun, kept, self.tier)
            back = self._call(fetched, of, f"{value.name}_fetched", back_val, backward=True)
        for reader in readers:
            reader.replace_input_with(value, back)
        return kept, back

    def check(self, value: fx.Node, back: fx.Node) -> fx.Node:
        """Compare the fetched value with the value's checksum; return that, to be saved."""
        val = fake_like(value.meta["val"], (1,), torch.int64)
        with self.graph.inserting_after(value):
            expected = self._call(checksum, (value,), f"{value.name}_sent_checksum", val)
        expected.meta[CHECKSUM_OF] = value.name
        with self.graph.inserting_after(back):
            arguments = back, expected, value.name
            name, val = f"{back.name}_checked", back.meta["val"]
            checked = self._call(arrived, arguments, name, val, backward=True)
        back.replace_all_uses_with(checked, delete_user_cb=lambda user: user is not checked)
        return expected

    def _call(
        self,
        op: object,
        args: tuple[object, ...],
        name: str,
        val: object,
        *,
        backward: bool = False,
    ) -> fx.Node:
        node = self.graph.create_node("call_function", op, args, name=name)  # type: ignore[arg-type]
        node.meta = {"val": val}
        tag_side(node, backward=backward)
        return node


def _is_tensor(node: fx.Node) -> bool:
    return isinstance(node.meta.get("val"), torch.Tensor)


def _begins(node: fx.Node) -> fx.Node:
    """Return the node that runs an op: a random op's value is an item of its result."""
    first = node.args[0] if node.args else None
    return first if isinstance(first, fx.Node) and FIRST_RUN_OF in first.meta else node
