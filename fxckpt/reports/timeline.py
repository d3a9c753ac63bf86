"""The timeline of a plan: the values that are live at every op of the step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from fxckpt.budgets import format_bytes
from fxckpt.plans.snapshot import GraphSnapshot
from fxckpt.plans.types import Plan, schedule_of, snapshot_of_plan
from fxckpt.solver.live_intervals import (
    NO_STORAGE,
    Holder,
    LiveInterval,
    OpRun,
    aligned,
    live_intervals,
    op_runs,
    stacked,
)
from fxckpt.solver.program import Program
from fxckpt.solver.schedule import save_all
from fxckpt.solver.simulate import simulate
from fxckpt.utils.tables import Column, Table
from fxckpt.utils.units import shorten


class Tick(NamedTuple):
    """One op of the step, in execution order."""

    name: str
    """The name of the op's node."""
    phase: str
    """``"forward"``, ``"recompute"`` (a forward op run in the backward) or ``"backward"``."""
    module: str
    """The path of the op's module."""
    seconds: float
    """Time by the plan's cost model."""
    bytes: int
    """Live bytes while the op runs."""
    uncheckpointed_bytes: int
    """Live bytes at this op if every value that the backward reads is saved."""


class Held(NamedTuple):
    """The live interval of one value, from tick ``first`` to tick ``last``, both included."""

    name: str
    """The node that owns the storage; ``"(workspace)"`` for the workspace of a kernel."""
    module: str
    """The path of the module that computes it; empty for workspace."""
    holder: Holder
    """The reason that the bytes are live."""
    first: int
    """The first tick."""
    last: int
    """The last tick."""
    bytes: int
    """The size of the storage."""
    op: str = ""
    """The op that computes it; empty for workspace."""


@dataclass(frozen=True)
class Timeline:
    """The memory of a planned step, op by op and value by value.

    Made by :meth:`fxckpt.Plan.timeline`. Bytes are beyond those allocated when the step begins.
    Printing shows the peak and the values that are live there.
    """

    ticks: tuple[Tick, ...]
    """The ops of the step in execution order."""
    held: tuple[Held, ...]
    """The live intervals of all values; at each tick their bytes add up to ``tick.bytes``."""
    forward_ticks: int
    """The number of leading ticks that belong to the forward."""
    budget_bytes: int | None
    """The plan's budget."""

    @cached_property
    def stack(self) -> dict[Holder, tuple[int, ...]]:
        """Live bytes at each tick, by holder."""
        parts = stacked(
            (LiveInterval(NO_STORAGE, h.holder, h.first, h.last, h.bytes) for h in self.held),
            len(self.ticks),
        )
        return {holder: tuple(live) for holder, live in parts.items()}

    @property
    def peak_tick(self) -> int:
        """The index of the first tick at the peak."""
        return max(range(len(self.ticks)), key=lambda i: self.ticks[i].bytes) if self.ticks else 0

    def at(self, tick: int) -> tuple[Held, ...]:
        """Return the values that are live at a tick, largest first."""
        return tuple(
            sorted(
                (h for h in self.held if h.first <= tick <= h.last),
                key=lambda h: (-h.bytes, h.first, h.name),
            )
        )

    def table(self, tick: int | None = None) -> Table:
        """Return the values that are live at a tick, by default the peak, as a table."""
        here = self.at(self.peak_tick if tick is None else tick)
        columns = (
            Column("name", "value", lambda v: shorten(v, 28)),
            Column("bytes", "bytes", format_bytes, is_number=True),
            Column("held_as", "held as"),
            Column("module", "module", lambda v: shorten(v, 30)),
            Column("from", "from", is_number=True),
            Column("to", "to", is_number=True),
            Column("op", "op", is_brief=False),
        )
        name = [tick.name for tick in self.ticks]
        rows = (
            (h.name, h.bytes, h.holder.value, h.module, name[h.first], name[h.last], h.op)
            for h in here
            if h.bytes
        )
        return Table(columns, tuple(rows))

    def headline(self) -> str:
        """Return the size and place of the peak and the bytes of each holder, in words."""
        if not self.ticks:
            return "nothing runs"
        peak = self.ticks[self.peak_tick]
        parts = {holder: live[self.peak_tick] for holder, live in self.stack.items()}
        shares = ", ".join(f"{format_bytes(n)} {holder.value}" for holder, n in parts.items() if n)
        where = f" ({peak.module})" if peak.module else ""
        return f"peak {format_bytes(peak.bytes)} during {peak.name}{where}, {peak.phase}: {shares}"

    def __str__(self) -> str:
        table = self.table()
        rest = f"\n... and {len(table) - 15} smaller ones" if len(table) > 15 else ""
        return f"{self.headline()}\n\n{table.top(15)}{rest}" if self.ticks else self.headline()


def timeline(plan: Plan) -> Timeline:
    """Return the timeline of ``plan``.

    Raises :class:`fxckpt.InvalidOption` if the plan carries no graph snapshot.
    """
    snapshot = snapshot_of_plan(plan)
    program, schedule = snapshot.program, schedule_of(plan)
    order = op_runs(program, schedule)
    uncheckpointed = uncheckpointed_profile(program, order)
    ticks = tuple(
        _tick(snapshot, moment, live, live_uncheckpointed)
        for moment, live, live_uncheckpointed in zip(
            order, plan.profile, uncheckpointed, strict=True
        )
    )
    held = tuple(_held(snapshot, interval) for interval in live_intervals(program, schedule))
    return Timeline(ticks, held, plan.forward_ops, plan.budget_bytes)


def uncheckpointed_profile(program: Program, order: Sequence[OpRun]) -> list[int]:
    """Return the live bytes of the uncheckpointed step, aligned with the ops of a plan."""
    baseline = save_all(program)
    return aligned(order, op_runs(program, baseline), simulate(program, baseline).profile)


def away_profile(plan: Plan) -> list[int]:
    """Return the bytes that are off the device at each op of a plan; empty if nothing is sent."""
    if not plan.offloads:
        return []
    away = [0] * len(plan.profile)
    for offload in plan.offloads:
        for at in range(offload.first, offload.last + 1):
            away[at] += offload.bytes
    return away


def _tick(snapshot: GraphSnapshot, moment: OpRun, live: int, live_uncheckpointed: int) -> Tick:
    phase = "forward" if moment.is_forward else ("recompute" if moment.is_recompute else "backward")
    label = snapshot.by_name.get(moment.op.name)
    module = label.module if label else ""
    return Tick(moment.op.name, phase, module, moment.op.seconds, live, live_uncheckpointed)


def _held(snapshot: GraphSnapshot, interval: LiveInterval) -> Held:
    if interval.storage == NO_STORAGE:
        return Held(
            "(workspace)", "", interval.holder, interval.first, interval.last, interval.bytes
        )
    name, owner = snapshot.storage_names[interval.storage], snapshot.owners[interval.storage]
    return Held(
        name, owner.module, interval.holder, interval.first, interval.last, interval.bytes, owner.op
    )
