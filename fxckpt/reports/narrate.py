"""Reasons in words: what a decision weighed, as a sentence, and who needs a value.

The reason itself is made where the decision is made (:class:`fxckpt.plan.Reason`); here it is spelled out with what running the value again
would take, read from the plan's step.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from fxckpt.budget import format_bytes
from fxckpt.plans.snapshot import GraphSnapshot, NodeKind, NodeLabel
from fxckpt.plans.types import Plan, Row, snapshot_of_plan
from fxckpt.reason import Decision, Reason
from fxckpt.solver.program import Op
from fxckpt.utils.units import format_flops, format_seconds

LONGEST_CHAIN = 500
"""Ops after which a chain is only said to be longer. It bounds the time of explaining graphs in which little is saved."""
FEW = 3
"""How many ops a sentence names."""


class RecomputeChain(NamedTuple):
    """What would run again for a value that was not saved, all else as planned."""

    ops: tuple[Op, ...]
    """In the order of the graph, the value's own op last."""
    barred: Op | None
    """One of them that must not run twice and whose value is not at hand; None if all may."""
    is_whole: bool
    """False if there are more ops than :data:`LONGEST_CHAIN`."""

    @property
    def seconds(self) -> float:
        """Time of one run of all."""
        return sum(op.seconds for op in self.ops)

    @property
    def flops(self) -> int:
        """FLOPs of one run of all."""
        return sum(op.flops for op in self.ops)


class Readers(NamedTuple):
    """Names of the ops that read a value, through views too, in the order of the graph."""

    forward: tuple[str, ...]
    recompute: tuple[str, ...]
    """Those of the forward that the backward runs again, and a random op for the state it is replayed under."""
    backward: tuple[str, ...]


@dataclass(frozen=True)
class Narrator:
    """Explains one plan's decisions."""

    plan: Plan

    @cached_property
    def step(self) -> GraphSnapshot:
        """The plan's step. Raises :class:`fxckpt.InvalidOption` for a plan without one."""
        return snapshot_of_plan(self.plan)

    @cached_property
    def _at_hand(self) -> frozenset[int]:
        """Storages that the backward need not make: saved, or outputs."""
        outputs = (s for s, storage in enumerate(self.step.program.storages) if storage.is_output)
        return frozenset((*(self.step.storage_index[name] for name in self.plan.saved), *outputs))

    @cached_property
    def _again(self) -> frozenset[str]:
        return frozenset(self.plan.recomputed)

    def chain(self, storage: int) -> RecomputeChain:
        """Return what would run again if ``storage`` were not saved."""
        program = self.step.program
        at_hand, ops = self._at_hand - {storage}, program.ops
        seen: set[int] = set()
        barred = None
        stack = [program.storages[storage].producer]
        while stack and len(seen) <= LONGEST_CHAIN:
            o = stack.pop()
            if o < 0 or o in seen:
                continue
            seen.add(o)
            barred = ops[o] if ops[o].no_recompute is not None else barred
            stack.extend(program.storages[s].producer for s in ops[o].reads if s not in at_hand)
        return RecomputeChain(tuple(ops[o] for o in sorted(seen)), barred, not stack)

    def sources(self, storage: int) -> tuple[str, ...]:
        """Return the saved values and outputs that a recomputed storage is made from."""
        program = self.step.program
        chain = self.chain(storage)
        names = self.step.storage_names
        read = dict.fromkeys(
            s
            for op in chain.ops
            for s in op.reads
            if s in self._at_hand and program.storages[s].producer >= 0
        )
        return tuple(names[s] for s in read)

    def readers(self, name: str) -> Readers:
        """Return who reads a value, by its node's name."""
        step = self.step
        label = step.by_name.get(name)
        held = label.storages if label is not None else (step.storage_index[name],)
        read_by = dict.fromkeys(op.name for s in held for op in step.readers[s])
        drawing = [
            op.name for op in step.program.ops if op.rng_state is not None and op.rng_state in held
        ]
        forward = tuple(n for n in read_by if n in step.op_index)
        return Readers(
            forward,
            tuple(n for n in (*drawing, *forward) if n in self._again),
            tuple(n for n in read_by if n in step.backward_index),
        )

    def why(self, row: Row) -> str:
        """Return the reason of a row as a sentence."""
        if self.plan.step is None:
            return f"{row.decision.value}: {row.reason.value}"
        words = (
            self._why_saved(row) if row.decision is Decision.SAVED else self._why_recomputed(row)
        )
        return f"{row.decision.value}: {words}"

    def _why_saved(self, row: Row) -> str:
        if row.reason is Reason.RNG_STATE:
            return f"the generator's state before {row.op} draws, so that its second run draws the same; {format_bytes(row.bytes)}"
        if row.reason is Reason.OUTPUT:
            return f"{row.reason.value}; the backward reads it at no cost"
        if row.reason is not Reason.CHEAPER_TO_SAVE:
            return f"{row.reason.value}; holds {format_bytes(row.bytes)}"
        chain = self.chain(self.step.storage_index[row.name])
        if not chain.is_whole:
            return f"recomputing it needs more than {LONGEST_CHAIN} ops, to free {format_bytes(row.bytes)}"
        needs = f"recomputing it needs {self._named(chain.ops)}"
        if chain.barred is not None:
            return f"{needs}, of which {chain.barred.name} must not run twice ({chain.barred.no_recompute}); holds {format_bytes(row.bytes)}"
        needs += (
            f"{' and' if len(chain.ops) == 1 else ','} {format_flops(chain.flops)}"
            if chain.flops
            else ""
        )
        rate = (
            f" ({format_seconds(chain.seconds / (row.bytes / 2**20))} a MiB)"
            if row.bytes and chain.seconds
            else ""
        )
        return f"{needs}; costs {format_seconds(chain.seconds)} to free {format_bytes(row.bytes)}{rate}"

    def _why_recomputed(self, row: Row) -> str:
        runs = "once" if row.runs == 1 else f"{row.runs} times"
        if row.reason is Reason.FREE:
            return f"{row.reason.value}; saving it would hold {format_bytes(row.bytes)}"
        work = f" and {format_flops(row.recompute_flops)}" if row.recompute_flops else ""
        each = " each" if row.runs > 1 else ""
        held = (
            f"saving it would hold {format_bytes(row.bytes)}"
            if row.bytes
            else "it has no bytes of its own"
        )
        words = f"{held}; it runs {runs}, {format_seconds(row.recompute_seconds)}{work}{each}"
        return (
            words if row.reason is Reason.CHEAPER_TO_RECOMPUTE else f"{row.reason.value}; {words}"
        )

    def _named(self, ops: tuple[Op, ...]) -> str:
        costly = sorted(ops, key=lambda op: -op.seconds)[:FEW]
        named = list(dict.fromkeys(self.short(op.name) for op in ops if op in costly))
        more = len(ops) - len(costly)
        return ", ".join(named) + (
            f" and {more} more op{'s' if more > 1 else ''}" if more > 0 else ""
        )

    def short(self, name: str) -> str:
        """Return an op as people say it: the last of its module's path and what it does (``attn.softmax``)."""
        label = self.step.by_name.get(name)
        return name if label is None else short_name(label)

    def inputs_read(self) -> tuple[NodeLabel, ...]:
        """Return the graph's inputs that the backward reads, itself or through what it runs again. They take no memory of the step."""
        labels, again = self.step.labels, set(self.plan.recomputed)
        wanted: set[int] = set()
        for label in labels:
            if label.is_backward or label.name in again:
                wanted.update(label.inputs)
        for position in range(len(labels) - 1, -1, -1):
            # A view is made again from what it shows.
            if (
                position in wanted
                and labels[position].kind is NodeKind.VIEW
                and not labels[position].is_backward
            ):
                wanted.update(labels[position].inputs)
        return tuple(
            labels[i]
            for i in sorted(wanted)
            if labels[i].kind is NodeKind.INPUT and not labels[i].is_backward
        )


def short_name(label: NodeLabel) -> str:
    """Return ``attn.softmax`` for an op ``_softmax`` of module ``h.0.attn``."""
    op = label.op.split(".")[0].strip("_")
    return ".".join(part for part in (label.module.rpartition(".")[2], op) if part)
