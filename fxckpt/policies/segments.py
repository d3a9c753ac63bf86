"""Policies over the whole sequence of values: segments and their boundaries."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from torch.utils.checkpoint import CheckpointPolicy

from fxckpt.errors import InvalidOption
from fxckpt.policies.base import (
    SAVE,
    BoundPolicy,
    OpenWithoutMatch,
    Policy,
    TilePattern,
    Value,
    decide_all,
)
from fxckpt.policies.selectors import matched_module, refuse_unmatched_modules
from fxckpt.utils.intervals import last_uses, live_bytes

SAVED, RECOMPUTED = CheckpointPolicy.MUST_SAVE, CheckpointPolicy.PREFER_RECOMPUTE


class _SequencePolicy(Policy):
    """A policy that decides in :meth:`bind`, from all values of a graph."""

    @property
    def needs_graph(self) -> bool:
        """True: the answers depend on the sequence of values."""
        return True

    def decide(self, value: Value) -> CheckpointPolicy | None:
        """Raise :class:`InvalidOption`: a single value has no answer."""
        raise InvalidOption(
            f"{self!r} looks at all values of a graph: call bind(values) first, "
            "or fxckpt.policies.decide_all(policy, values)."
        )


@dataclass(frozen=True, repr=False)
class SqrtN(_SequencePolicy):
    """About sqrt(n) segments of n values, saving the values that cross a boundary.

    Chen et al. 2016 (arXiv:1604.06174), section 4.1. The paper has a chain, in which all places are
    equally good. Here each boundary moves, by less than half a segment, to the place that the
    fewest bytes cross.
    """

    def bind(self, values: Sequence[Value]) -> Policy:
        """Place the boundaries and save the values that cross them."""
        n = len(values)
        segments = math.isqrt(n - 1) + 1 if n else 1
        last_read = last_reads(values)
        width = crossing_bytes(values, last_read)
        boundaries: list[int] = []
        for k in range(1, segments):
            even, slack = round(k * n / segments), max(0, math.ceil(n / segments / 2) - 1)
            places = range(
                max(even - slack, boundaries[-1] + 1 if boundaries else 1),
                min(even + slack, n - 1) + 1,
            )
            if places:
                boundaries.append(min(places, key=lambda i, even=even: (width[i], abs(i - even))))  # type: ignore[misc]
        saved = [any(i < place <= last for place in boundaries) for i, last in enumerate(last_read)]
        return BoundPolicy(self, tuple(SAVED if s else RECOMPUTED for s in saved))

    def __repr__(self) -> str:
        return "sqrt_n"


@dataclass(frozen=True, repr=False)
class Every(_SequencePolicy):
    """Every n-th value, or every n-th that a policy saves, is saved; the rest is recomputed."""

    n: int
    of: Policy | None = None

    def bind(self, values: Sequence[Value]) -> Policy:
        """Count the values and save every n-th."""
        counted = (
            [answer in SAVE for answer in decide_all(self.of, values)]
            if self.of is not None
            else [True] * len(values)
        )
        count, answers = 0, []
        for counts in counted:
            count += counts
            answers.append(SAVED if counts and count % self.n == 0 else RECOMPUTED)
        return BoundPolicy(self, tuple(answers))

    def lenient(self) -> Policy:
        """Make the policy that selects the counted values lenient."""
        return self if self.of is None else Every(self.n, self.of.lenient())

    def tiles(self) -> tuple[TilePattern, ...]:
        """Return the modules that the policy of the counted values tiles."""
        return () if self.of is None else self.of.tiles()

    def __repr__(self) -> str:
        return f"every({self.n})" if self.of is None else f"every({self.n}, of={self.of!r})"


@dataclass(frozen=True, repr=False)
class BlockBoundaries(OpenWithoutMatch, _SequencePolicy):
    """Values read outside the module (block) that made them are saved; its others are recomputed.

    Values made outside the matched modules are left open. This is ``torch.utils.checkpoint`` around
    every block.
    """

    patterns: tuple[str, ...]

    def bind(self, values: Sequence[Value]) -> Policy:
        """Assign values to blocks and save those read outside their block.

        Raises :class:`~fxckpt.errors.PolicyMatchesNothing` for a pattern that no module matches.
        """
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
                None if block is None else SAVED if i in leaves else RECOMPUTED
                for i, block in enumerate(blocks)
            ),
        )

    def __repr__(self) -> str:
        return f"block_boundaries({', '.join(map(repr, self.patterns))})"


def last_reads(values: Sequence[Value]) -> list[int]:
    """Return, per value, the position of its last reader; its own position if it has none."""
    last = last_uses(value.reads for value in values)
    return [last.get(i, i) for i in range(len(values))]


def crossing_bytes(values: Sequence[Value], last_read: Sequence[int]) -> list[int]:
    """Return, per position, the bytes of the values made before it and read at it or later."""
    intervals = (
        (i + 1, last, value.bytes)
        for i, (value, last) in enumerate(zip(values, last_read, strict=True))
    )
    crossing: list[int] = live_bytes(intervals, len(values) + 1).tolist()
    return crossing
