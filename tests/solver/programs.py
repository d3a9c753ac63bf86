"""Random programs and assignments, and an interpreter that shares no code with the simulator."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace

from hypothesis import strategies as st

from fxckpt.reason import Reason
from fxckpt.solver.cuts.stages import StageBoundaries
from fxckpt.solver.program import FORWARD_ONLY, IN_BACKWARD, Op, Program, Side, Storage
from fxckpt.solver.schedule import Schedule, StageAssignment
from fxckpt.solver.search.price_search import PriceSearch

STATE_BYTES = 3
QUICK_SEARCH = PriceSearch(
    stage_counts=(2, 5),
    small_factors=(1.0, 4.0),
    least_peak_prices=2,
    refined=2,
    perturbations=(0.9,),
    restarts=3,
)
"""A search of few steps."""


@st.composite
def programs(draw: st.DrawFn, max_ops: int = 8, *, in_place: bool = True) -> Program:
    """Draw forward ops that read earlier values, and a backward that reads the last ones first.

    With ``in_place``, ops may write their results into operands.
    """
    storages: list[Storage] = []
    ops = _forward_ops(draw, storages, max_ops, in_place=in_place)
    backward, own = _backward_ops(draw, storages, max_ops, in_place=in_place)
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


def _forward_ops(
    draw: st.DrawFn, storages: list[Storage], max_ops: int, *, in_place: bool
) -> list[Op]:
    """Draw the ops of a forward, and add what they write to the storages."""
    ops: list[Op] = []
    for i in range(draw(st.integers(1, max_ops))):
        reads = (
            tuple(sorted(draw(st.sets(st.integers(0, len(storages) - 1), max_size=3))))
            if storages
            else ()
        )
        reads = tuple(s for s in reads if storages[s].producer != FORWARD_ONLY)
        writes = []
        count_written = draw(st.sampled_from([1, 1, 1, 2]))
        takes = _takes(draw, storages, reads) if in_place and count_written == 1 else ()
        for _ in range(count_written):
            writes.append(len(storages))
            storages.append(
                Storage(
                    f"v{len(storages)}",
                    storages[takes[0]].bytes if takes else draw(st.integers(0, 20)),
                    i,
                    is_output=draw(st.integers(0, 9)) == 0,
                    held_to=draw(st.integers(0, max_ops)) if draw(st.integers(0, 9)) == 0 else -1,
                )
            )
        state = None
        no_recompute = Reason.EFFECT if draw(st.integers(0, 9)) == 0 else None
        if draw(st.integers(0, 5)) == 0:
            state = len(storages)
            stays = draw(st.booleans()) if no_recompute is None else True
            held_to = draw(st.integers(i, max_ops)) if stays else -1
            storages.append(
                Storage(f"v{writes[0]}.rng_state", STATE_BYTES, FORWARD_ONLY, held_to=held_to)
            )
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
                takes,
            )
        )
    _draw_sides(draw, storages, ops)
    return ops


def _draw_sides(draw: st.DrawFn, storages: list[Storage], ops: list[Op]) -> None:
    """Let ops that the forward does not need run in either half."""
    is_needed = {s for op in ops if op.side is Side.FORWARD for s in op.reads} | {
        i for i, s in enumerate(storages) if s.is_output
    }
    for i in reversed(range(len(ops))):
        if (
            not is_needed & set(ops[i].writes)
            and ops[i].no_recompute is None
            and ops[i].rng_state is None
            and draw(st.booleans())
        ):
            ops[i] = replace(ops[i], side=Side.EITHER, workspace_bytes=0)
        elif ops[i].side is Side.FORWARD:
            is_needed |= set(ops[i].reads)


def _backward_ops(
    draw: st.DrawFn, storages: list[Storage], max_ops: int, *, in_place: bool
) -> tuple[list[Op], list[int]]:
    """Draw the ops of a backward; return them, and the storages that they write."""
    values = [i for i, s in enumerate(storages) if s.producer >= 0]
    backward: list[Op] = []
    own: list[int] = []
    for j in range(draw(st.integers(1, max_ops))):
        near = values[max(0, len(values) - 4 * (j + 1)) : len(values) - 2 * j or None] or values
        reads = set(draw(st.lists(st.sampled_from(near), max_size=3))) | set(own[-1:])
        takes = _takes(draw, storages, tuple(sorted(reads))) if in_place else ()
        nbytes = storages[takes[0]].bytes if takes else draw(st.integers(0, 20))
        storages.append(Storage(f"g{j}", nbytes, IN_BACKWARD))
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
                takes=takes,
            )
        )
    return backward, own


def _takes(draw: st.DrawFn, storages: list[Storage], reads: tuple[int, ...]) -> tuple[int, ...]:
    """Draw the operands that an op may write its result into, all of the same bytes."""
    if not reads or draw(st.booleans()):
        return ()
    first = draw(st.sampled_from(reads))
    return (first, *(s for s in reads if s != first and storages[s].bytes == storages[first].bytes))


def chain(length: int, nbytes: int = 10, seconds: float = 1.0) -> Program:
    """Return a chain whose backward reads each value, the last first, and frees a gradient each."""
    values = [Storage(f"v{i}", nbytes, i) for i in range(length)]
    gradients = [Storage(f"g{i}", nbytes, IN_BACKWARD) for i in range(length)]
    forward = tuple(
        Op(f"f{i}", Side.FORWARD, seconds, 1, (i - 1,) if i else (), (i,)) for i in range(length)
    )
    backward = tuple(
        Op(
            f"b{i}",
            Side.BACKWARD,
            seconds,
            1,
            (i, *((length + i + 1,) if i + 1 < length else ())),
            (length + i,),
        )
        for i in reversed(range(length))
    )
    return Program(forward, backward, (*values, *gradients), ())


def blocks(count: int, crossing: int, inner: int) -> Program:
    """Return a stack of blocks, of ``inner`` bytes each and of ``crossing`` bytes between them.

    The backward of a block reads both, and passes on a gradient of ``crossing`` bytes.
    """
    storages = [Storage("x", crossing, 0)]
    ops = [Op("x", Side.FORWARD, 1.0, 1, (), (0,))]
    for k in range(count):
        x = 2 * k
        ops.append(Op(f"wide{k}", Side.FORWARD, 1.0, 1, (x,), (x + 1,)))
        ops.append(Op(f"narrow{k}", Side.FORWARD, 1.0, 1, (x + 1,), (x + 2,)))
        storages.append(Storage(f"wide{k}", inner, x + 1))
        storages.append(Storage(f"narrow{k}", crossing, x + 2))
    tangent = gradient = len(storages)
    storages.append(Storage("tangent", crossing, IN_BACKWARD))
    backward = []
    for k in reversed(range(count)):
        wide, narrow = len(storages), len(storages) + 1
        backward.append(Op(f"b_wide{k}", Side.BACKWARD, 1.0, 1, (gradient, 2 * k + 1), (wide,)))
        backward.append(Op(f"b_narrow{k}", Side.BACKWARD, 1.0, 1, (wide, 2 * k), (narrow,)))
        storages.append(Storage(f"b_wide{k}", inner, IN_BACKWARD))
        storages.append(Storage(f"b_narrow{k}", crossing, IN_BACKWARD))
        gradient = narrow
    backward.append(Op("output", Side.BACKWARD, 0.0, 0, (gradient,), ()))
    return Program(tuple(ops), tuple(backward), tuple(storages), (tangent,))


def two_values() -> Program:
    """Return a program of two values of ten bytes, computed in one and in nine seconds."""
    return Program(
        ops=(
            Op("cheap", Side.FORWARD, 1.0, 1, (), (0,)),
            Op("expensive", Side.FORWARD, 9.0, 9, (), (1,)),
        ),
        backward=(
            Op("b0", Side.BACKWARD, 1.0, 1, (1,), (2,)),
            Op("b1", Side.BACKWARD, 1.0, 1, (0,), (3,)),
        ),
        storages=(
            Storage("cheap", 10, 0),
            Storage("expensive", 10, 1),
            Storage("g0", 1, IN_BACKWARD),
            Storage("g1", 1, IN_BACKWARD),
        ),
        tangents=(),
    )


def on_either_side() -> Program:
    """Return the program of two values, the cheap one of which may run in the backward alone."""
    program = two_values()
    first = replace(program.ops[0], side=Side.EITHER)
    return replace(program, ops=(first, program.ops[1]))


@st.composite
def assignments(draw: st.DrawFn, program: Program) -> StageAssignment:
    """Draw any assignment that a cut could find."""
    starts = StageBoundaries(program).stages(draw(st.integers(1, 4)))
    runnable = [i for i, op in enumerate(program.ops) if op.no_recompute is None]
    values = range(len(program.storages))
    kept = [frozenset(draw(st.sets(st.sampled_from(values)))) for _ in starts]
    runs = [
        frozenset(draw(st.sets(st.sampled_from(runnable)) if runnable else st.just(set())))
        for _ in starts
    ]
    return StageAssignment(starts, tuple(kept), tuple(runs))


Event = tuple[set[int], set[int], int, tuple[int, ...]]
"""Storages read, storages written, bytes of workspace, and storages that may be taken."""


@dataclass
class Outcome:
    """Profile and extra time of an interpreted schedule."""

    profile: list[int]
    seconds: float


def interpret(program: Program, schedule: Schedule) -> Outcome:
    """Run a schedule event by event.

    An assertion fails on a read of a dead value, and on a recompute of an op that forbids it.
    """
    outputs = {i for i, s in enumerate(program.storages) if s.is_output}
    order = _forward_order(program, schedule)
    times = Counter(order)
    kept = outputs | set(schedule.saved)
    staying = {i for i, s in enumerate(program.storages) if s.held_to >= 0}
    forward: list[Event] = []
    for i in order:
        op = program.ops[i]
        forward.append(
            (
                set(op.reads),
                set(op.writes) | ({op.rng_state} & (kept | staying)),
                op.workspace_bytes,
                op.takes,
            )
        )
    backward: list[Event] = []
    for j, op in enumerate(program.backward):
        for o in [
            o for o, before in zip(schedule.runs, schedule.before, strict=True) if before == j
        ]:
            recomputed = program.ops[o]
            assert recomputed.no_recompute is None
            times[o] += 1
            backward.append(
                (
                    set(recomputed.needs),
                    set(recomputed.writes),
                    recomputed.workspace_bytes + STATE_BYTES * (recomputed.rng_state is not None),
                    recomputed.takes,
                )
            )
        backward.append((set(op.reads), set(op.writes), op.workspace_bytes, op.takes))
    held_to = {s: sum(o <= program.storages[s].held_to for o in order) - 1 for s in staying}
    first, live = _play(program, forward, set(), kept, set(), 0, held_to)
    live = live - outputs | set(program.tangents)
    second, _ = _play(program, backward, live, set(), outputs, 0, {})
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
    program: Program,
    events: list[Event],
    live: set[int],
    kept: set[int],
    held: set[int],
    base: int,
    held_to: dict[int, int],
) -> tuple[list[int], set[int]]:
    """Return the profile of events, and the storages live after them.

    The storages ``kept`` never die, and those of ``held_to`` not before an event; ``held`` are live
    from the start, beside ``live``, and are read where they are, so that copies of them are dead
    at once.
    """
    size = [s.bytes for s in program.storages]
    base += sum(size[s] for s in held)
    live = {s for s in live if _read_later(s, events)}
    untouched = live.copy()
    profile = []
    for at, (reads, writes, workspace, takes) in enumerate(events):
        assert reads <= live | held, f"event {at} reads {reads - live - held}, which is dead"
        is_own = live - untouched - kept
        taken = [
            s
            for s in takes
            if s in is_own and not _read_later(s, events[at + 1 :]) and held_to.get(s, -1) < at
        ]
        live |= writes
        untouched -= writes
        profile.append(
            base + workspace + sum(size[s] for s in live) - sum(size[s] for s in taken[:1])
        )
        live = {
            s
            for s in live
            if s in kept or _read_later(s, events[at + 1 :]) or held_to.get(s, -1) > at
        } - held
    return profile, live


def _read_later(s: int, events: list[Event]) -> bool:
    for reads, writes, *_ in events:
        if s in reads or s in writes:
            return s in reads
    return False
