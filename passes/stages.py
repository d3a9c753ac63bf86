"""Stages: cut the backward's op order into spans at narrow places.

A narrow place is a position where few bytes of forward values are read on both sides and few bytes of gradients are live: there a
recomputed value is seldom worth keeping across. One boundary is chosen in each of ``count`` windows of equal time.
"""

from __future__ import annotations

from dataclasses import dataclass

from fxckpt.passes.program import Program
from fxckpt.passes.simulate import backward_own_profile


@dataclass(frozen=True)
class CutIntoStages:
    """Choose at most ``count`` stages."""

    count: int

    def __call__(self, program: Program) -> tuple[int, ...]:
        """Return the first backward op of each stage."""
        n = len(program.backward)
        if self.count <= 1 or n <= 2:
            return (0,)
        width = crossing_bytes(program)
        starts = [0]
        for k in range(1, self.count):
            low, high = (2 * k - 1) * n // (2 * self.count), (2 * k + 1) * n // (2 * self.count)
            window = range(max(low, starts[-1] + 1), min(max(high, low + 1), n))
            if window:
                starts.append(min(window, key=lambda j: (width[j], j)))
        return tuple(starts)


def crossing_bytes(program: Program) -> list[int]:
    """Return, for each backward op, the bytes that would be live across a boundary right before it."""
    n = len(program.backward)
    own = backward_own_profile(program)
    first: dict[int, int] = {}
    last: dict[int, int] = {}
    written = {s for op in program.backward for s in op.writes}
    for j, op in enumerate(program.backward):
        for s in op.reads:
            if s not in written:
                first.setdefault(s, j)
                last[s] = j
    change = [0] * (n + 1)
    for s, j in first.items():
        change[j + 1] += program.storages[s].bytes
        change[last[s] + 1] -= program.storages[s].bytes
    width, live = [], 0
    for j in range(n):
        live += change[j]
        before = own[j] - sum(program.storages[s].bytes for s in program.backward[j].writes)
        width.append(live + before)
    return width
