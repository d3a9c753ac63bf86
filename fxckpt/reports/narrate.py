"""Decisions in words: the reason for each, with the recomputation it was weighed against.

The planner records a :class:`fxckpt.Reason` with every decision. Its sentence adds the chain of
ops that recomputing the value takes, read from the plan's graph snapshot.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from fxckpt.budgets import format_bytes
from fxckpt.plans.snapshot import GraphSnapshot, NodeKind, NodeLabel
from fxckpt.plans.types import Plan, Row, schedule_of, snapshot_of_plan
from fxckpt.reason import Decision, Reason
from fxckpt.solver.live_intervals import OpRun, op_runs
from fxckpt.solver.program import Op
from fxckpt.utils.units import format_flops, format_seconds

MAX_CHAIN_OPS = 500
"""Number of ops at which the walk of a chain stops; bounds the time where little is saved."""
MAX_NAMED_OPS = 3
"""Number of ops that a sentence names."""


class RecomputeChain(NamedTuple):
    """The ops that recomputing one value takes, given all other saved values."""

    ops: tuple[Op, ...]
    """The ops in graph order, the value's own op last."""
    no_recompute_op: Op | None
    """An op of the chain that may not be recomputed; None if there is none."""
    is_complete: bool
    """False if the walk stopped at :data:`MAX_CHAIN_OPS` ops."""

    @property
    def seconds(self) -> float:
        """Total time of running each op once."""
        return sum(op.seconds for op in self.ops)

    @property
    def flops(self) -> int:
        """Total FLOPs of running each op once."""
        return sum(op.flops for op in self.ops)


class Readers(NamedTuple):
    """The names of the ops that read a value, directly or through views, in graph order."""

    forward: tuple[str, ...]
    """Ops of the forward."""
    recompute: tuple[str, ...]
    """Recomputed ops; for a generator state, the random op that is replayed under it."""
    backward: tuple[str, ...]
    """Ops of the backward."""


@dataclass(frozen=True)
class Narrator:
    """The decisions of one plan in words."""

    plan: Plan

    @cached_property
    def snapshot(self) -> GraphSnapshot:
        """The plan's graph snapshot; raises :class:`fxckpt.InvalidOption` if there is none."""
        return snapshot_of_plan(self.plan)

    @cached_property
    def _available(self) -> frozenset[int]:
        """Storages that the backward need not recompute: saved values and outputs."""
        outputs = (
            s for s, storage in enumerate(self.snapshot.program.storages) if storage.is_output
        )
        return frozenset(
            (*(self.snapshot.storage_index[name] for name in self.plan.saved), *outputs)
        )

    @cached_property
    def _recomputed(self) -> frozenset[str]:
        return frozenset(self.plan.recomputed)

    def chain(self, storage: int) -> RecomputeChain:
        """Return the ops that recomputing ``storage`` takes if it is not saved."""
        program = self.snapshot.program
        available, ops = self._available - {storage}, program.ops
        seen: set[int] = set()
        no_recompute_op = None
        stack = [program.storages[storage].producer]
        while stack and len(seen) <= MAX_CHAIN_OPS:
            o = stack.pop()
            if o < 0 or o in seen:
                continue
            seen.add(o)
            no_recompute_op = ops[o] if ops[o].no_recompute is not None else no_recompute_op
            stack.extend(program.storages[s].producer for s in ops[o].reads if s not in available)
        return RecomputeChain(tuple(ops[o] for o in sorted(seen)), no_recompute_op, not stack)

    def sources(self, storage: int) -> tuple[str, ...]:
        """Return the saved values and outputs that ``storage`` is recomputed from."""
        program = self.snapshot.program
        chain = self.chain(storage)
        names = self.snapshot.storage_names
        read = dict.fromkeys(
            s
            for op in chain.ops
            for s in op.reads
            if s in self._available and program.storages[s].producer >= 0
        )
        return tuple(names[s] for s in read)

    def readers(self, name: str) -> Readers:
        """Return the ops that read the value of node ``name``."""
        snapshot = self.snapshot
        label = snapshot.by_name.get(name)
        storages = label.storages if label is not None else (snapshot.storage_index[name],)
        read_by = dict.fromkeys(op.name for s in storages for op in snapshot.readers[s])
        replayed = [
            op.name
            for op in snapshot.program.ops
            if op.rng_state is not None and op.rng_state in storages
        ]
        forward = tuple(n for n in read_by if n in snapshot.op_index)
        return Readers(
            forward,
            tuple(n for n in (*replayed, *forward) if n in self._recomputed),
            tuple(n for n in read_by if n in snapshot.backward_index),
        )

    def why(self, row: Row) -> str:
        """Return the reason for the decision of ``row`` as a sentence."""
        if self.plan.snapshot is None:
            return f"{row.decision.value}: {row.reason.value}"
        if row.decision is Decision.SAVED:
            words = self._why_saved(row)
        elif row.decision is Decision.OFFLOADED:
            words = self._why_offloaded(row)
        else:
            words = self._why_recomputed(row)
        return f"{row.decision.value}: {words}"

    def _why_saved(self, row: Row) -> str:
        """Return the reason for saving a value, with what recomputing it would need and cost."""
        if row.reason is Reason.RNG_STATE:
            return (
                f"the generator's state before {row.op} draws, "
                f"so that its second run draws the same; {format_bytes(row.bytes)}"
            )
        if row.reason is Reason.OUTPUT:
            return f"{row.reason.value}; the backward reads it at no cost"
        if row.reason is not Reason.CHEAPER_TO_SAVE:
            return f"{row.reason.value}; holds {format_bytes(row.bytes)}"
        chain = self.chain(self.snapshot.storage_index[row.name])
        size = format_bytes(row.bytes)
        if not chain.is_complete:
            return f"recomputing it needs more than {MAX_CHAIN_OPS} ops, to free {size}"
        needs = f"recomputing it needs {self._list_ops(chain.ops)}"
        if (op := chain.no_recompute_op) is not None:
            return (
                f"{needs}, of which {op.name} must not run twice ({op.no_recompute}); holds {size}"
            )
        if chain.flops:
            needs += f"{' and' if len(chain.ops) == 1 else ','} {format_flops(chain.flops)}"
        rate = ""
        if row.bytes and chain.seconds:
            rate = f" ({format_seconds(chain.seconds / (row.bytes / 2**20))} a MiB)"
        return f"{needs}; costs {format_seconds(chain.seconds)} to free {size}{rate}"

    @cached_property
    def _order(self) -> list[OpRun]:
        return op_runs(self.snapshot.program, schedule_of(self.plan))

    def _why_offloaded(self, row: Row) -> str:
        offload = next(o for o in self.plan.offloads if o.name == row.name)
        order = self._order
        first = "the backward"
        if offload.first < self.plan.forward_ops:
            first = self.short_name(order[offload.first].op.name)
        back = self.short_name(order[offload.last + 1].op.name)
        return (
            f"frees {format_bytes(row.bytes)} from {first} on, and its copy back begins before "
            f"{back}"
        )

    def _why_recomputed(self, row: Row) -> str:
        """Return the reason for recomputing a value, with its cost."""
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

    def _list_ops(self, ops: tuple[Op, ...]) -> str:
        """Return the slowest ops by short name, in graph order, and the number of the others."""
        slowest = sorted(ops, key=lambda op: -op.seconds)[:MAX_NAMED_OPS]
        names = list(dict.fromkeys(self.short_name(op.name) for op in ops if op in slowest))
        more = len(ops) - len(slowest)
        return ", ".join(names) + (
            f" and {more} more op{'s' if more > 1 else ''}" if more > 0 else ""
        )

    def short_name(self, name: str) -> str:
        """Return the short name of the node ``name`` (``attn.softmax``), if it has a label."""
        label = self.snapshot.by_name.get(name)
        return name if label is None else short_name(label)

    def backward_inputs(self) -> tuple[NodeLabel, ...]:
        """Return the graph inputs that backward or recomputed ops read.

        They are allocated before the step, so they do not count towards its memory.
        """
        labels, recomputed = self.snapshot.labels, set(self.plan.recomputed)
        read: set[int] = set()
        for label in labels:
            if label.is_backward or label.name in recomputed:
                read.update(label.inputs)
        for position in range(len(labels) - 1, -1, -1):
            # The backward takes a view of the base instead of saving the view.
            if (
                position in read
                and labels[position].kind is NodeKind.VIEW
                and not labels[position].is_backward
            ):
                read.update(labels[position].inputs)
        return tuple(
            labels[i]
            for i in sorted(read)
            if labels[i].kind is NodeKind.INPUT and not labels[i].is_backward
        )


def short_name(label: NodeLabel) -> str:
    """Return the last component of a node's module path and its op.

    An op ``_softmax`` of module ``h.0.attn`` is ``attn.softmax``.
    """
    op = label.op.split(".")[0].strip("_")
    return ".".join(part for part in (label.module.rpartition(".")[2], op) if part)
