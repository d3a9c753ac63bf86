"""Running backwards: which budgets of a step have calls in one backward."""

from __future__ import annotations

import threading
from typing import Any, Generic, TypeVar

T = TypeVar("T")


class RunningBackwards(Generic[T]):
    """The owners of calls in each backward that runs now.

    >>> running = RunningBackwards()
    >>> running.enter(7, "first"), running.enter(7, "second"), running.enter(8, "second")
    (None, 'first', None)
    >>> running.leave("first"); running.enter(7, "second")
    """

    def __init__(self) -> None:
        self._owners: list[tuple[Any, T]] = []
        self._lock = threading.Lock()

    def enter(self, backward: Any, owner: T) -> T | None:
        """Note that an owner has a call in a backward; return another that has one, if any."""
        with self._lock:
            others = [o for b, o in self._owners if b == backward and o is not owner]
            if not others and (backward, owner) not in self._owners:
                self._owners.append((backward, owner))
            return others[0] if others else None

    def leave(self, owner: T) -> None:
        """Note that the backwards of an owner ended."""
        with self._lock:
            self._owners = [each for each in self._owners if each[1] is not owner]
