"""Random programs, and an interpreter of schedules that shares no code with the simulator."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace

from hypothesis import strategies as st

from fxckpt.reason import Reason
from fxckpt.solver.program import FORWARD_ONLY, IN_BACKWARD, Op, Program, Side, Storage
from fxckpt.solver.schedule import Schedule

STATE_BYTES = 3


@st.composite
def programs(draw: st.DrawFn, max_ops: int = 8) -> Program:
    """Forward ops that read earlier values, and a backward that reads them in about reverse order."""
    storages: list[Storage] = []
    ops: list[Op] = []
    count = draw(st.integers(1, max_ops))
    for i in range(count):
        reads = (
            tuple(sorted(draw(st.sets(st.integers(0, len(storages) - 1), max_size=3))))
            if storages
            else ()
        )
        reads = tuple(s for s in reads if storages[s].producer != FORWARD_ONLY)
        writes = []
        for _ in range(draw(st.sampled_from([1, 1, 1, 2]))):
            writes.append(len(storages))
            storages.append(
                Storage(
                    f"v{len(storages)}",
                    draw(st.integers(0, 20)),
                    i,
                    is_output=draw(st.integers(0, 9)) == 0,
                )
            )
        state = None
        no_recompute = Reason.EFFECT if draw(st.integers(0, 9)) == 0 else None
        if no_recompute is None and draw(st.integers(0, 5)) == 0:
            state = len(storages)
            storages.append(Storage(f"v{writes[0]}.rng_state", STATE_BYTES, FORWARD_ONLY))
        seconds = float(draw(st.integers(0, 9)))
        workspace = draw(st.sampled_from([0, 0, 5]))
        ops.append(
            Op(
                f"f{i}",
                Side.FORWARD,
                seconds,
                int(seconds),
                reads,
                tuple(writes),
                no_recompute,
                state,
                workspace,
            )
        )
    is_needed = {s for op in ops if op.side is Side.FORWARD for s in op.reads} | {
        i for i, s in enumerate(storages) if s.is_output
    }
    for i in reversed(range(count)):
        if (
            not is_needed & set(ops[i].writes)
            and ops[i].no_recompute is None
            and ops[i].rng_state is None
            and draw(st.booleans())
        ):
            ops[i] = Op(
                f"f{i}", Side.EITHER, ops[i].seconds, ops[i].flops, ops[i].reads, ops[i].writes
            )
        elif ops[i].side is Side.FORWARD:
            is_needed |= set(ops[i].reads)
    values = [i for i, s in enumerate(storages) if s.producer >= 0]
    backward: list[Op] = []
    own: list[int] = []
    for j in range(draw(st.integers(1, max_ops))):
        near = values[max(0, len(values) - 4 * (j + 1)) : len(values) - 2 * j or None] or values
        reads = set(draw(st.lists(st.sampled_from(near), max_size=3))) | set(own[-1:])
        storages.append(Storage(f"g{j}", draw(st.integers(0, 20)), IN_BACKWARD))
        own.append(len(storages) - 1)
        backward.append(
            Op(
                f"b{j}",
                Side.BACKWARD,
                1.0,
                1,
                tuple(sorted(reads)),
                (own[-1],),
                workspace_bytes=draw(st.sampled_from([0, 5])),
            )
        )
    tangents = []
    for i in range(draw(st.sampled_from([0, 1, 1, 2]))):
        tangents.append(len(storages))
        storages.append(Storage(f"t{i}", draw(st.integers(0, 20)), IN_BACKWARD))
    returned = draw(st.sets(st.sampled_from([*own, *tangents])))
    for t in tangents:
        readers = draw(st.sets(st.integers(0, len(backward) - 1)))
        for j in readers:
            backward[j] = replace(backward[j], reads=(*backward[j].reads, t))
        if not readers:
            returned.add(t)
    backward.append(Op("output", Side.BACKWARD, 0.0, 0, tuple(sorted(returned)), ()))
    return Program(tuple(ops), tuple(backward), tuple(storages), tuple(tangents))


Event = tuple[set[int], set[int], int]
"""Storages read, storages written, bytes only while it runs."""


@dataclass
class Outcome:
    """What running a schedule came to."""

    profile: list[int]
    seconds: float


def interpret(program: Program, schedule: Schedule) -> Outcome:
    """Run a schedule event by event; an assertion fails on a read of what is not there or a second run of what must not."""
    outputs = {i for i, s in enumerate(program.storages) if s.is_output}
    order = _forward_order(program, schedule)
    times = Counter(order)
    kept = outputs | set(schedule.saved)
    forward: list[Event] = []
    for i in order:
        op = program.ops[i]
        forward.append(
            (set(op.reads), set(op.writes) | ({op.rng_state} & kept), op.workspace_bytes)
        )
    backward: list[Event] = []
    for j, op in enumerate(program.backward):
        for o in [
            o for o, before in zip(schedule.runs, schedule.before, strict=True) if before == j
        ]:
            again = program.ops[o]
            assert again.no_recompute is None
            times[o] += 1
            backward.append(
                (
                    set(again.needs),
                    set(again.writes),
                    again.workspace_bytes + STATE_BYTES * (again.rng_state is not None),
                )
            )
        backward.append((set(op.reads), set(op.writes), op.workspace_bytes))
    first, live = _play(program, forward, set(), kept, set(), 0)
    second, _ = _play(program, backward, live - outputs | set(program.tangents), set(), outputs, 0)
    return Outcome(
        first + second, sum((n - 1) * program.ops[o].seconds for o, n in times.items() if n > 1)
    )


def _forward_order(program: Program, schedule: Schedule) -> list[int]:
    needed = {i for i, op in enumerate(program.ops) if op.side is Side.FORWARD}
    stack = [program.storages[s].producer for s in schedule.saved]
    while stack:
        i = stack.pop()
        if i >= 0 and i not in needed:
            needed.add(i)
            stack.extend(program.storages[s].producer for s in program.ops[i].reads)
    return sorted(needed)


def _play(
    program: Program, events: list[Event], live: set[int], kept: set[int], held: set[int], base: int
) -> tuple[list[int], set[int]]:
    """Play events; ``kept`` never die, ``held`` are beside what is live from the start."""
    size = [s.bytes for s in program.storages]
    base += sum(size[s] for s in held)
    live = {s for s in live if _read_later(s, events)}
    profile = []
    for at, (reads, writes, only_now) in enumerate(events):
        assert reads <= live | held, f"event {at} reads {reads - live - held}, which is not there"
        live |= writes
        profile.append(base + only_now + sum(size[s] for s in live))
        live = {s for s in live if s in kept or _read_later(s, events[at + 1 :])}
    return profile, live


def _read_later(s: int, events: list[Event]) -> bool:
    for reads, writes, _ in events:
        if s in reads or s in writes:
            return s in reads
    return False
