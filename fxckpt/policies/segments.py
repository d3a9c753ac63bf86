"""Policies that look at the whole sequence of values: spans of the forward and what crosses their boundaries."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from torch.utils.checkpoint import CheckpointPolicy

from fxckpt.errors import InvalidOption
from fxckpt.policies.base import SAVE, BoundPolicy, Policy, Value, decide_all
from fxckpt.policies.selectors import matched_module, refuse_unmatched_modules

SAVED, AGAIN = CheckpointPolicy.MUST_SAVE, CheckpointPolicy.PREFER_RECOMPUTE


class _OfSequence(Policy):
    """A policy that :meth:`bind` makes whole."""

    @property
    def needs_graph(self) -> bool:
        """Always."""
        return True

    def decide(self, value: Value) -> CheckpointPolicy | None:
        """Refuse: there is no answer for a value alone."""
        raise InvalidOption(
            f"{self!r} looks at all values of a graph: call bind(values) first, or fxckpt.policies.decide_all(policy, values)."
        )


@dataclass(frozen=True, repr=False)
class SqrtN(_OfSequence):
    """Chen et al. 2016 (arXiv:1604.06174), section 4.1: n values in about sqrt(n) spans; what crosses a boundary is saved.

    The paper has a chain, where any place is as good as another. Here each boundary moves, by less than half a span, to the place that the
    fewest bytes cross.
    """

    def bind(self, values: Sequence[Value]) -> Policy:
        """Find the boundaries."""
        n = len(values)
        spans = math.isqrt(n - 1) + 1 if n else 1
        last_read = last_reads(values)
        width = crossing_bytes(values, last_read)
        boundaries: list[int] = []
        for k in range(1, spans):
            even, slack = round(k * n / spans), max(0, math.ceil(n / spans / 2) - 1)
            places = range(
                max(even - slack, boundaries[-1] + 1 if boundaries else 1),
                min(even + slack, n - 1) + 1,
            )
            if places:
                boundaries.append(min(places, key=lambda i, even=even: (width[i], abs(i - even))))  # type: ignore[misc]
        saved = [any(i < place <= last for place in boundaries) for i, last in enumerate(last_read)]
        return BoundPolicy(self, tuple(SAVED if s else AGAIN for s in saved))

    def __repr__(self) -> str:
        return "sqrt_n"


@dataclass(frozen=True, repr=False)
class Every(_OfSequence):
    """The n-th, 2n-th, ... of all values, or of those that a policy saves, is saved; the rest is run again."""

    n: int
    of: Policy | None = None

    def bind(self, values: Sequence[Value]) -> Policy:
        """Count."""
        counted = (
            [answer in SAVE for answer in decide_all(self.of, values)]
            if self.of is not None
            else [True] * len(values)
        )
        count, answers = 0, []
        for counts in counted:
            count += counts
            answers.append(SAVED if counts and count % self.n == 0 else AGAIN)
        return BoundPolicy(self, tuple(answers))

    def lenient(self) -> Policy:
        """Make what is counted lenient."""
        return self if self.of is None else Every(self.n, self.of.lenient())

    def __repr__(self) -> str:
        return f"every({self.n})" if self.of is None else f"every({self.n}, of={self.of!r})"


@dataclass(frozen=True, repr=False)
class BlockBoundaries(_OfSequence):
    """What leaves the modules that a pattern fits is saved, the rest inside them is run again; what is made outside is left open.

    What ``torch.utils.checkpoint`` around every block does.
    """

    patterns: tuple[str, ...]

    def bind(self, values: Sequence[Value]) -> Policy:
        """Find the blocks."""
        refuse_unmatched_modules(self, self.patterns, values)
        blocks = [
            next(
                (m for p in self.patterns if (m := matched_module(value.module, p)) is not None),
                None,
            )
            for value in values
        ]
        leaves = {
            read
            for value, block in zip(values, blocks, strict=True)
            for read in value.reads
            if blocks[read] != block
        }
        return BoundPolicy(
            self,
            tuple(
                None if block is None else SAVED if i in leaves else AGAIN
                for i, block in enumerate(blocks)
            ),
        )

    def without_match(self, values: Sequence[Value]) -> Policy:
        """Leave all open."""
        return BoundPolicy(self, (None,) * len(values))

    def __repr__(self) -> str:
        return f"block_boundaries({', '.join(map(repr, self.patterns))})"


def last_reads(values: Sequence[Value]) -> list[int]:
    """Return, per value, the position of the last value that reads it; its own if none does."""
    last = list(range(len(values)))
    for i, value in enumerate(values):
        for read in value.reads:
            last[read] = i
    return last


def crossing_bytes(values: Sequence[Value], last_read: Sequence[int]) -> list[int]:
    """Return, per position, the bytes of values made before it and read at it or later."""
    change = [0] * (len(values) + 2)
    for i, last in enumerate(last_read):
        if last > i:
            change[i + 1] += values[i].bytes
            change[last + 1] -= values[i].bytes
    width, live = [], 0
    for step in change[: len(values) + 1]:
        live += step
        width.append(live)
    return width
