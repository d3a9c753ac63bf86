"""What the ranks of a group tell one another of a step that all of them ran."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from fxckpt.step.record import LearnedStep


@dataclass(frozen=True)
class Said:
    """What one rank measured of a step, or the most that any did."""

    calls: tuple[int, ...]
    """Numbers of the graphs that were called."""
    kinds: tuple[tuple[object, ...], ...]
    """Each moment without its bytes."""
    outside: tuple[int, ...]
    """Outside bytes at each moment."""
    excess: tuple[tuple[int, int], ...]
    """Bytes by which forward and backward of each call's graph were above their plan."""
    limit: int
    """Budget of the step in bytes."""
    is_good: bool
    """Whether the levels it ran at are within the budget, and next to nothing is to be gained."""
    is_shared: bool
    """Whether all its graphs were planned by the ranks together."""

    @classmethod
    def of(cls, learned: LearnedStep, limit: int, *, is_good: bool) -> Said:
        """Return what a rank says of a step."""
        moments = learned.moments
        return cls(
            tuple(graph.number for graph in learned.calls),
            tuple((m.held, m.running, m.is_backward) for m in moments),
            tuple(m.outside_bytes for m in moments),
            tuple(graph.excess for graph in learned.calls),
            limit,
            is_good,
            all(graph.ranks is not None for graph in learned.calls),
        )

    def tell(self, learned: LearnedStep) -> None:
        """Take the figures of all ranks for those of this one."""
        learned.recent = [
            tuple(
                replace(moment, outside_bytes=most)
                for moment, most in zip(learned.moments, self.outside, strict=True)
            )
        ]
        for graph, (forward, backward) in zip(learned.calls, self.excess, strict=True):
            graph.excess = max(graph.excess[0], forward), max(graph.excess[1], backward)


def merged_steps(said: Sequence[Said | None]) -> Said | None:
    """Return the most that any rank measured; None if they did not all run one step."""
    steps = [each for each in said if each is not None]
    first = steps[0] if steps else None
    if first is None or len(steps) < len(said):
        return None
    if any(
        (each.calls, each.kinds) != (first.calls, first.kinds) or not each.is_shared
        for each in steps
    ):
        return None
    return replace(
        first,
        outside=tuple(map(max, *(each.outside for each in steps))),
        excess=tuple(
            (max(forward for forward, _ in same), max(backward for _, backward in same))
            for same in zip(*(each.excess for each in steps), strict=True)
        ),
        limit=min(each.limit for each in steps),
        is_good=all(each.is_good for each in steps),
    )
