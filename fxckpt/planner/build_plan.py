"""Plan of a schedule: names in place of indices, and a reason for every value."""

from __future__ import annotations

from collections import Counter

from fxckpt.plans.snapshot import GraphSnapshot, NodeLabel, state_name
from fxckpt.plans.types import Offload, Plan, Recompute, RegionBudget, Row
from fxckpt.reason import Decision, Reason
from fxckpt.solver.cuts.saved_limits import binding
from fxckpt.solver.program import Program, Side
from fxckpt.solver.search.candidates import Candidate, SearchResult


def build_plan(
    snapshot: GraphSnapshot,
    found: SearchResult,
    chosen: Candidate,
    *,
    budget_bytes: int | None,
    cost: str,
) -> Plan:
    """Return the plan of a chosen schedule."""
    program, schedule, simulation = snapshot.program, chosen.schedule, chosen.simulation
    recomputed = sorted(set(schedule.runs))
    return Plan(
        saved=tuple(state_name(program.storages[s].name) for s in chosen.schedule.saved),
        recomputed=tuple(program.ops[o].name for o in recomputed),
        schedule=tuple(
            Recompute(program.ops[o].name, program.backward[j].name)
            for o, j in zip(schedule.runs, schedule.before, strict=True)
        ),
        saved_bytes=simulation.saved_bytes,
        peak_bytes=simulation.peak_bytes,
        baseline_peak_bytes=found.baseline.simulation.peak_bytes,
        floor_bytes=min(found.least_peak.simulation.peak_bytes, simulation.peak_bytes),
        floor_bound_bytes=found.peak_bound_bytes,
        recompute_seconds=simulation.extra_seconds - simulation.stall_seconds,
        lower_bound_seconds=min(found.bound.seconds, simulation.extra_seconds),
        price=found.bound.price * 2**20,
        next_seconds=max(0.0, simulation.extra_seconds - found.next_bound.seconds)
        if budget_bytes is not None
        else 0.0,
        recompute_flops=simulation.extra_flops,
        step_seconds=program.step_seconds,
        step_flops=program.step_flops,
        budget_bytes=budget_bytes,
        rows=tuple(_rows(snapshot, chosen)),
        profile=simulation.profile,
        forward_ops=simulation.forward_ops,
        cost=cost,
        budget_binds=budget_bytes is not None and simulation.extra_seconds > found.least_seconds,
        regions=_regions(snapshot.program, found, chosen),
        offloads=tuple(
            Offload(program.storages[s].name, program.storages[s].bytes, first, last)
            for s, first, last in schedule.away
        ),
        stall_seconds=simulation.stall_seconds,
        snapshot=snapshot,
    )


def _regions(program: Program, found: SearchResult, chosen: Candidate) -> tuple[RegionBudget, ...]:
    """Return what the schedule saves of each region with a budget of its own."""
    saved = frozenset(chosen.schedule.saved)
    binds = binding(program, chosen.schedule, found.bound.price)
    return tuple(
        RegionBudget(
            limit.name,
            limit.budget,
            limit.bytes,
            sum(program.storages[s].bytes for s in limit.storages if s in saved),
            limit.least_bytes,
            limit.default_bytes,
            does_bind and limit.bytes < limit.default_bytes,
        )
        for limit, does_bind in zip(program.limits, binds, strict=True)
    )


def _rows(snapshot: GraphSnapshot, chosen: Candidate) -> list[Row]:
    """Return a row for each saved value, then for each recomputed op."""
    program = snapshot.program
    runs = Counter(chosen.schedule.runs)
    rows = []
    away = {s for s, _, _ in chosen.schedule.away}
    for s in chosen.schedule.saved:
        storage = program.storages[s]
        op = program.ops[storage.producer] if storage.producer >= 0 else None
        seconds, flops = (op.seconds, op.flops) if op else (0.0, 0)
        reason = _why_sent(snapshot, s) if s in away else _why_saved(snapshot, s)
        rows.append(
            _row(
                snapshot.owners[s],
                state_name(storage.name),
                storage.bytes,
                Decision.OFFLOADED if s in away else Decision.SAVED,
                reason,
                0,
                seconds,
                flops,
            )
        )
    for o in sorted(runs):
        op = program.ops[o]
        nbytes = sum(program.storages[s].bytes for s in op.writes)
        label = snapshot.by_name[op.name]
        rows.append(
            _row(
                label,
                op.name,
                nbytes,
                Decision.RECOMPUTED,
                _why_recomputed(snapshot, o),
                runs[o],
                op.seconds,
                op.flops,
            )
        )
    return rows


def _why_sent(snapshot: GraphSnapshot, s: int) -> Reason:
    link = snapshot.program.link
    is_required = link is not None and s in link.required
    return Reason.POLICY if is_required else Reason.CHEAPER_TO_SEND


def _why_saved(snapshot: GraphSnapshot, s: int) -> Reason:
    storage = snapshot.program.storages[s]
    if storage.producer < 0:
        return Reason.RNG_STATE
    if storage.is_output:
        return Reason.OUTPUT
    return snapshot.program.ops[storage.producer].no_recompute or Reason.CHEAPER_TO_SAVE


def _why_recomputed(snapshot: GraphSnapshot, o: int) -> Reason:
    op = snapshot.program.ops[o]
    if op.writes and not all(snapshot.program.storages[s].is_savable for s in op.writes):
        return Reason.REGION if snapshot.by_name[op.name].is_in_region else Reason.POLICY
    if op.seconds == 0.0 or op.side is Side.EITHER:
        return Reason.FREE
    return Reason.CHEAPER_TO_RECOMPUTE


def _row(
    label: NodeLabel,
    name: str,
    nbytes: int,
    decision: Decision,
    reason: Reason,
    runs: int,
    seconds: float,
    flops: int,
) -> Row:
    is_state = reason is Reason.RNG_STATE
    shape, dtype = ((nbytes,), "uint8") if is_state else (label.shape, label.dtype)
    return Row(
        name,
        label.op,
        shape,
        dtype,
        nbytes,
        label.module,
        label.source,
        decision,
        reason,
        runs,
        seconds,
        flops,
    )
