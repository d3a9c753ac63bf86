"""Live intervals: the last use of each value, and the bytes that are live at each position.

:mod:`fxckpt.solver.simulate` and :mod:`~fxckpt.solver.moves.evict` have vectorized forms of their
own, as the search runs them thousands of times; :mod:`fxckpt.passes.analysis.graph_memory` shares
no code with them, as it checks them.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from typing import TypeVar

import numpy as np
import numpy.typing as npt

V = TypeVar("V", bound=Hashable)


def last_uses(uses: Iterable[Iterable[V]]) -> dict[V, int]:
    """Return the last position that uses each value; ``uses`` holds the values used at each.

    Examples
    --------
    >>> last_uses([["a"], ["a", "b"], ["b"]])
    {'a': 1, 'b': 2}
    """
    return {value: at for at, values in enumerate(uses) for value in values}


def live_bytes(intervals: Iterable[tuple[int, int, int]], length: int) -> npt.NDArray[np.int64]:
    """Return the live bytes at each of ``length`` positions.

    An interval is its first and last position, both included, and its bytes; it has none if the
    last position is before the first. Intervals may reach beyond the positions at either end.

    Examples
    --------
    >>> live_bytes([(0, 1, 10), (1, 5, 1)], 4).tolist()
    [10, 11, 1, 1]
    """
    change = np.zeros(length + 1, dtype=np.int64)
    for first, last, nbytes in intervals:
        if first <= last:
            change[min(max(first, 0), length)] += nbytes
            change[min(max(last + 1, 0), length)] -= nbytes
    return np.cumsum(change[:length])
