"""Recompute rules: which ops may be recomputed, and which of their values may be saved.

First come ops whose recomputation would be wrong, then the user's policy, then the checkpoint
regions of the model itself, and last the policy's preferences.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import fx
from torch.utils.checkpoint import CheckpointPolicy

from fxckpt.ops.properties import (
    has_hidden_effect,
    is_collective,
    is_functional_collective,
    is_gather,
    is_known_pure,
    is_mutating,
    is_random,
    is_seed,
    tensors,
)
from fxckpt.ops.recompute_forms import recompute_form
from fxckpt.ops.registry import registered
from fxckpt.passes.analysis.discrete_ops import discrete_results
from fxckpt.passes.analysis.placement import JointPlacement, has_streams, readers_through_views
from fxckpt.passes.meta import HELD
from fxckpt.reason import Reason
from fxckpt.torch_private import storage_id, stream_of

RECOMPUTED = (CheckpointPolicy.MUST_RECOMPUTE, CheckpointPolicy.PREFER_RECOMPUTE)
"""Tags of the values that a checkpoint region of the model recomputes."""
PREFERENCE = 1e-3
"""Share of its time that a preference adds to, or takes off, a recompute: it settles ties."""

PREFER_TO_KEEP = (CheckpointPolicy.PREFER_SAVE, CheckpointPolicy.PREFER_CPU_OFFLOAD)
"""Answers that would rather keep a value, on the device or off it, than recompute it."""

NodePolicy = Callable[[fx.Node], "CheckpointPolicy | None"]


class RecomputeRules:
    """Rules for the ops of one joint graph, asked for in the order of the graph."""

    def __init__(
        self,
        graph: fx.Graph,
        placement: JointPlacement,
        policy: NodePolicy | None,
        *,
        bind_preferences: bool,
        is_agreed: bool = False,
    ) -> None:
        self.placement = placement
        self.policy = policy
        self.bind_preferences = bind_preferences
        self.is_agreed = is_agreed
        """Whether all ranks have one plan, so that it may choose which collectives run again."""
        self.discrete = discrete_results(graph)
        self.has_streams = has_streams(graph)
        self.requested: set[fx.Node] = set()
        """Ops seen so far that a policy demands to recompute."""

    def rule_for(self, node: fx.Node, *, reads_are_savable: bool) -> tuple[Reason | None, bool]:
        """Return why an op may not be recomputed, None if it may, and whether to allow saving it.

        ``reads_are_savable`` tells whether all storages that the op reads may be saved.
        """
        decided = self.policy(node) if self.policy is not None else None
        must_recompute = (
            decided is CheckpointPolicy.MUST_RECOMPUTE
            or self._waits_for_requested(node)
            or self._is_of_binding_region(node, decided)
        )
        reason = self._never(node) or (
            None if must_recompute else self._only_on_request(node, decided)
        )
        if reason is not None:
            return reason, True
        if must_recompute:
            self.requested.add(node)
            is_open = is_collective(node) and decided is not CheckpointPolicy.MUST_RECOMPUTE
            return None, is_open and self._is_left_by(node)
        if decided is CheckpointPolicy.PREFER_RECOMPUTE:
            return None, not self.bind_preferences
        if decided in PREFER_TO_KEEP:
            return None, True
        return None, self._is_savable_in_region(node, reads_are_savable)

    def time_factor(self, node: fx.Node) -> float:
        """Return the factor that a policy's preference puts on the time of an op."""
        if self.policy is None or self.bind_preferences:
            return 1.0
        decided = self.policy(node)
        if decided in PREFER_TO_KEEP:
            return 1.0 + PREFERENCE
        return 1.0 - PREFERENCE if decided is CheckpointPolicy.PREFER_RECOMPUTE else 1.0

    def _never(self, node: fx.Node) -> Reason | None:
        """Return why recomputing an op would be wrong."""
        if HELD in node.meta:
            return Reason.HELD
        if not self.placement.pure_targets.only_computes(node) and (
            is_mutating(node)
            or has_hidden_effect(node)
            or not (is_known_pure(node) or is_collective(node))
        ):
            return Reason.EFFECT
        if is_seed(node) or (is_random(node) and node.kwargs.get("generator") is not None):
            return Reason.RANDOM_WITHOUT_STATE
        # No event orders the streams around a second run.
        if self.has_streams and any(
            stream_of(n) is not None for n in (node, *readers_through_views(node))
        ):
            return Reason.STREAM
        mutated = self.placement.mutated
        form = recompute_form(node) if mutated else None
        read = node.all_input_nodes if form is None else form.operands
        if mutated and any(
            storage_id(t) in mutated for arg in read for t in tensors(arg.meta.get("val"))
        ):
            return Reason.MUTATED_INPUT
        return None

    def _only_on_request(self, node: fx.Node, decided: CheckpointPolicy | None) -> Reason | None:
        """Return why an op is recomputed only if a policy demands it."""
        if is_collective(node) and not self._may_communicate_again(node, decided):
            return Reason.COLLECTIVE
        if decided in (CheckpointPolicy.MUST_SAVE, CheckpointPolicy.MUST_CPU_OFFLOAD):
            return Reason.POLICY
        if registered(node.target).recompute is False:
            return Reason.REGISTERED
        tag = node.meta.get("recompute") if decided is None else None
        if tag in (CheckpointPolicy.MUST_SAVE, CheckpointPolicy.MUST_CPU_OFFLOAD):
            return Reason.REGION
        if node in self.discrete and tag is not CheckpointPolicy.MUST_RECOMPUTE:
            return Reason.DECISION
        return None

    def _is_of_binding_region(self, node: fx.Node, decided: CheckpointPolicy | None) -> bool:
        """Return whether a checkpoint region of the model has a collective run again.

        Ranks that plan each by itself may not choose: they would wait for one another in vain.
        """
        return (
            decided is None
            and node.meta.get("recompute") in RECOMPUTED
            and is_functional_collective(node)
            and not self.is_agreed
        )

    def _may_communicate_again(self, node: fx.Node, decided: CheckpointPolicy | None) -> bool:
        """Return whether a plan may choose to run a collective again, at the price of its link.

        It may in a checkpoint region, and where a gather reads an input of the graph, which is
        there in any case: a parameter's shard.
        """
        if not self.is_agreed or not is_functional_collective(node) or decided is not None:
            return False
        if node.meta.get("recompute") in RECOMPUTED:
            return True
        return node.meta.get("recompute") is None and self._gathers_an_input(node)

    def _gathers_an_input(self, node: fx.Node) -> bool:
        """Return whether a node gathers an input of the graph, or waits for such a gather."""
        while not is_gather(node.target):
            if not is_collective(node) or len(node.all_input_nodes) != 1:
                return False
            (node,) = node.all_input_nodes
        (node,) = node.all_input_nodes
        while node.op != "placeholder":
            if not is_known_pure(node) or is_random(node) or len(node.all_input_nodes) != 1:
                return False
            (node,) = node.all_input_nodes
        return True

    def _waits_for_requested(self, node: fx.Node) -> bool:
        """Return whether a node is the wait for a collective that must be recomputed."""
        return is_collective(node) and any(arg in self.requested for arg in node.all_input_nodes)

    def _is_savable_in_region(self, node: fx.Node, reads_are_savable: bool) -> bool:
        """Return whether the checkpoint regions of the model let a value be saved."""
        required = self.placement.required_forward
        tag = node.meta.get("recompute")
        if tag not in RECOMPUTED:
            # A value that only the backward needs would be saved in place of the region's values.
            return node in required or reads_are_savable
        leaves = self._is_left_by(node)
        binds = tag is CheckpointPolicy.MUST_RECOMPUTE or self.bind_preferences
        return leaves or not binds

    def _is_left_by(self, node: fx.Node) -> bool:
        """Return whether a value leaves its checkpoint region, but for updates of statistics."""
        region = node.meta.get("ac_graph_id")
        form = recompute_form(node)
        return node.meta.get("recompute") in RECOMPUTED and any(
            u in self.placement.required_forward and u.meta.get("ac_graph_id") != region
            for value in ([node] if form is None else form.items(node))
            for u in readers_through_views(value)
        )
