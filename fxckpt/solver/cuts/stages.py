"""Stages: spans of the backward's op order, cut where few bytes cross.

Few bytes cross a position if few forward values are read on both sides of it and few gradients are
passed over it: there a recomputed value is seldom worth keeping. The persistence of such a local
minimum (Edelsbrunner, Letscher and Zomorodian 2002), its depth below the way to a lower one, tells
the boundaries of blocks from those inside blocks. Identical layers have boundaries of equal depth.
Stages are cut at all positions of a depth or at none, so that every stage is a block, or the same
part of one.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from fxckpt.solver.program import IN_BACKWARD, IntArray, Program
from fxckpt.utils.intervals import live_bytes


@dataclass(frozen=True)
class StageBoundaries:
    """Candidate stage boundaries of one program."""

    program: Program

    def stages(self, count: int) -> tuple[int, ...]:
        """Return the first backward op of each of about ``count`` stages.

        There are at most 1.5 times as many stages, and fewer if the program has fewer ops.
        """
        boundaries = deepest(self.depth, count - 1)
        if len(boundaries) > 1.5 * (count - 1):
            step = math.ceil(len(boundaries) / max(count - 1, 1))
            boundaries = boundaries[step - 1 :: step]
        return split_long((0, *boundaries), count, self.width)

    @cached_property
    def width(self) -> IntArray:
        """Bytes that cross a boundary before each backward op, without returned gradients."""
        return boundary_widths(self.program)

    @cached_property
    def depth(self) -> dict[int, int]:
        """Persistence of each local minimum of :attr:`width`."""
        return persistence(self.width)


def split_long(starts: tuple[int, ...], count: int, width: IntArray) -> tuple[int, ...]:
    """Return the starts of spans, and of parts of those longer than 1.5 times a ``count``-th.

    Spans are split near even cuts, where ``width``, the bytes before each position, is least.
    """
    n = len(width)
    longest = max(1, math.ceil(1.5 * n / count))
    split: list[int] = []
    for first, end in zip(starts, (*starts[1:], n), strict=True):
        split.append(first)
        pieces = math.ceil((end - first) / longest)
        for k in range(1, pieces):
            middle, slack = first + k * (end - first) / pieces, (end - first) / (4 * pieces)
            window = range(
                max(round(middle - slack), split[-1] + 1),
                min(max(round(middle + slack), split[-1] + 1) + 1, end),
            )
            if window:
                split.append(min(window, key=lambda j: (int(width[j]), j)))
    return tuple(split)


def boundary_widths(program: Program) -> IntArray:
    """Return :attr:`StageBoundaries.width`."""
    first = dict.fromkeys(program.tangents, -1)
    last: dict[int, int] = {}
    for j, op in enumerate(program.backward):
        for s in op.writes:
            first.setdefault(s, j)
        for s in (*op.reads, *op.writes):
            if program.storages[s].producer != IN_BACKWARD or s in first:
                first.setdefault(s, j)
                last[s] = j
    returned = (
        {s for s in program.backward[-1].reads if program.storages[s].producer == IN_BACKWARD}
        if program.backward
        else set()
    )
    return live_bytes(
        (
            (j + 1, last[s], program.storages[s].bytes)
            for s, j in first.items()
            if s not in returned
        ),
        len(program.backward),
    )


def persistence(heights: IntArray) -> dict[int, int]:
    """Return the persistence of each local minimum: the climb from it to a lower one.

    The global minimum has the climb to the maximum. Of equal minima the later one climbs to the
    earlier; the first position of a level stretch stands for all of it.
    """
    # scipy.signal is slow to import, and a process that only imports fxckpt needs no plan.
    from scipy.signal import argrelmin, peak_prominences

    if not len(heights):
        return {}
    rank = np.empty(len(heights), dtype=np.int64)
    rank[np.argsort(heights, kind="stable")] = np.arange(len(heights))
    # Walls at both ends, so that the way to a lower minimum never leads over them.
    walled = np.pad(rank, 1, constant_values=len(heights))
    (minima,) = argrelmin(walled)
    _, *bases = peak_prominences(-walled, minima)
    saddle = np.pad(heights, 1, constant_values=heights.max())[np.array(bases)].min(axis=0)
    climb = saddle - heights[minima - 1]
    counts = (climb > 0) | (rank[minima - 1] == 0)
    return dict(zip((minima - 1)[counts].tolist(), climb[counts].tolist(), strict=True))


def deepest(depth: dict[int, int], count: int) -> tuple[int, ...]:
    """Return about ``count`` positions of greatest depth, all of one depth or none.

    The start is never among them.
    """
    classes = sorted(Counter(d for place, d in depth.items() if place > 0).items(), reverse=True)
    sums = np.cumsum([n for _, n in classes])
    if not len(sums) or count < 1:
        return ()
    least = classes[int(np.abs(np.log(sums / count)).argmin())][0]
    return tuple(place for place in sorted(depth) if place > 0 and depth[place] >= least)
