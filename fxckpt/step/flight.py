"""Flights: calls of a step between their forward and their backward."""

from __future__ import annotations

import weakref
from typing import Protocol

from fxckpt.step.record import RecordedCall, StepRecord


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
        self, owner: FlightOwner, number: int, step: StepRecord, call: RecordedCall
    ) -> None:
        self.number, self.step, self.call = number, step, call
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
