"""Timeline: what the memory holds at every op of a planned step, value by value, as data."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from fxckpt.budget import format_bytes
from fxckpt.plans.snapshot import GraphSnapshot
from fxckpt.plans.types import Plan, schedule_of, snapshot_of_plan
from fxckpt.solver.live_intervals import (
    NO_STORAGE,
    Holder,
    LiveInterval,
    Moment,
    aligned,
    lifetimes,
    moments,
    stacked,
)
from fxckpt.solver.schedule import save_all
from fxckpt.solver.simulate import simulate
from fxckpt.utils.tables import Column, Table
from fxckpt.utils.units import shorten


class Tick(NamedTuple):
    """One op of the step, in the order in which they run."""

    name: str
    phase: str
    """"forward", "backward", or "recompute": a forward op that the backward runs."""
    module: str
    seconds: float
    bytes: int
    """Live while it runs."""
    uncheckpointed_bytes: int
    """Live while it runs if everything that the backward reads is saved."""


class Held(NamedTuple):
    """``bytes`` held by one value from tick ``first`` to tick ``last``, both included."""

    name: str
    """The node that owns it; ``"(workspace)"`` for what no node does."""
    module: str
    holder: Holder
    first: int
    last: int
    bytes: int
    op: str = ""
    """The op that made it; empty for what no node owns."""


@dataclass(frozen=True)
class Timeline:
    """The memory of one step, op by op. Bytes are beyond what was allocated when the step began."""

    ticks: tuple[Tick, ...]
    held: tuple[Held, ...]
    """Every interval in which a value is live; at each tick their bytes add up to the tick's."""
    forward_ticks: int
    """How many leading ticks belong to the forward."""
    budget_bytes: int | None

    @cached_property
    def stack(self) -> dict[Holder, tuple[int, ...]]:
        """Live bytes at each tick by what holds them."""
        parts = stacked(
            (LiveInterval(NO_STORAGE, h.holder, h.first, h.last, h.bytes) for h in self.held),
            len(self.ticks),
        )
        return {holder: tuple(live) for holder, live in parts.items()}

    @property
    def peak_tick(self) -> int:
        """Where the peak is first reached."""
        return max(range(len(self.ticks)), key=lambda i: self.ticks[i].bytes) if self.ticks else 0

    def at(self, tick: int) -> tuple[Held, ...]:
        """Return what is live at a tick, largest first."""
        return tuple(
            sorted(
                (h for h in self.held if h.first <= tick <= h.last),
                key=lambda h: (-h.bytes, h.first, h.name),
            )
        )

    def table(self, tick: int | None = None) -> Table:
        """Return what is live at a tick, by default at the peak, as a table."""
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
        """Say how large the peak is, where it is, and what kinds of things hold it."""
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
    """Return the timeline of a plan. Raises :class:`fxckpt.InvalidOption` for a plan that does not carry its step."""
    step = snapshot_of_plan(plan)
    program, schedule = step.program, schedule_of(plan)
    order = moments(program, schedule)
    baseline = save_all(program)
    without = aligned(order, moments(program, baseline), simulate(program, baseline).profile)
    ticks = tuple(
        _tick(step, m, live, other)
        for m, live, other in zip(order, plan.profile, without, strict=True)
    )
    held = tuple(_held(step, interval) for interval in lifetimes(program, schedule))
    return Timeline(ticks, held, plan.forward_ops, plan.budget_bytes)


def _tick(step: GraphSnapshot, moment: Moment, live: int, without: int) -> Tick:
    phase = "forward" if moment.is_forward else ("recompute" if moment.is_again else "backward")
    label = step.by_name.get(moment.op.name)
    return Tick(
        moment.op.name, phase, label.module if label else "", moment.op.seconds, live, without
    )


def _held(step: GraphSnapshot, interval: LiveInterval) -> Held:
    if interval.storage == NO_STORAGE:
        return Held(
            "(workspace)", "", interval.holder, interval.first, interval.last, interval.bytes
        )
    name, owner = step.storage_names[interval.storage], step.owners[interval.storage]
    return Held(
        name, owner.module, interval.holder, interval.first, interval.last, interval.bytes, owner.op
    )
