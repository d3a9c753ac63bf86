"""Local search: cuts at prices per byte, and repairs of the most promising schedules."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from functools import cached_property, partial
from itertools import chain, product
from random import Random

from fxckpt.solver.blocks.block_program import BlockPrograms
from fxckpt.solver.blocks.chain_program import ChainProgram
from fxckpt.solver.blocks.partition import Blocks
from fxckpt.solver.blocks.ways import Way, ways_of_blocks
from fxckpt.solver.cuts.saved_limits import exceeded
from fxckpt.solver.cuts.staged_cut import Layout
from fxckpt.solver.cuts.stages import StageBoundaries
from fxckpt.solver.exact.dynamic_program import DynamicProgram
from fxckpt.solver.exact.link_bound import bound_with_link
from fxckpt.solver.exact.lower_bounds import Bound, LowerBounds
from fxckpt.solver.exact.milp import Optimum, in_forward, optimum
from fxckpt.solver.exact.path_bounds import PathBounds
from fxckpt.solver.moves.evict import Evict
from fxckpt.solver.moves.heuristics import Heuristics
from fxckpt.solver.moves.retain import Retain
from fxckpt.solver.program import Program
from fxckpt.solver.schedule import Schedule, StageAssignment, emit, save_all, with_runs
from fxckpt.solver.search.candidates import NEXT_BYTES, Candidate, SearchResult
from fxckpt.solver.search.options import SearchOptions
from fxckpt.solver.search.prices import between, price_range
from fxckpt.solver.simulate import Simulation, simulate
from fxckpt.utils.progress import tick

PRICE_STEP = 1.1
"""Ratio of neighboring prices in the grid of prices tried."""
Stages = tuple[range, ...]
"""Stages of a chain of blocks (:class:`~fxckpt.solver.blocks.partition.Blocks`)."""
MOST_CHAINS = 8
"""Most dynamic programs over blocks that are held at once: each may take 50 MB."""


class LocalSearch:
    """All candidates seen for one program."""

    def __init__(self, options: SearchOptions, program: Program) -> None:
        self.options = options
        self.program = program
        self.boundaries = StageBoundaries(program)
        self.layouts: dict[int, Layout] = {}
        self.ways: dict[Stages, tuple[BlockPrograms, tuple[tuple[Way, ...], ...]]] = {}
        """Programs of the blocks of each chain, and the ways of each block."""
        self.chains: dict[tuple[int, Stages], ChainProgram] = {}
        """Dynamic programs over blocks by their greatest budgets, powers of two, and by chain."""
        self.seen: dict[Schedule, Candidate] = {}
        self.legal: list[Candidate] = []
        """Candidates that save what may be saved, and recompute no more than may be; the
        uncheckpointed schedule may save more."""
        self.sending: list[Candidate] = []
        """Legal candidates with values sent away (:mod:`~fxckpt.solver.search.offload_search`)."""
        self.low, self.high = price_range(program)
        self.bounds = LowerBounds(program, self.low, self.high)
        self.tried: set[int] = set()
        """Prices tried, in steps of the price grid."""
        self.bound_at: dict[int, Bound] = {}
        self.baseline = self.evaluate(save_all(program))
        self.heuristics = Heuristics(program, self.boundaries)
        for schedule in self.heuristics():
            self.evaluate(schedule)

    @property
    def is_small(self) -> bool:
        """Whether there are so few ops that a search may take random restarts."""
        return len(self.program.ops) <= self.options.small_ops

    @cached_property
    def exact(self) -> DynamicProgram:
        """The dynamic program, solved if it is small."""
        return DynamicProgram(in_forward(self.program))

    def evaluate(self, schedule: Schedule) -> Candidate:
        """Return the candidate of ``schedule``, and remember it."""
        if schedule not in self.seen:
            tick()
            candidate = self.seen[schedule] = Candidate(schedule, simulate(self.program, schedule))
            if (
                self.program.tables.is_savable[list(schedule.saved)].all()
                and not exceeded(self.program, schedule.saved)
                and not self._is_too_slow(candidate)
            ):
                self.legal.append(candidate)
        return self.seen[schedule]

    def _is_too_slow(self, candidate: Candidate) -> bool:
        """Return whether a candidate recomputes too much; the first and small ones never do.

        Evictions from schedules of chains would otherwise go far beyond what chains may recompute.
        """
        is_first = not self.legal
        return not is_first and candidate.simulation.extra_seconds > self._most_evicted_seconds

    @cached_property
    def _most_evicted_seconds(self) -> float:
        """Most extra time of a candidate, infinite for small programs."""
        most = self.options.evicted_recomputes * self.options.chain_recomputes
        return math.inf if self.is_small else most * self.forward_seconds

    def within(self, limit: int) -> Iterator[Candidate]:
        """Yield the legal candidates within ``limit`` bytes."""
        return (c for c in self.legal if c.simulation.peak_bytes <= limit)

    def least_within(self, most_seconds: float) -> Candidate | None:
        """Return the legal candidate of least peak of at most ``most_seconds``, if any is."""
        return min(
            (
                c
                for c in chain(self.legal, self.sending)
                if c.simulation.extra_seconds <= most_seconds
            ),
            key=lambda c: (c.simulation.peak_bytes, c.rank),
            default=None,
        )

    def best(self, limit: int | None) -> Candidate | None:
        """Return the legal candidate of least rank within ``limit`` bytes, if any is.

        Bytes below the limit buy nothing, so that the least peak among the fastest does no harm.
        """
        if limit is None:
            return min(self.legal, key=lambda c: c.rank, default=None)
        sending = (c for c in self.sending if c.simulation.peak_bytes <= limit)
        return min(chain(self.within(limit), sending), key=lambda c: c.rank, default=None)

    def result(
        self, limit: int | None, best: Candidate | None, least_peak: Candidate
    ) -> SearchResult:
        """Return the result of the best candidate within ``limit`` bytes, with its bounds."""
        bound = next_bound = Bound(0.0, 0.0)
        if best is not None and best.simulation.extra_seconds > 0:
            bound = self.bound_away(limit)
            next_bound = bound if limit is None else self.bound_away(limit + NEXT_BYTES)
            bound = self._tightened(bound, limit, best)
        return SearchResult(
            limit,
            best,
            least_peak,
            self.baseline,
            bound,
            next_bound,
            self.bounds.proven_peak_bytes,
            min((c.simulation.extra_seconds for c in self.legal), default=0.0),
        )

    def _tightened(self, bound: Bound, limit: int | None, best: Candidate) -> Bound:
        """Return a bound from windows of the backward, where the options ask for it.

        A program whose values may be sent away has none.
        """
        rounds = self.options.path_rounds
        is_near = best.simulation.extra_seconds <= (1 + self.options.tolerance) * bound.seconds
        if not rounds or limit is None or is_near or self.program.link is not None:
            return bound
        return PathBounds(self.bounds, rounds, self.options.path_moments).seconds(limit)

    def layout(self, count: int) -> Layout:
        """Return the layout of about ``count`` stages."""
        if count not in self.layouts:
            starts = self.boundaries.stages(count)
            self.layouts[count] = self.options.cut.lay_out(self.program, starts)
        return self.layouts[count]

    def cut(
        self, count: int, prices: Sequence[tuple[float, float]], sweeps: int | None = None
    ) -> list[list[StageAssignment]]:
        """Return the assignments to about ``count`` stages at each of some prices.

        Each is given as the price at the end of the forward, and the share of it at every stage.
        """
        cut = self.options.cut if sweeps is None else replace(self.options.cut, sweeps=sweeps)
        layout = self.layout(count)
        return cut(
            layout, [[price, *[price * share] * len(layout.starts)] for price, share in prices]
        )

    def evaluate_all(self, assignments: Iterable[Iterable[StageAssignment]]) -> None:
        """Evaluate the schedules of all assignments."""
        for assignment in chain.from_iterable(assignments):
            self.evaluate(emit(self.program, assignment))

    def least_time(self) -> Candidate:
        """Return the candidate of least extra time, and of least peak among those."""
        self.evaluate_all(self.cut(self.options.stage_counts[0], [(self.low * 1e-6, 1.0)]))
        return min(self.legal, key=lambda c: c.rank)

    def least_peak(self) -> Candidate:
        """Return the candidate of least peak: at high prices or of blocks, then evicted further.

        There one sweep mostly has a lower peak than two.
        """
        prices = between((self.low * self.high) ** 0.5, self.high, self.options.least_peak_prices)
        for count in self.options.stage_counts:
            self.evaluate_all(
                self.cut(count, list(product(prices, self.options.least_peak_shares)), sweeps=1)
            )
        self._descend(self.lowest_peak(), self.options.descent)
        self._descend_from_chains(self.options.chain_recomputes * self.forward_seconds)
        return self.lowest_peak()

    def _descend_from_chains(self, seconds: float) -> None:
        """Evict further from the schedules of least peak by chains, of at most ``seconds``."""
        known = {*self.seen}
        for lowest in self._lowest_of_chains(seconds):
            if lowest.schedule not in known:
                self._descend(lowest, self.options.chain_descent)

    def _lowest_of_chains(self, seconds: float) -> list[Candidate]:
        """Return the candidates of least peak by chains of blocks, if any are in question.

        Which chain has the lowest one depends on the program, and a peak may be above what the
        chain counts: only the simulator tells.
        """
        most = self.lowest_peak().simulation.peak_bytes
        found: list[Candidate] = []
        for form in self.chain_forms:
            if self.is_near_bound:
                break
            chain = self.chain_program(most, form)
            limit = chain.least_limit(seconds)
            schedule = None if limit is None else chain.schedule(limit)
            if schedule is not None:
                found.append(self.evaluate(schedule))
        return found

    @property
    def is_near_bound(self) -> bool:
        """Whether the least peak seen so far is near its lower bound."""
        near = (1 + self.options.near_peak) * self.bounds.proven_peak_bytes
        return self.lowest_peak().simulation.peak_bytes <= near

    def lowest_reachable(self, lowest: Candidate) -> Candidate:
        """Return the candidate of least peak, also of searches within limits below ``lowest``.

        A search within one limit repairs, restarts and solves exactly, and so goes below the peak
        of moves at high prices. In small programs limits are tried from the bound on, then halfway
        to the lowest peak; in others schedules of chains are repaired for limits between the two.
        """
        if not self.is_small:
            return self._probed()
        limit = self.bounds.peak_bytes
        for _ in range(self.options.bisections):
            if limit >= lowest.simulation.peak_bytes:
                break
            self.fit(limit, self.options.factors_along)
            self.refine(
                limit,
                self.options.refined_along,
                self.options.perturbations[:1],
                self.options.exact_states_along,
            )
            lowest = self.lowest_peak()
            limit = max(limit + 1, (limit + lowest.simulation.peak_bytes) // 2)
        return lowest

    def recompute_more(self) -> None:
        """Lower the least peak by schedules of chains that recompute more."""
        self._descend_from_chains(self._most_repaired_seconds)

    def _probed(self) -> Candidate:
        """Return the candidate of least peak after repairs for a few limits below it."""
        self.recompute_more()
        low = self.bounds.proven_peak_bytes  # a bound, or the greatest limit that nothing fitted
        for _ in range(self.options.probes):
            limit = (low + self.lowest_peak().simulation.peak_bytes) // 2
            if self.is_near_bound or limit <= low:
                break
            self.repair_chains(limit)
            if self.lowest_peak().simulation.peak_bytes > limit:
                low = limit
        return self.lowest_peak()

    def _descend(self, candidate: Candidate, share: float) -> None:
        """Evict a candidate to a share of its peak, step by step, until that falls no more."""
        for _ in range(self.options.descents):
            peak = candidate.simulation.peak_bytes
            evicted = self._evicted(candidate, max(self.bounds.peak_bytes, int(peak * share)))
            if evicted.simulation.peak_bytes >= peak or self._is_too_slow(evicted):
                return
            candidate = evicted

    @cached_property
    def chain_forms(self) -> tuple[Blocks, ...]:
        """Chains of blocks that differ: of each number of blocks, stages hold inputs or do not."""
        if not (self.program.ops and self.program.backward):
            return ()
        options = self.options
        counts = options.small_chain_blocks if self.is_small else options.chain_blocks
        forms = (
            Blocks.of(self.program, starts, holds_inputs=holds_inputs)
            for starts in map(self.heuristics.block_starts, counts)
            if starts
            for holds_inputs in (False, True)
        )
        found: dict[Stages, Blocks] = {}
        for form in forms:
            found.setdefault(form.stages, form)
        return tuple(found.values())

    def _ways(self, form: Blocks) -> tuple[BlockPrograms, tuple[tuple[Way, ...], ...]]:
        """Return the programs of the blocks of a chain, and the ways of each."""
        if form.stages not in self.ways:
            programs = BlockPrograms(form)
            ways = ways_of_blocks(programs, partial(_search_block, self.options))
            self.ways[form.stages] = programs, ways
        return self.ways[form.stages]

    @property
    def _most_repaired_seconds(self) -> float:
        """Most extra time of a schedule of the chain that is repaired for a limit."""
        options = self.options
        more = 0.0 if self.is_small else options.repaired_recomputes
        return max(options.chain_recomputes, more) * self.forward_seconds

    @cached_property
    def forward_seconds(self) -> float:
        """Time of the forward."""
        return float(self.program.tables.seconds[: len(self.program.ops)].sum())

    def chain_program(self, limit: int, form: Blocks) -> ChainProgram:
        """Return the dynamic program over a chain of blocks for up to ``limit`` bytes."""
        key = 1 << max(limit, 1).bit_length(), form.stages
        if key not in self.chains:
            if len(self.chains) == MOST_CHAINS:
                del self.chains[next(iter(self.chains))]
            self.chains[key] = ChainProgram(*self._ways(form), key[0], self.options.chain_parts)
        return self.chains[key]

    def lowest_peak(self) -> Candidate:
        """Return the legal candidate of least peak seen so far."""
        return min(self.legal, key=lambda c: (c.simulation.peak_bytes, c.rank))

    def fit(self, limit: int, factors: Sequence[float]) -> None:
        """Cut at prices around that of the lower bound at ``limit``."""
        price = self.bound(limit).price or self.low
        factors = self.options.small_factors if self.is_small else factors
        self._try_prices(price * factor for factor in factors)

    def _try_prices(self, prices: Iterable[float]) -> None:
        """Cut at every number of stages, with total prices rounded to a grid.

        The total price is that of a value saved through half of the stages. Near budgets share the
        points of the grid.
        """
        steps = [
            s
            for s in dict.fromkeys(
                round(math.log(price) / math.log(PRICE_STEP)) for price in prices
            )
            if s not in self.tried
        ]
        self.tried.update(steps)
        if steps:
            share = self.options.share
            assignments = [
                self.cut(n, [(PRICE_STEP**step / (1 + share * n / 2), share) for step in steps])
                for n in self.options.stage_counts
            ]
            # All stage counts of a price before the next price: of equal candidates the first wins.
            self.evaluate_all(chain.from_iterable(zip(*assignments, strict=True)))

    def refine(
        self, limit: int, count: int, perturbations: Sequence[float], exact_states: int | None
    ) -> None:
        """Repair the most promising schedules, then perturb the best, up to near the bound.

        Small programs are solved exactly, or have random restarts; with ``exact_states`` of None
        they have restarts alone.
        """
        target = (1 + self.options.tolerance) * self.bound(limit).seconds
        for candidate in self._promising(limit, count):
            if self.least_seconds(limit) <= target:
                return
            self._repair(candidate, limit, limit)
        self._perturb(limit, perturbations, target)
        if self.is_gap_wide(limit):
            # After the perturbations, which so begin at the same schedule as without them.
            self.repair_chains(limit)
            self._perturb(limit, self.options.wide_perturbations, target)
        if self.least_seconds(limit) <= target:
            return
        if exact_states is None:
            self._restart(limit, target)
        elif self.exact.size <= exact_states:
            self.evaluate_exact(limit)
        elif len(self.program.ops) * len(self.program.backward) <= self.options.exact_size:
            nodes = self.options.exact_nodes
            self.evaluate_optimum(optimum(self.exact.program, limit, seconds=math.inf, nodes=nodes))
        else:
            self._restart(limit, target)

    def _perturb(self, limit: int, shares: Sequence[float], target: float) -> None:
        """Evict the best schedule to shares of the limit and repair it, down to a target."""
        for share in shares:
            best = self.best(limit)
            if best is None or best.simulation.extra_seconds <= target:
                return
            self._repair(best, int(limit * share), limit)

    def is_gap_wide(self, limit: int) -> bool:
        """Return whether the fastest schedule within ``limit`` bytes is far from its bound."""
        wide = self.options.wide_gap * self.program.step_seconds
        return self.least_seconds(limit) - self.bound(limit).seconds > wide

    def repair_chains(self, limit: int) -> None:
        """Repair the schedules of chains of blocks for about ``limit`` bytes."""
        limits = [int(limit * factor) for factor in self.options.chain_limits]
        for form in self.chain_forms:
            chain = self.chain_program(max(limits), form)
            found = (
                chain.schedule(each)
                for each in limits
                if chain.seconds(each) <= self._most_repaired_seconds
            )
            for schedule in dict.fromkeys(found):
                if schedule is not None:
                    self._repair(self.evaluate(schedule), limit, limit)

    def approach(self, limit: int) -> None:
        """Search within more than the limit, and repair what is found for the limit itself.

        Only where the gap to the bound is still wide.
        """
        options = self.options
        if not self.is_gap_wide(limit):
            return
        above = int(limit * options.approached)
        self.fit(above, options.factors_along)
        self.refine(
            above, options.refined_along, options.perturbations[:1], options.exact_states_along
        )
        for candidate in (self.best(above), *self._promising(limit, options.refined)):
            if candidate is not None:
                self._repair(candidate, limit, limit)
        target = (1 + options.tolerance) * self.bound(limit).seconds
        self._perturb(limit, options.perturbations, target)

    def evaluate_exact(self, limit: int) -> None:
        """Evaluate the schedule of the dynamic program.

        It is solved for a bound first, whose schedule is the best there is if it fits.
        """
        if any(self.program.forward_takes):
            found = self.evaluate_optimum(replace(self.exact, takes_saved=True).optimum(limit))
            if found is None or found.simulation.peak_bytes <= limit:
                return
        self.evaluate_optimum(self.exact.optimum(limit))

    def evaluate_optimum(self, optimum: Optimum) -> Candidate | None:
        """Evaluate and return the schedule of an exact solver, if it has one."""
        schedule = optimum.schedule
        if schedule is None:
            return None
        # An op on either side takes no extra time if the forward does not depend on it.
        return self.evaluate(with_runs(self.program, schedule.runs, schedule.before))

    def _restart(self, limit: int, target: float) -> None:
        """Repair with randomized seconds, beyond the reach of single moves.

        Compare GRASP (Feo and Resende 1995).
        """
        options, random, ops = self.options, Random(0), max(len(self.program.ops), 1)
        if not self.is_small:
            return
        # Ops of no time have a little weight too, so that their order varies.
        plain = [
            s + self.program.step_seconds / 1000
            for s in self.program.tables.seconds[: len(self.program.ops)]
        ]
        for k in range(min(options.restarts, options.restart_ops // ops)):
            best = self.best(limit)
            if best is None or best.simulation.extra_seconds <= target:
                return
            start = random.choice(self.legal) if k % 3 == 0 else best
            if k % 2:
                seconds = list(plain)
                for o in random.choices(range(ops), k=random.randint(1, 3)):
                    seconds[o] *= random.choice((1e-3, 1e3))
            else:
                seconds = [s * random.lognormvariate(0, options.noise) for s in plain]
            depth = options.depths[k % len(options.depths)]
            self._repair(start, int(limit * depth), limit, seconds)

    def least_seconds(self, limit: int) -> float:
        """Return the least extra time within ``limit`` bytes, infinite if nothing fits."""
        return min((c.simulation.extra_seconds for c in self.within(limit)), default=math.inf)

    def bound(self, limit: int | None) -> Bound:
        """Return the lower bound on the extra time within ``limit`` bytes."""
        if limit is None:
            return Bound(0.0, 0.0)
        if limit not in self.bound_at:
            self.bound_at[limit] = self.bounds.seconds(limit)
        return self.bound_at[limit]

    def bound_away(self, limit: int | None) -> Bound:
        """Return the lower bound on the extra time if saved values may be sent away."""
        if limit is None or self.program.link is None:
            return self.bound(limit)
        return bound_with_link(self.program, lambda more: self.bound(limit + more))

    def _promising(self, limit: int, count: int) -> list[Candidate]:
        """Return the candidates of least Lagrangian at the bound's price and at four times it."""
        price = self.bound(limit).price or self.low
        chosen: dict[Schedule, Candidate] = {}
        for times in (1.0, 4.0):
            scores: dict[float, Candidate] = {}
            for c in self.legal:
                scores.setdefault(
                    c.simulation.extra_seconds + times * price * (c.simulation.peak_bytes - limit),
                    c,
                )
            chosen.update(
                (scores[score].schedule, scores[score])
                for score in sorted(scores)[: count // 2 or 1]
            )
        return list(chosen.values())

    def _repair(
        self, candidate: Candidate, low: int, limit: int, seconds: Sequence[float] | None = None
    ) -> None:
        """Evict to at most ``low`` bytes, as far as possible, then retain up to ``limit`` bytes.

        ``seconds`` perturbs the order of the moves; the last pass retains by the true seconds.
        """
        while candidate.simulation.peak_bytes > low and not self._is_too_slow(candidate):
            evicted = self._evicted(candidate, low, seconds)
            if evicted.simulation.peak_bytes >= candidate.simulation.peak_bytes:
                break
            candidate = evicted
        if candidate.simulation.peak_bytes <= limit and seconds is not None:
            candidate = self.retained(candidate, limit, seconds)
        if candidate.simulation.peak_bytes <= limit:
            self.retained(candidate, limit, None)

    def _evicted(
        self, candidate: Candidate, limit: int, seconds: Sequence[float] | None = None
    ) -> Candidate:
        """Return a candidate evicted to ``limit`` bytes, or until it recomputes too much."""
        evict = Evict(limit, seconds, self._most_evicted_seconds)
        return self.evaluate(evict(self.program, candidate.schedule, candidate.simulation))

    def retained(
        self, candidate: Candidate, limit: int, seconds: Sequence[float] | None
    ) -> Candidate:
        """Retain within ``limit`` bytes until nothing more is gained."""
        while True:
            retained = self.evaluate(
                Retain(limit, seconds)(self.program, candidate.schedule, candidate.simulation)
            )
            if retained.simulation.peak_bytes > limit or len(retained.schedule.runs) >= len(
                candidate.schedule.runs
            ):
                return candidate
            candidate = retained


def _search_block(
    options: SearchOptions, program: Program, kinds: int
) -> Iterator[tuple[Schedule, Simulation]]:
    """Yield schedules of a block's program from its least peak to its fastest.

    There are fewer where many kinds of blocks are searched.
    """
    options = replace(options, restarts=0, exact_states=0, exact_size=0, path_rounds=0)
    search = LocalSearch(replace(options, chain_blocks=(), small_chain_blocks=()), program)
    search.least_time()
    low = search.least_peak().simulation.peak_bytes
    high = search.baseline.simulation.peak_bytes
    count = max(1, 8 * options.chain_prices // max(8, kinds))
    limits = between(max(low, 1), high, 2 * count + 1)[1::2] if low < high else ()
    for limit in (*map(int, limits), low):
        search.fit(limit, options.factors_along)
        search.refine(limit, options.refined_along, options.perturbations[:1], None)
    for candidate in search.legal:
        yield candidate.schedule, candidate.simulation
