"""Segments of a sequence of values."""

from __future__ import annotations

from fxckpt.policies import (
    Value,
    decide_all,
    sqrt_n,
)
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
