"""Schedule: from the stages' decisions to the order in which things run.

Recompute is placed just in time: an op of a stage's recompute set runs right before the first op of that stage that reads it, its own
inputs first. A read sees the latest copy; a copy dies after its last read before the next one is made.
"""

from __future__ import annotations

from dataclasses import dataclass

from fxckpt.passes.facts import Program, Side


@dataclass(frozen=True)
class Run:
    """Op ``op`` runs again in front of backward op ``before`` (both by index)."""

    op: int
    before: int


@dataclass(frozen=True)
class Schedule:
    """What the forward saves (storages) and what the backward runs again, in order. The whole of a plan, by index."""

    saved: tuple[int, ...]
    runs: tuple[Run, ...]


@dataclass(frozen=True)
class Decisions:
    """Per stage: storages taken from before the stage, and ops run again in it."""

    starts: tuple[int, ...]
    """First backward op of each stage; ``starts[0] == 0``."""
    kept: tuple[frozenset[int], ...]
    runs: tuple[frozenset[int], ...]


def stage_ranges(program: Program, starts: tuple[int, ...]) -> list[range]:
    """Return the backward ops of each stage."""
    ends = (*starts[1:], len(program.backward))
    return [range(a, b) for a, b in zip(starts, ends, strict=True)]


def emit(program: Program, decisions: Decisions) -> Schedule:
    """Return the schedule of the decisions.

    A value that a decision takes from before but that nobody made there is saved from the forward; so any decisions that a cut can make
    are legal, and what is saved follows from them.
    """
    saved: dict[int, None] = {}
    runs: list[Run] = []
    have: set[int] = set()  # storages with a copy, from whatever stage
    for k, positions in enumerate(stage_ranges(program, decisions.starts)):
        fresh: set[int] = set()  # ops that ran in this stage
        for j in positions:
            for root in program.forward_reads(j):
                _ensure(program, root, decisions.kept[k], decisions.runs[k], have, fresh, saved, runs, j)
    return Schedule(tuple(sorted(saved)), tuple(runs))


def _ensure(
    program: Program,
    root: int,
    kept: frozenset[int],
    rerun: frozenset[int],
    have: set[int],
    fresh: set[int],
    saved: dict[int, None],
    runs: list[Run],
    position: int,
) -> None:
    stack = [root]
    while stack:
        s = stack[-1]
        op_index = program.storages[s].producer
        if op_index in fresh:
            stack.pop()
            continue
        if op_index < 0 or s in kept or op_index not in rerun:
            if s not in have:
                saved[s] = None
                have.add(s)
            stack.pop()
            continue
        op = program.ops[op_index]
        needs = op.reads if op.rng_state is None else (*op.reads, op.rng_state)
        missing = [u for u in needs if not _at_hand(program, u, kept, rerun, have, fresh)]
        if missing:
            stack.extend(reversed(missing))
            continue
        runs.append(Run(op_index, position))
        fresh.add(op_index)
        have.update(op.writes)
        stack.pop()


def _at_hand(program: Program, s: int, kept: frozenset[int], rerun: frozenset[int], have: set[int], fresh: set[int]) -> bool:
    op = program.storages[s].producer
    return op in fresh or (s in have and (op < 0 or s in kept or op not in rerun))


def forward_ops(program: Program, saved: tuple[int, ...]) -> list[int]:
    """Return the ops the forward runs: what its outputs need, and what the saved values need."""
    needed = {i for i, op in enumerate(program.ops) if op.side is Side.FORWARD}
    stack = [program.storages[s].producer for s in saved]
    while stack:
        i = stack.pop()
        if i >= 0 and i not in needed:
            needed.add(i)
            stack.extend(program.storages[s].producer for s in program.ops[i].reads)
    return sorted(needed)
