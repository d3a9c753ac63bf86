"""Schedule: from the stages' decisions to the order in which things run.

Recompute is placed just in time: an op of a stage's recompute set runs right before the first op of that stage that reads it, its own
inputs first. A read sees the latest copy; a copy dies after its last read before the next one is made.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import chain

from fxckpt.solver.program import Program, Side


@dataclass(frozen=True)
class Schedule:
    """What the forward saves (storages) and what the backward runs again, in order. The whole of a plan, by index."""

    saved: tuple[int, ...]
    runs: tuple[int, ...]
    """Ops that run again, once for every run."""
    before: tuple[int, ...]
    """Per run: the backward op it runs in front of."""


@dataclass(frozen=True)
class StageAssignment:
    """Per stage: storages taken from before the stage, and ops run again in it."""

    starts: tuple[int, ...]
    """First backward op of each stage; ``starts[0] == 0``."""
    kept: tuple[frozenset[int], ...]
    runs: tuple[frozenset[int], ...]


def stage_ranges(program: Program, starts: tuple[int, ...]) -> list[range]:
    """Return the backward ops of each stage."""
    ends = (*starts[1:], len(program.backward))
    return [range(a, b) for a, b in zip(starts, ends, strict=True)]


def emit(program: Program, decisions: StageAssignment) -> Schedule:
    """Return the schedule of the decisions.

    A value that a decision takes from before but that nobody made there is saved from the forward; so any decisions that a cut can make
    are legal, and what is saved follows from them.
    """
    producer, ops, wanted = program.producers, program.ops, program.forward_reads
    saved: set[int] = set()
    runs: list[int] = []
    before: list[int] = []
    have: set[int] = set()  # storages with a copy, from whatever stage
    for k, positions in enumerate(stage_ranges(program, decisions.starts)):
        kept, rerun = decisions.kept[k], decisions.runs[k]
        if not rerun:
            needed = set(chain.from_iterable(wanted[positions.start : positions.stop]))
            saved |= needed - have
            have |= needed
            continue
        fresh: set[int] = set()  # ops that ran in this stage
        opened: set[int] = set()  # ops whose inputs are on the stack above them, or at hand
        for j in positions:
            stack = [s for s in wanted[j][::-1] if producer[s] not in fresh]
            while stack:
                s = stack[-1]
                o = producer[s]
                if o in fresh:
                    stack.pop()
                    continue
                if o not in rerun or s in kept:
                    if s not in have:
                        saved.add(s)
                        have.add(s)
                    stack.pop()
                    continue
                if o not in opened:
                    opened.add(o)
                    inputs = ops[o].needs
                    missing = [
                        u
                        for u in inputs
                        if (p := producer[u]) not in fresh
                        and (u not in have or (p in rerun and u not in kept))
                    ]
                    if missing:
                        stack.extend(reversed(missing))
                        continue
                runs.append(o)
                before.append(j)
                fresh.add(o)
                have.update(ops[o].writes)
                stack.pop()
    return Schedule(tuple(sorted(saved)), tuple(runs), tuple(before))


def save_all(program: Program) -> Schedule:
    """Return the uncheckpointed schedule: everything the backward reads is saved, what only the backward needs runs in it once."""
    either = frozenset(
        i for i, op in enumerate(program.ops) if op.side is Side.EITHER and op.no_recompute is None
    )
    return emit(program, StageAssignment((0,), (frozenset(),), (either,)))


def with_runs(program: Program, runs: tuple[int, ...], before: tuple[int, ...]) -> Schedule:
    """Return the schedule of these runs, without those that nobody reads: what is read before it is made again is saved."""
    wanted: set[int] = set()
    kept: list[int] = []
    at = len(runs) - 1
    for j in range(len(program.backward) - 1, -1, -1):
        wanted.update(program.forward_reads[j])
        while at >= 0 and before[at] == j:
            op = program.ops[runs[at]]
            if not wanted.isdisjoint(op.writes):
                kept.append(at)
                wanted.difference_update(op.writes)
                wanted.update(op.needs)
            at -= 1
    kept.reverse()
    return Schedule(
        tuple(sorted(wanted)), tuple([runs[i] for i in kept]), tuple([before[i] for i in kept])
    )


def forward_ops(program: Program, saved: tuple[int, ...]) -> list[int]:
    """Return the ops the forward runs: what its outputs need, and what the saved values need."""
    always, producers = program.always_forward, program.producers
    more: set[int] = set()
    stack = [i for s in saved if (i := producers[s]) >= 0 and i not in always]
    while stack:
        i = stack.pop()
        if i not in more:
            more.add(i)
            stack.extend(
                [p for s in program.ops[i].reads if (p := producers[s]) >= 0 and p not in always]
            )
    return sorted([*always, *more])
