"""Values sent away: candidates of a search that fit a limit with a link off the device."""

from __future__ import annotations

import math
from dataclasses import replace

from fxckpt.solver.moves.retain import Retain
from fxckpt.solver.moves.send_away import (
    fetch_early,
    reachable_peak,
    send_away,
    send_between,
)
from fxckpt.solver.schedule import Schedule
from fxckpt.solver.search.candidates import Candidate, SearchResult
from fxckpt.solver.search.local_search import LocalSearch
from fxckpt.solver.simulate import simulate
from fxckpt.utils.progress import tick

AWAY_WORTH = 0.001
"""Share of the least peak that sending values away must lower it by, or the peak stays.

Where what remains at the peak cannot be away, small values at its edge can lower it by a few bytes,
for which the schedules of least memory would wait for copies as long as the step takes.
"""


class OffloadSearch:
    """Search that sends values of a local search's candidates away.

    It adds to :attr:`LocalSearch.sending`; without a link there is nothing to add.
    """

    def __init__(self, search: LocalSearch) -> None:
        self.search = search
        self.program = search.program
        self._sent_for: set[tuple[Schedule, int]] = set()
        """Schedules of which values were sent away, and for which limit."""

    def fit(self, limit: int) -> None:
        """Send values of the candidates away so that they fit the limit, if there is a link.

        The less time a candidate recomputes, the more of it has to be away; candidates of peaks
        between the limit and the uncheckpointed one are searched too, then those of peaks near the
        best one's.
        """
        if self.program.link is None:
            return
        most = max(limit, self.search.baseline.simulation.peak_bytes)
        peaks = [limit, most]
        for share in self.search.options.offload_shares:
            peaks.append(round(limit + share * (most - limit)))
            self._search_within(peaks[-1])
        self._send_all(limit)
        for _ in range(self.search.options.offload_rounds):
            best = self.search.best(limit)
            if best is None or not best.schedule.away:
                break
            peak = simulate(self.program, replace(best.schedule, away=())).peak_bytes
            peaks.append(peak)
            near = {max((p for p in peaks if p < peak), default=limit)}
            near.add(min((p for p in peaks if p > peak), default=most))
            for other in near - {peak}:
                peaks.append((peak + other) // 2)
                self._search_within(peaks[-1])
            self._send_all(limit)
            # Schedules that fit less leave room for values that are recomputed.
            for share in self.search.options.offload_depths:
                self._send_all(round(share * limit))
            # Those of the greater limits of a frontier take less time, and do not fit.
            fitting = (c for c in self.search.sending if c.simulation.peak_bytes <= limit)
            for sent in sorted(fitting, key=lambda c: c.rank)[: self.search.options.refined]:
                self._retain_beside(sent, limit)

    def _search_within(self, limit: int) -> None:
        """Search schedules within a limit that is not the one asked for.

        Many different schedules are better starts for sending than the optimum without a link.
        """
        self.search.fit(limit, (1.0,))
        self.search.refine(limit, self.search.options.refined_along, (), None)

    def _send_all(self, limit: int) -> None:
        """Send values away of every candidate that is not too slow without a wait."""
        best = self.search.best(limit)
        least = math.inf if best is None else best.simulation.extra_seconds
        for candidate in sorted(self.search.legal, key=lambda c: c.rank):
            simulation = candidate.simulation
            if simulation.extra_seconds >= least:
                break
            if simulation.peak_bytes <= limit or (candidate.schedule, limit) in self._sent_for:
                continue
            sent = self._send(candidate, limit)
            if sent is not None:
                least = min(least, sent.simulation.extra_seconds)

    def _retain_beside(self, sent: Candidate, limit: int) -> None:
        """Remove recomputes where the values that are away leave room, as long as that gains."""
        while sent.simulation.peak_bytes <= limit:
            schedule = replace(sent.schedule, away=())
            retained = Retain(limit)(self.program, schedule, sent.simulation)
            if retained == schedule:
                return
            again = self._send(self.search.evaluate(retained), limit)
            if again is None or again.rank >= sent.rank:
                return
            sent = again

    def with_required(self, best: Candidate | None) -> Candidate | None:
        """Return a candidate with the values sent away that must be."""
        link = self.program.link
        if best is None or link is None or best.schedule.away or not link.required:
            return best
        return self._send(best, best.simulation.peak_bytes)

    def _send(self, candidate: Candidate, limit: int) -> Candidate | None:
        """Return a candidate with values sent away to fit the limit, and remember it."""
        self._sent_for.add((candidate.schedule, limit))
        schedule = send_away(self.program, candidate.schedule, candidate.simulation.live, limit)
        return None if schedule is None else self._evaluate(schedule)

    def send_between(self, candidate: Candidate, share: float) -> Candidate:
        """Return a candidate with a share of its bytes away between its halves, remembered."""
        live = candidate.simulation.live
        schedule = replace(candidate.schedule, away=())
        return self._evaluate(send_between(self.program, schedule, live, share))

    def _evaluate(self, schedule: Schedule) -> Candidate:
        tick()
        sent = Candidate(schedule, simulate(self.program, schedule))
        self.search.sending.append(sent)
        return sent

    def least_peak(self, least_peak: Candidate) -> Candidate:
        """Return the candidate of least peak with values sent away, or ``least_peak`` without.

        Less than what the values allow may fit the memory that they are sent to. Peaks that are
        lower by less than :data:`AWAY_WORTH` are not worth the waits.
        """
        program, bound = self.program, self.search.bounds.peak_bytes
        if program.link is None:
            return least_peak

        def within(candidate: Candidate) -> int:
            live = candidate.simulation.live
            return max(reachable_peak(program, candidate.schedule, live), bound)

        best = least_peak
        for candidate in sorted(self.search.legal, key=within)[: self.search.options.refined]:
            low, high = within(candidate), best.simulation.peak_bytes
            while low < high:
                sent = self._send(candidate, low)
                if sent is not None and sent.simulation.peak_bytes < high:
                    best, high = sent, sent.simulation.peak_bytes
                    break
                low = (low + high + 1) // 2
        most = (1 - AWAY_WORTH) * least_peak.simulation.peak_bytes
        return best if best.simulation.peak_bytes <= most else least_peak

    def result(self, limit: int | None, least_peak: Candidate) -> SearchResult:
        """Return the best candidate within ``limit`` bytes, with what must be away, as a result."""
        best = self.with_required(self.search.best(limit))
        return self.search.result(limit, self._fetching_early(best), least_peak)

    def _fetching_early(self, best: Candidate | None) -> Candidate | None:
        """Return a candidate whose fetches have all the time that its peak leaves them.

        Only now, as recomputes are removed where memory is free.
        """
        if best is None or not best.schedule.away or not self.search.options.fetches_early:
            return best
        program, alone = self.program, replace(best.schedule, away=())
        live, peak = simulate(program, alone).live, best.simulation.peak_bytes
        early = self._evaluate(fetch_early(program, best.schedule, live, peak))
        is_same = early.simulation.peak_bytes <= peak
        return early if is_same and early.rank <= best.rank else best
