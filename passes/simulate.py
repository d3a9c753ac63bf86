"""Simulator: storage-exact liveness of a forward and a backward in their node order. The judge of every plan.

During an op what it reads and what it writes are live together; after it, what nobody reads any more is free. Forward outputs live to the
end (the user holds them), incoming gradients throughout the backward (the autograd engine holds them), parameters and inputs are not
counted.
"""

from __future__ import annotations

from dataclasses import dataclass

from fxckpt.passes.facts import Program, Side
from fxckpt.passes.schedule import Schedule, forward_ops


@dataclass(frozen=True)
class Simulation:
    """What a schedule costs. Bytes beyond what was allocated when the step began; time beyond the uncheckpointed step's."""

    profile: tuple[int, ...]
    forward_ops: int
    saved_bytes: int
    extra_seconds: float
    extra_flops: int

    @property
    def peak_bytes(self) -> int:
        """Most bytes live at once."""
        return max(self.profile, default=0)

    @property
    def peak_position(self) -> int:
        """Where in the profile the peak is first reached."""
        return max(range(len(self.profile)), key=self.profile.__getitem__) if self.profile else 0


def simulate(program: Program, schedule: Schedule) -> Simulation:
    """Run a schedule without running it."""
    order = forward_ops(program, schedule.saved)
    held = {*schedule.saved, *(i for i, s in enumerate(program.storages) if s.is_output)}
    forward, live = _forward_profile(program, schedule, order, held)
    backward = _backward_profile(program, schedule, held, live + program.tangent_bytes)
    seconds, flops = _extra(program, schedule, order)
    saved = sum(program.storages[s].bytes for s in schedule.saved)
    return Simulation((*forward, *backward), len(forward), saved, seconds, flops)


def _forward_profile(program: Program, schedule: Schedule, order: list[int], held: set[int]) -> tuple[list[int], int]:
    storages = program.storages
    last: dict[int, int] = {}
    for at, i in enumerate(order):
        for s in (*program.ops[i].reads, *program.ops[i].writes):
            last[s] = at
    dies: dict[int, list[int]] = {}
    for s, at in last.items():
        if s not in held:
            dies.setdefault(at, []).append(s)
    live, profile = 0, []
    for at, i in enumerate(order):
        op = program.ops[i]
        live += sum(storages[s].bytes for s in op.writes)
        if op.rng_state in held:
            live += storages[op.rng_state].bytes  # type: ignore[index]
        profile.append(live + op.scratch_bytes)
        live -= sum(storages[s].bytes for s in dies.get(at, ()))
    return profile, live


def _backward_profile(program: Program, schedule: Schedule, held: set[int], live: int) -> list[int]:
    storages, ops = program.storages, program.ops
    events: list[tuple[tuple[int, ...], tuple[int, ...], int]] = []  # reads, writes, scratch bytes
    runs = iter(schedule.runs)
    run = next(runs, None)
    for j, op in enumerate(program.backward):
        while run is not None and run.before == j:
            again = ops[run.op]
            state = () if again.rng_state is None else (again.rng_state,)
            # The replay sets the generator's present state aside, and puts it back after.
            aside = 0 if again.rng_state is None else storages[again.rng_state].bytes
            events.append(((*again.reads, *state), again.writes, again.scratch_bytes + aside))
            run = next(runs, None)
        events.append((op.reads, op.writes, op.scratch_bytes))
    version: dict[int, int] = {}
    last: dict[tuple[int, int], int] = {(s, 0): -1 for s in held}
    for at, (reads, writes, _) in enumerate(events):
        for s in reads:
            last[s, version.get(s, 0)] = at
        for s in writes:
            version[s] = version.get(s, 0) + 1
            last[s, version[s]] = at
    dies: dict[int, list[int]] = {}
    for (s, v), at in last.items():
        if not (v == 0 and storages[s].is_output):
            dies.setdefault(at, []).append(s)
    profile = []
    for s in dies.get(-1, ()):
        live -= storages[s].bytes
    for at, (_, writes, scratch) in enumerate(events):
        live += sum(storages[s].bytes for s in writes)
        profile.append(live + scratch)
        live -= sum(storages[s].bytes for s in dies.get(at, ()))
    return profile


def _extra(program: Program, schedule: Schedule, order: list[int]) -> tuple[float, int]:
    times = dict.fromkeys(range(len(program.ops)), 0)
    for i in order:
        times[i] += 1
    for run in schedule.runs:
        times[run.op] += 1
    seconds, flops = 0.0, 0
    for i, n in times.items():
        more = max(0, n - 1)
        seconds += more * program.ops[i].seconds
        flops += more * program.ops[i].flops
    return seconds, flops


def backward_own_profile(program: Program) -> list[int]:
    """Return, for each backward op, the bytes of the backward's own values live during it, whatever is planned."""
    dies: dict[int, list[int]] = {}
    own = {s for op in program.backward for s in op.writes}
    last: dict[int, int] = {}
    for j, op in enumerate(program.backward):
        for s in (*op.reads, *op.writes):
            if s in own:
                last[s] = j
    for s, j in last.items():
        dies.setdefault(j, []).append(s)
    live, profile = program.tangent_bytes, []
    for j, op in enumerate(program.backward):
        live += sum(program.storages[s].bytes for s in op.writes)
        profile.append(live)
        live -= sum(program.storages[s].bytes for s in dies.get(j, ()))
    return profile


def save_all(program: Program) -> Schedule:
    """Return the uncheckpointed schedule: everything the backward reads is saved, what only the backward needs runs in it once."""
    from fxckpt.passes.schedule import Decisions, emit

    either = frozenset(i for i, op in enumerate(program.ops) if op.side is Side.EITHER and op.pinned is None)
    return emit(program, Decisions((0,), (frozenset(),), (either,)))
