"""Lower bound on the time of any plan that may send saved values away.

Say that a plan within ``limit`` bytes sends ``away`` bytes. Had the same plan kept them, its peak
would be at most ``limit + away``, so that it recomputes for at least the bound of that limit. Every
value that is sent leaves during the forward and comes back during the backward. With C the rates of
the link, T1 the most time that the forward takes without waits and T2 the same of the backward
without recomputes, the extra time is thus at least ::

    max(bound(limit + away), away / C_in - T2) + max(0, away / C_out - T1)

The plan chooses ``away``, so that the least over it is a bound on all plans. The terms fall with
``away`` or rise with it: between two numbers of bytes, the falling one is at least that of the
greater number and the rising ones those of the smaller. The interval of the least bound is halved
until it is short.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable

from fxckpt.solver.exact.lower_bounds import Bound
from fxckpt.solver.program import Link, Program, Side

STEPS = 10
"""Most halvings of an interval."""
PRECISION = 1e-4
"""Share of the step's time by which halving may still raise the bound where it ends."""


def bound_with_link(program: Program, without: Callable[[int], Bound]) -> Bound:
    """Return the bound on the extra time of any plan of a program with a link.

    ``without`` is the bound with nothing away at as many bytes beyond the limit as are given.
    """
    link = program.link
    assert link is not None
    most = min(link.limit_bytes, sum(program.storages[s].bytes for s in link.storages))
    begin, end = (_link_seconds(program, link, n) for n in (0, most))
    intervals = [(_combined(without(most), begin), 0, most, begin, end)]
    for _ in range(STEPS):
        bound, low, high, at_low, at_high = intervals[0]
        middle = (low + high) // 2
        at_middle = _link_seconds(program, link, middle)
        if middle == low or _combined(without(high), at_high) - bound < (
            PRECISION * program.step_seconds
        ):
            break
        heapq.heapreplace(
            intervals, (_combined(without(middle), at_low), low, middle, at_low, at_middle)
        )
        heapq.heappush(
            intervals, (_combined(without(high), at_middle), middle, high, at_middle, at_high)
        )
    bound, _, high, _, _ = intervals[0]
    return Bound(bound, without(high).price)


def _link_seconds(program: Program, link: Link, away: int) -> tuple[float, float]:
    """Return the least extra seconds of the backward and of the forward for copies."""
    either = sum(op.seconds for op in program.ops if op.side is Side.EITHER)
    forward = sum(op.seconds for op in program.ops if op.side is not Side.EITHER) + either
    backward = sum(op.seconds for op in program.backward) + either
    return (
        away / link.in_bytes_per_second - backward,
        max(0.0, away / link.out_bytes_per_second - forward),
    )


def _combined(without: Bound, link_seconds: tuple[float, float]) -> float:
    backward, forward = link_seconds
    return max(without.seconds, backward) + forward
