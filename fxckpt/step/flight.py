"""Flights: calls of a step between their forward and their backward, and who has some in one."""

from __future__ import annotations

import threading
import weakref
from typing import Any, Generic, Protocol, TypeVar

from fxckpt.step.record import RecordedCall, StepRecord

T = TypeVar("T")


class FlightOwner(Protocol):
    """Listener to the backwards of a step's calls."""

    def enter_backward(self, flight: Flight) -> None:
        """Note that a backward begins."""

    def leave_backward(self, flight: Flight) -> None:
        """Note that it ended."""

    def failed_backward(self, flight: Flight, error: BaseException) -> None:
        """Note that it raised an error."""

    def forget_step(self, flight: Flight) -> None:
        """Note that it runs where no measure is taken."""

    def dropped(self, flight: Flight) -> None:
        """Note that the call's autograd graph is gone."""


class Flight:
    """One call between its forward and its backward."""

    def __init__(
        self,
        owner: FlightOwner,
        number: int,
        step: StepRecord,
        call: RecordedCall,
        within: object | None = None,
    ) -> None:
        self.number, self.step, self.call = number, step, call
        self.within = within
        """Backward that its forward ran in, as one of a reversible block does; None for others."""
        self.start = 0
        """Bytes allocated when its backward began."""
        self._owner = weakref.ref(owner)

    def enter(self) -> None:
        """Note that its backward begins."""
        if (owner := self._owner()) is not None:
            owner.enter_backward(self)

    def leave(self) -> None:
        """Note that its backward ended."""
        if (owner := self._owner()) is not None:
            owner.leave_backward(self)

    def failed(self, error: BaseException) -> None:
        """Note that its backward raised an error."""
        if (owner := self._owner()) is not None:
            owner.failed_backward(self, error)

    def unseen(self) -> None:
        """Note that compiled autograd runs its backward, where no measure is taken."""
        if (owner := self._owner()) is not None:
            owner.forget_step(self)

    def __del__(self) -> None:
        owner = self._owner()
        if owner is not None:
            owner.dropped(self)


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
