"""Segments of a sequence of values."""

from __future__ import annotations

from fxckpt.policies import Value, block_boundaries, decide_all, every, save, sqrt_n
from fxckpt.policies.segments import crossing_bytes, last_reads
from tests.policies.nets import MUST_SAVE, PREFER_RECOMPUTE, aten


def test_sqrt_n_of_a_chain() -> None:
    """Sixteen equal values in a chain make four segments, saved at three boundaries."""
    chain = [
        Value(aten.sin.default, bytes=4, position=i, reads=(i - 1,) if i else ()) for i in range(16)
    ]
    assert [i for i, answer in enumerate(decide_all(sqrt_n, chain)) if answer is MUST_SAVE] == [
        3,
        7,
        11,
    ]
    assert decide_all(sqrt_n, []) == []
    assert decide_all(sqrt_n, chain[:1]) == [PREFER_RECOMPUTE]


def values(*sizes: int, reads: dict[int, tuple[int, ...]] | None = None) -> list[Value]:
    """Return values of these bytes, in a chain but for ``reads``."""
    return [
        Value(
            aten.sin.default,
            bytes=size,
            position=i,
            reads=(reads or {}).get(i, (i - 1,) if i else ()),
            module=f"blocks.{i // 2}",
        )
        for i, size in enumerate(sizes)
    ]


def test_boundaries_move_to_narrow_places() -> None:
    """A boundary moves by less than half a segment to where fewer bytes cross."""
    narrow = values(4, 4, 1, 4, 4, 4, 4, 4, 1)
    saved = [i for i, answer in enumerate(decide_all(sqrt_n, narrow)) if answer is MUST_SAVE]
    assert 2 in saved


def test_bytes_that_cross_a_position() -> None:
    """A value crosses from behind its op to its last reader; an unread one crosses nothing."""
    chain = values(1, 2, 4, reads={2: (0, 1)})
    assert last_reads(chain) == [2, 2, 2]
    assert crossing_bytes(chain, last_reads(chain)) == [0, 1, 3, 0]


def test_every_counts_what_a_policy_saves() -> None:
    """Every second value is saved, or every second one that a policy saves."""
    chain = values(*[1] * 6)
    assert [a is MUST_SAVE for a in decide_all(every(2), chain)] == [False, True] * 3
    first = every(2, of=save("blocks.0"))
    assert [a is MUST_SAVE for a in decide_all(first, chain)] == [False, True] + [False] * 4


def test_block_boundaries_save_what_leaves_a_block() -> None:
    """The value read outside its block is saved, also by a skip connection."""
    chain = values(*[1] * 6, reads={4: (3, 0)})
    answers = decide_all(block_boundaries("blocks.*"), chain)
    assert [i for i, answer in enumerate(answers) if answer is MUST_SAVE] == [0, 1, 3]
