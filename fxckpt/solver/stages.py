"""Stages: cut the backward's op order into spans at narrow places.

A narrow place is a position where few bytes of forward values are read on both sides and few bytes of gradients are passed on: there a
recomputed value is seldom worth keeping across. How much deeper a place is than the way to a narrower one (its persistence, as the terms of
merge trees go: Edelsbrunner, Letscher and Zomorodian 2002) tells the boundaries of blocks from those inside them, and identical layers
have boundaries of equal depth; stages are cut at all places of a depth or at none, so that a stage is a block, or a half of it, all along.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from fxckpt.solver.program import IN_BACKWARD, IntArray, Program


@dataclass(frozen=True)
class StageBoundaries:
    """The narrow places of one program."""

    program: Program

    def stages(self, count: int) -> tuple[int, ...]:
        """Return the first backward op of each of about ``count`` stages: at most 1.5 times as many, fewer where there are no more ops."""
        places = deepest(self.depth, count - 1)
        if len(places) > 1.5 * (count - 1):
            step = math.ceil(len(places) / max(count - 1, 1))
            places = places[step - 1 :: step]
        return self._split((0, *places), count)

    @cached_property
    def width(self) -> IntArray:
        """Per backward op: bytes that would be passed across a boundary right before it, gradients that are returned aside."""
        return crossing_bytes(self.program)

    @cached_property
    def depth(self) -> dict[int, int]:
        """Per narrow place: bytes more that are passed on the way to the next narrower one."""
        return persistence(self.width)

    def _split(self, starts: tuple[int, ...], count: int) -> tuple[int, ...]:
        """Split stages that are longer than half as many as wanted would be, at the narrowest place of their middle."""
        n = len(self.program.backward)
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
                    split.append(min(window, key=lambda j: (int(self.width[j]), j)))
        return tuple(split)


def crossing_bytes(program: Program) -> IntArray:
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
    change = np.zeros(len(program.backward) + 1, dtype=np.int64)
    for s, j in first.items():
        if s not in returned:
            change[j + 1] += program.storages[s].bytes
            change[last[s] + 1] -= program.storages[s].bytes
    return np.cumsum(change)[:-1]


def persistence(heights: IntArray) -> dict[int, int]:
    """Return, per local minimum, how far one must climb from it to reach a lower one, and for the lowest how far to the top.

    Of equal minima the later one climbs to the earlier, of a level stretch the first place stands for all.
    """
    height = heights.tolist()
    parent = [-1] * len(height)  # -1: not flooded yet; a basin's root is its lowest place
    climbs: dict[int, int] = {}

    def root(i: int) -> int:
        while parent[i] != i:
            parent[i] = parent[parent[i]]
            i = parent[i]
        return i

    for i in np.argsort(heights, kind="stable").tolist():
        parent[i] = i
        for neighbor in (i - 1, i + 1):
            if 0 <= neighbor < len(parent) and parent[neighbor] >= 0:
                low, high = root(i), root(neighbor)
                if (height[high], high) < (height[low], low):
                    low, high = high, low
                if low != high:
                    if height[i] > height[high]:
                        climbs[high] = height[i] - height[high]
                    parent[high] = low
    if len(heights):
        climbs[int(heights.argmin())] = int(heights.max() - heights.min())
    return climbs


def deepest(depth: dict[int, int], count: int) -> tuple[int, ...]:
    """Return the places of the greatest depths, the start aside, all of a depth or none, so that there are about ``count``."""
    classes = sorted(Counter(d for place, d in depth.items() if place > 0).items(), reverse=True)
    sums = np.cumsum([n for _, n in classes])
    if not len(sums) or count < 1:
        return ()
    least = classes[int(np.abs(np.log(sums / count)).argmin())][0]
    return tuple(place for place in sorted(depth) if place > 0 and depth[place] >= least)
