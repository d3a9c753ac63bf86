"""Carriers: a plan in the forms that others' checkpointing takes, where the backend stays theirs.

They decide about ops as these run, or about nodes of another's graph, so a value of the plan is
found by its op and the number of that op's calls before it, or by its name.
"""

from __future__ import annotations

import weakref
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from types import TracebackType
from typing import TYPE_CHECKING, Any

import torch
from torch import fx
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts
from torch.utils.flop_counter import flop_registry

from fxckpt.errors import InvalidOption, PlanMismatch
from fxckpt.plans.snapshot import NodeKind, NodeLabel

if TYPE_CHECKING:
    from fxckpt.plans.types import Plan

SAVE, RECOMPUTE = CheckpointPolicy.MUST_SAVE, CheckpointPolicy.MUST_RECOMPUTE
DROPOUT = "native_dropout"
DROPOUT_ON_CPU = ("div", "mul")
"""Ops that follow ``bernoulli_`` where eager torch runs a dropout of the CPU as three."""
PRODUCTS = frozenset(packet.__name__ for packet in flop_registry)
"""Names of the ops that torch counts FLOPs of: products of matrices, convolutions, attention."""
Contexts = tuple[AbstractContextManager[Any], AbstractContextManager[Any]]
"""Result of torch's ``context_fn``: a context of the forward, and one of the recompute."""


@dataclass(frozen=True)
class PlannedCall:
    """One call of an op in the forward of a plan."""

    label: NodeLabel
    is_saved: bool


def planned_calls(plan: Plan, labels: Sequence[NodeLabel]) -> dict[str, list[PlannedCall]]:
    """Return the calls of a plan's forward in order, by the name of the op.

    A call is saved where the plan saves one of its results. What a formula of a gradient computes
    from values of the forward runs in eager torch's backward, and is none of the calls.
    """
    saved = set(plan.saved)
    parents = {
        labels[label.inputs[0]].name
        for label in labels
        if label.kind is NodeKind.PART and label.name in saved
    }
    calls: defaultdict[str, list[PlannedCall]] = defaultdict(list)
    for label in labels:
        is_of_forward = not (label.is_backward or label.is_traced_in_backward)
        if label.kind is NodeKind.OP and is_of_forward:
            is_saved = label.name in saved or label.name in parents
            calls[base_name(label.op)].append(PlannedCall(label, is_saved))
    return dict(calls)


def base_name(op: str) -> str:
    """Return the name of an op in a label without namespace, overload and the mark of a write.

    >>> base_name("add.Tensor"), base_name("mm"), base_name("add_.Tensor")
    ('add', 'mm', 'add')
    >>> base_name("mylib.twice"), base_name("mylib.twice.out")
    ('twice', 'twice')
    """
    first, *others = op.split(".")
    name = first if not others or hasattr(torch.ops.aten, first) else others[0]
    return name.rstrip("_")


@dataclass
class _Asked:
    """A torch policy that answers by op and occurrence, for one run of a region."""

    calls: Mapping[str, Sequence[PlannedCall]]
    seen: dict[bool, Counter[str]] = field(default_factory=lambda: defaultdict(Counter))
    skipped: dict[bool, list[str]] = field(default_factory=lambda: defaultdict(list))

    def __call__(self, ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        again, name = ctx.is_recompute, base_name(op._opname)
        if (part := self._of_dropout(op, name, again)) is not None:
            return part
        place = self.seen[again][name]
        self.seen[again][name] += 1
        planned = self.calls.get(name, ())
        if is_unsavable(op) or not any(call.is_saved for call in planned):
            return RECOMPUTE
        if all(call.is_saved for call in planned):
            return SAVE
        if place >= len(planned):
            raise self._mismatch(name, place + 1)
        return SAVE if planned[place].is_saved else RECOMPUTE

    def _of_dropout(self, op: Any, name: str, again: bool) -> CheckpointPolicy | None:
        """Return the answer for one of the ops of a dropout; None for others."""
        following, planned = self.skipped[again], self.calls.get(DROPOUT, ())
        if op._opname == "bernoulli_" and planned:
            following[:] = DROPOUT_ON_CPU
            return RECOMPUTE
        if not following or following[0] != name:
            return None
        following.pop(0)
        if following:
            return RECOMPUTE
        # The last one gives the dropout's result.
        place = self.seen[again][DROPOUT]
        self.seen[again][DROPOUT] += 1
        is_saved = place < len(planned) and planned[place].is_saved
        return SAVE if is_saved and not is_unsavable(op) else RECOMPUTE

    def check(self) -> None:
        """Raise :class:`PlanMismatch` if a forward ran other ops than planned.

        They are counted where the plan saves some, and where they are products: eager torch runs
        others that a graph does not have. Where all are saved there may be more, as a graph has
        equal ones once.
        """
        for name in dict.fromkeys((*self.calls, *self.seen[False])):
            planned, ran = self.calls.get(name, ()), self.seen[False][name]
            saved = sum(call.is_saved for call in planned)
            is_exact = name in PRODUCTS or 0 < saved < len(planned)
            is_other = ran != len(planned) if is_exact else ran < len(planned) == saved
            if is_other and not label_draws(name):
                raise self._mismatch(name, ran)

    def _mismatch(self, name: str, ran: int) -> PlanMismatch:
        return PlanMismatch(
            f"the region ran {name} {ran} times, and its plan has {len(self.calls.get(name, ()))}. "
            "Plan the function that is the region, with inputs of the same shapes: "
            "fxckpt.plan(block, x, budget=...)."
        )


def label_draws(op: str) -> bool:
    """Return whether an op of a label draws from a generator."""
    packet = getattr(torch.ops.aten, base_name(op), None)
    return packet is not None and any(
        torch.Tag.nondeterministic_seeded in getattr(packet, name).tags
        for name in packet.overloads()
    )


def is_unsavable(op: Any) -> bool:
    """Return whether torch's checkpoint must run an op again.

    A random op that is skipped would leave the generator behind for the next one; a write that is
    skipped leaves its tensor unwritten; and a view is of something else.
    """
    return torch.Tag.nondeterministic_seeded in op.tags or any(
        returned.alias_info is not None for returned in op._schema.returns
    )


class _CheckedContext(AbstractContextManager[Any]):
    """Torch's context of a region's forward, and a check at its end."""

    def __init__(self, context: AbstractContextManager[Any], asked: _Asked) -> None:
        self._context, self._asked = context, asked

    def __enter__(self) -> Any:
        return self._context.__enter__()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> bool | None:
        handled = self._context.__exit__(kind, error, trace)
        if error is None:
            self._asked.check()
        return handled


def context_fn(plan: Plan, labels: Sequence[NodeLabel]) -> Callable[[], Contexts]:
    """Return a ``context_fn`` of torch's checkpoint that saves the values that a plan saves."""
    calls = planned_calls(plan, labels)

    def contexts() -> Contexts:
        asked = _Asked(calls)
        forward, recompute = create_selective_checkpoint_contexts(asked)
        return _CheckedContext(forward, asked), recompute

    return contexts


def module_of_titan(node: fx.Node) -> str:
    """Return the module that torchtitan wrote to a node."""
    custom: Mapping[str, str] = node.meta.get("custom") or {}
    return custom.get("module_fqn", "")


@dataclass(frozen=True)
class NodePolicy:
    """A plan as a policy of nodes: ``policy(node)`` returns a ``CheckpointPolicy``.

    A node is found by its module, its op and the number of that op's calls in the module before
    it; what the plan does not have may be recomputed.
    """

    calls: Mapping[tuple[str, str], Sequence[PlannedCall]]
    module_of: Callable[[fx.Node], str] = module_of_titan
    _answers: weakref.WeakKeyDictionary[fx.Graph, dict[str, CheckpointPolicy]] = field(
        default_factory=weakref.WeakKeyDictionary, repr=False, compare=False
    )

    def __call__(self, node: fx.Node) -> CheckpointPolicy:
        """Return the decision about a node of a forward."""
        if node.graph not in self._answers:
            self._answers[node.graph] = dict(self._decide(node.graph))
        return self._answers[node.graph].get(node.name, CheckpointPolicy.PREFER_RECOMPUTE)

    def _decide(self, graph: fx.Graph) -> Iterator[tuple[str, CheckpointPolicy]]:
        seen: Counter[tuple[str, str]] = Counter()
        for node in graph.nodes:
            opname = getattr(node.target, "_opname", None)
            if node.op != "call_function" or opname is None:
                continue
            key = self.module_of(node), base_name(opname)
            place, planned = seen[key], self.calls.get(key, ())
            seen[key] += 1
            if torch.Tag.nondeterministic_seeded in node.target.tags:
                # A pass that keeps no generator's state cannot run it again.
                yield node.name, SAVE
            elif place < len(planned):
                yield node.name, SAVE if planned[place].is_saved else RECOMPUTE


def node_policy(plan: Plan, labels: Sequence[NodeLabel]) -> NodePolicy:
    """Return a plan as a policy of another graph's nodes."""
    calls: defaultdict[tuple[str, str], list[PlannedCall]] = defaultdict(list)
    for name, planned in planned_calls(plan, labels).items():
        for call in planned:
            calls[call.label.module, name].append(call)
    return NodePolicy(dict(calls))


def tag(plan: Plan, labels: Sequence[NodeLabel], joint: fx.GraphModule) -> None:
    """Set ``meta["recompute"]`` of a joint graph's forward nodes to a plan's decisions.

    Raises :class:`PlanMismatch` if the plan saves a node that the graph does not have.
    """
    nodes = {node.name: node for node in joint.graph.nodes}
    missing = [name for name in plan.saved if name not in nodes]
    if missing:
        raise PlanMismatch(
            f"the plan saves {missing[0]}, which the graph does not have. Tag the joint graph of "
            "the model and the shapes that the plan is of."
        )
    saved = _tagged_saved(plan, labels)
    for label in labels:
        if label.is_backward or label.kind in (NodeKind.INPUT, NodeKind.SIZE):
            continue
        node = nodes.get(label.name)
        if node is not None and node.op == "call_function":
            node.meta["recompute"] = SAVE if label.name in saved else RECOMPUTE


def _tagged_saved(plan: Plan, labels: Sequence[NodeLabel]) -> set[str]:
    """Return the nodes to tag as saved: the plan's, and all results of their ops.

    Torch saves all results of an op or none, as it takes their tags from the op.
    """
    saved = set(plan.saved)
    for calls in planned_calls(plan, labels).values():
        saved |= {call.label.name for call in calls if call.is_saved}
    return saved | {
        label.name
        for label in labels
        if label.kind is NodeKind.PART and labels[label.inputs[0]].name in saved
    }


def saved_regions(
    plan: Plan, labels: Sequence[NodeLabel], regions: Iterable[str], share: float
) -> frozenset[str]:
    """Return the regions, named by their modules, of whose bytes a plan saves a share or more.

    Raises :class:`InvalidOption` for a name that no op of the plan is in.
    """
    modules = {label.module for label in labels if not label.is_backward}
    found = set()
    for region in regions:
        inside = {m for m in modules if m == region or m.startswith(f"{region}.")}
        if not inside:
            known = ", ".join(sorted(filter(None, modules))[:8])
            raise InvalidOption(
                f"{region!r} names no module that runs an op in this plan. Its modules: {known}."
            )
        rows = [row for row in plan.rows if row.module in inside]
        total = sum(row.bytes for row in rows)
        saved = sum(row.bytes for row in rows if row.runs == 0)
        if total and saved >= share * total:
            found.add(region)
    return frozenset(found)
