"""Schedule: saved storages, and recomputes in the order of the backward.

Recomputes are placed just in time: an op that a stage recomputes runs right before the first op of
that stage that reads its result, after its own inputs. A read sees the latest copy of a value; a
copy dies after its last read before the next copy is written.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import chain
from typing import NamedTuple

from fxckpt.solver.program import Program, Side


class Away(NamedTuple):
    """A saved storage that is away from the device during some ops.

    Positions are those of the profile: the forward's ops, then recomputes and backward ops as they
    run. The storage is gone when op ``first`` begins, and its memory is taken again when op
    ``last`` has ended.
    """

    storage: int
    first: int
    last: int


@dataclass(frozen=True)
class Schedule:
    """A complete plan in the indices of a program."""

    saved: tuple[int, ...]
    """Storages that the forward saves, ascending."""
    runs: tuple[int, ...]
    """Forward op of each recompute, in execution order."""
    before: tuple[int, ...]
    """Backward op that each recompute precedes."""
    away: tuple[Away, ...] = ()
    """Saved storages that are sent away, ascending."""


@dataclass(frozen=True)
class StageAssignment:
    """Decisions about values, stage by stage."""

    starts: tuple[int, ...]
    """First backward op of each stage; ``starts[0] == 0``."""
    kept: tuple[frozenset[int], ...]
    """Storages that each stage takes from before it."""
    runs: tuple[frozenset[int], ...]
    """Ops that each stage recomputes."""


def stage_ranges(program: Program, starts: tuple[int, ...]) -> list[range]:
    """Return the backward ops of each stage."""
    ends = (*starts[1:], len(program.backward))
    return [range(a, b) for a, b in zip(starts, ends, strict=True)]


def emit(program: Program, assignment: StageAssignment) -> Schedule:
    """Return the schedule of an assignment.

    A value that a stage takes from before, but that no earlier stage holds, is saved from the
    forward, and so is a forward output that is read: also where its op is recomputed for another
    result. So every assignment is legal, and the saved values follow from it.
    """
    producer, ops, wanted = program.producers, program.ops, program.forward_reads
    saved: set[int] = set()
    runs: list[int] = []
    before: list[int] = []
    available = set(program.outputs)  # storages held, saved, or written by an earlier recompute
    for k, positions in enumerate(stage_ranges(program, assignment.starts)):
        kept, recomputed = assignment.kept[k] | program.outputs, assignment.runs[k]
        if not recomputed:
            needed = set(chain.from_iterable(wanted[positions.start : positions.stop]))
            saved |= needed - available
            available |= needed
            continue
        done: set[int] = set()  # ops recomputed in this stage
        opened: set[int] = set()  # ops whose inputs are available, or above them on the stack
        for j in positions:
            stack = [s for s in wanted[j][::-1] if producer[s] not in done]
            while stack:
                s = stack[-1]
                o = producer[s]
                if o in done:
                    stack.pop()
                    continue
                if o not in recomputed or s in kept:
                    if s not in available:
                        saved.add(s)
                        available.add(s)
                    stack.pop()
                    continue
                if o not in opened:
                    opened.add(o)
                    inputs = ops[o].needs
                    missing = [
                        u
                        for u in inputs
                        if (p := producer[u]) not in done
                        and (u not in available or (p in recomputed and u not in kept))
                    ]
                    if missing:
                        stack.extend(reversed(missing))
                        continue
                runs.append(o)
                before.append(j)
                done.add(o)
                available.update(ops[o].writes)
                stack.pop()
    return Schedule(_with_outputs_read(program, saved, runs), tuple(runs), tuple(before))


def _with_outputs_read(program: Program, saved: set[int], runs: Iterable[int]) -> tuple[int, ...]:
    """Return ``saved`` and the forward outputs that the backward with these recomputes reads."""
    needed = chain.from_iterable([program.ops[o].needs for o in runs])
    return tuple(sorted(saved | program.outputs_read | program.outputs.intersection(needed)))


def save_all(program: Program) -> Schedule:
    """Return the uncheckpointed schedule: every forward value that the backward reads is saved.

    Ops that only the backward depends on run in it, once.
    """
    either = frozenset(
        i for i, op in enumerate(program.ops) if op.side is Side.EITHER and op.no_recompute is None
    )
    return emit(program, StageAssignment((0,), (frozenset(),), (either,)))


def with_runs(program: Program, runs: tuple[int, ...], before: tuple[int, ...]) -> Schedule:
    """Return the schedule of these recomputes, without dead ones.

    Values that are read before they are recomputed are saved, and so is a forward output that is
    read.
    """
    outputs = program.outputs
    wanted: set[int] = set()
    kept: list[int] = []
    at = len(runs) - 1
    for j in range(len(program.backward) - 1, -1, -1):
        wanted.update(program.forward_reads[j])
        while at >= 0 and before[at] == j:
            op = program.ops[runs[at]]
            copied = set(op.writes) - outputs
            if not wanted.isdisjoint(copied):
                kept.append(at)
                wanted.difference_update(copied)
                wanted.update(op.needs)
            at -= 1
    kept.reverse()
    return Schedule(
        tuple(sorted(wanted)), tuple([runs[i] for i in kept]), tuple([before[i] for i in kept])
    )


def forward_ops(program: Program, saved: tuple[int, ...]) -> list[int]:
    """Return the ops that the forward runs for its outputs and for the saved values, in order."""
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
