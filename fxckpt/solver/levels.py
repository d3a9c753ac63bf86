"""Levels: plans of one graph that trade saved bytes for time, for a step of many calls.

A budget over many graphs bounds the sum of the bytes that all calls in flight hold and of those
that the running one works with. So each graph has a few plans from "save all" to its floor, ranked
by two figures beside time: the bytes held from the forward to the backward, and the peak while it
runs.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import product

from fxckpt.solver.exact.lower_bounds import Bound
from fxckpt.solver.program import Link, Program
from fxckpt.solver.schedule import Schedule
from fxckpt.solver.search.candidates import Candidate, SearchResult
from fxckpt.solver.search.offload_search import OffloadSearch
from fxckpt.solver.search.price_search import PriceSearch, search_of
from fxckpt.solver.search.prices import between

PEAK_SHARES = (0.0, 0.1, 1.0)
"""Weights of a graph's own peak against its held bytes, from many calls in flight to one."""


@dataclass(frozen=True)
class Level:
    """Bytes and seconds of one plan of a graph, as a part of a step."""

    held_bytes: int
    """Bytes held from the end of the forward to the backward, without the forward's outputs."""
    forward_bytes: int
    """Peak of the forward beyond the bytes allocated when it began."""
    backward_bytes: int
    """Peak of the backward, with ``held_bytes``, beyond all else allocated when it began.

    The incoming gradients and the forward's outputs are allocated by then, and not counted.
    """
    extra_seconds: float
    """Seconds beyond those of the uncheckpointed graph."""
    away_bytes: int = 0
    """Bytes that are sent off the device, from the forward to the backward."""
    input_bytes: int = 0
    """Bytes of inputs that the call alone keeps for its backward, as far as that is known."""


def level_of(program: Program, candidate: Candidate) -> Level:
    """Return the bytes and seconds of a candidate as a part of a step."""
    simulation, tables = candidate.simulation, program.tables
    live, first = simulation.live, simulation.forward_ops
    saved = list(candidate.schedule.saved)
    held = int(tables.bytes[saved][~tables.is_output[saved]].sum()) - simulation.away_bytes
    return Level(
        held,
        int(live[:first].max(initial=0)),
        max(held, int(live[first:].max(initial=0)) - boundary_bytes(program)),
        simulation.extra_seconds,
        simulation.away_bytes,
    )


def boundary_bytes(program: Program) -> int:
    """Return the bytes of the forward's outputs and of the incoming gradients."""
    tables = program.tables
    return int(tables.bytes[tables.is_output].sum()) + program.tangent_bytes


@dataclass(frozen=True)
class LevelFamily:
    """Candidates of one program, fastest first, and the search behind their plans."""

    candidates: tuple[Candidate, ...]
    levels: tuple[Level, ...]
    """Bytes and seconds of each candidate."""
    found: SearchResult
    """Bounds and baseline of the program."""
    ops: int
    """Number of forward ops of the program."""

    def result(self, index: int) -> SearchResult:
        """Return the search result that has the candidate ``index`` as its best."""
        return replace(self.found, best=self.candidates[index])


@dataclass(frozen=True)
class LevelSearch:
    """Search of a family of levels by prices on saved bytes."""

    prices: int = 12
    """Number of prices, evenly spaced in their logarithm."""
    shares: tuple[float, ...] = (0.0, 0.001, 0.01, 0.1)
    """Prices at each stage as shares of that at the end of the forward."""
    limits: int = 6
    """Number of peaks, from the floor to the uncheckpointed one, that are searched for."""
    count: int = 12
    """Most levels of a family; beside a link there are as many with values sent away."""
    away_shares: tuple[float, ...] = (0.5, 1.0)
    """Shares of a level's bytes that are sent away."""

    def __call__(
        self, search: PriceSearch, program: Program, room: int | None = None
    ) -> LevelFamily:
        """Return the family of levels of a program.

        Candidates of the search for single budgets are taken too. ``room``, the bytes that the
        backward may take with what it holds where the graph is all that a step has in flight, is
        searched as thoroughly as a budget of the graph alone.
        """
        seen = search_of(search, program)
        away = OffloadSearch(seen)
        seen.least_time()
        least_peak = seen.least_peak()
        prices = between(seen.low, seen.high, self.prices)
        for count in search.stage_counts:
            seen.evaluate_all(seen.cut(count, list(product(prices, self.shares))))
        low, high = least_peak.simulation.peak_bytes, seen.baseline.simulation.peak_bytes
        for limit in _evenly(low, high, self.limits):
            seen.fit(limit, search.factors_along)
            seen.refine(limit, search.refined_along, (), None)
        exact: list[Candidate] = []
        if room is not None:
            limit = room + boundary_bytes(program)
            if seen.bounds.peak_bytes <= limit:
                seen.fit(limit, search.factors)
                seen.refine(limit, search.refined, search.perturbations, search.exact_states)
                away.fit(limit)
                best = away.with_required(seen.best(limit))
                exact = [] if best is None else [best]
        chosen = self._chosen(program, seen.legal)
        if program.link is not None:
            least_peak = away.least_peak(least_peak)
            chosen = self._with_offload(away, program.link, chosen)
        level = {c.schedule: level_of(program, c) for c in (*chosen, *exact)}
        known = {c.schedule for c in chosen}
        chosen = sorted(
            [*chosen, *(c for c in exact if c.schedule not in known)],
            key=lambda c: _key(level[c.schedule]),
        )
        found = SearchResult(
            None,
            chosen[0],
            least_peak,
            seen.baseline,
            Bound(0.0, 0.0),
            Bound(0.0, 0.0),
            seen.bounds.proven_peak_bytes,
        )
        return LevelFamily(
            tuple(chosen),
            tuple(level[c.schedule] for c in chosen),
            found,
            len(program.ops),
        )

    def _chosen(self, program: Program, candidates: Sequence[Candidate]) -> list[Candidate]:
        """Return the candidates that are worth a level, fastest first."""
        level = {c.schedule: level_of(program, c) for c in candidates}
        return _spread(_undominated(candidates, level), level, self.count)

    def _with_offload(
        self, away: OffloadSearch, link: Link, chosen: list[Candidate]
    ) -> list[Candidate]:
        """Return candidates with values sent away, and those with no more away than must be."""
        for candidate in chosen:
            for share in self.away_shares:
                away.send_between(candidate, share)
        if link.required:
            chosen = _obeying(link, [away.send_between(candidate, 0.0) for candidate in chosen])
            sending = _obeying(link, away.search.sending)
        else:
            sending = [*away.search.legal, *(c for c in away.search.sending if c.schedule.away)]
        known = {c.schedule for c in chosen}
        more = self._chosen(away.search.program, sending)
        return [*chosen, *(c for c in more if c.schedule not in known)]


def _obeying(link: Link, candidates: Sequence[Candidate]) -> list[Candidate]:
    """Return the candidates with the most values away of those that must be.

    One that the backward reads first has no time to be away.
    """
    away = [len(link.required & {a.storage for a in c.schedule.away}) for c in candidates]
    return [c for c, count in zip(candidates, away, strict=True) if count == max(away)]


def _evenly(low: int, high: int, count: int) -> list[int]:
    if high <= low:
        return []
    return [round(p) for p in between(max(low, 1), high, count)][:-1]


def _key(level: Level) -> tuple[float, int, int]:
    return (level.extra_seconds, level.held_bytes, max(level.forward_bytes, level.backward_bytes))


def _undominated(candidates: Iterable[Candidate], level: dict[Schedule, Level]) -> list[Candidate]:
    """Return the candidates that no other beats in held bytes, peak and seconds at once."""
    kept: list[tuple[tuple[float, int, int], Candidate]] = []
    ordered = sorted(candidates, key=lambda c: _key(level[c.schedule]))
    for candidate in ordered:
        key = _key(level[candidate.schedule])
        if not any(all(a <= b for a, b in zip(other, key, strict=True)) for other, _ in kept):
            kept.append((key, candidate))
    return [candidate for _, candidate in kept]


def _spread(
    candidates: Sequence[Candidate], level: dict[Schedule, Level], count: int
) -> list[Candidate]:
    """Return about ``count`` candidates, fastest first.

    For each of a few weights between held bytes and peak, they are corners of the lower hull of
    weighed bytes over seconds: what one price on bytes can choose.
    """
    chosen: dict[Schedule, Candidate] = {}
    for share in PEAK_SHARES:
        points = []
        for candidate in candidates:
            seconds, held, peak = _key(level[candidate.schedule])
            points.append((seconds, (1 - share) * held + share * peak, candidate))
        corners = _lower_hull(points)
        step = max(1.0, (len(corners) - 1) / max(1, count // len(PEAK_SHARES)))
        picked = {len(corners) - 1, *(int(i * step) for i in range(int(len(corners) / step)))}
        chosen.update((corners[i].schedule, corners[i]) for i in picked)
    return sorted(chosen.values(), key=lambda c: _key(level[c.schedule]))


def _lower_hull(points: Sequence[tuple[float, float, Candidate]]) -> list[Candidate]:
    """Return the candidates at the falling corners of the lower hull of bytes over seconds."""
    hull: list[tuple[float, float, Candidate]] = []
    for x, y, candidate in sorted(points, key=lambda p: p[:2]):
        if hull and y >= hull[-1][1]:
            continue
        while len(hull) > 1:
            (x0, y0, _), (x1, y1, _) = hull[-2:]
            if (y1 - y0) * (x - x0) >= (y - y0) * (x1 - x0):
                hull.pop()
            else:
                break
        hull.append((x, y, candidate))
    return [candidate for _, _, candidate in hull]
