"""Candidates of a search, and its result."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from fxckpt.solver.exact.lower_bounds import Bound
from fxckpt.solver.moves.send_away import reachable_peak, send_away
from fxckpt.solver.program import Link, Program
from fxckpt.solver.schedule import Schedule
from fxckpt.solver.simulate import Simulation, simulate

NEXT_BYTES = 100 * 2**20
"""Bytes beyond a limit at which a second bound is given."""


@dataclass(frozen=True)
class Candidate:
    """A schedule with its memory and time."""

    schedule: Schedule
    simulation: Simulation

    @property
    def rank(self) -> tuple[float, int, int, int]:
        """Sort key, less is better: time, then bytes sent away, then peak, then saved bytes."""
        return (
            self.simulation.extra_seconds,
            self.simulation.away_bytes,
            self.simulation.peak_bytes,
            self.simulation.saved_bytes,
        )


@dataclass(frozen=True)
class SearchResult:
    """Result of a search within one limit."""

    limit: int | None
    """Budget in bytes; None asks for no extra time."""
    best: Candidate | None
    """Candidate of least extra time within the limit, or None if nothing fits."""
    least_peak: Candidate
    """Candidate of the least peak reached."""
    baseline: Candidate
    """The uncheckpointed schedule."""
    bound: Bound
    """Lower bound on the extra time of any plan within the limit."""
    next_bound: Bound
    """Lower bound for a limit that is greater by ``NEXT_BYTES``."""
    peak_bound_bytes: int
    """Lower bound on the peak of any plan."""
    least_seconds: float = 0.0
    """Least extra time of the plans seen, whatever their peak."""

    def reach_away(self, program: Program, storages: frozenset[int]) -> tuple[int, int]:
        """Return the bytes to be away, and the least peak then, of the plans at either end.

        Any of the storages may be away, as many as there are.
        """
        link = Link(math.inf, math.inf, sum(program.storages[s].bytes for s in storages), storages)
        program = replace(program, link=link)
        found = []
        for candidate in (self.least_peak, self.baseline):
            schedule = replace(candidate.schedule, away=())
            live = simulate(program, schedule).live
            sent = send_away(program, schedule, live, reachable_peak(program, schedule, live))
            assert sent is not None
            simulation = simulate(program, sent)
            found.append((simulation.peak_bytes, simulation.away_bytes))
        peak, away = min(found)
        return away, peak
