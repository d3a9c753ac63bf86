"""Options of the search: how many prices, cuts, repairs and restarts it tries.

The defaults are empirical; ``bench/planner.py`` prints their time and their quality.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from fxckpt.solver.cuts.staged_cut import StagedCut


@dataclass(frozen=True)
class SearchOptions:
    """How much a search tries."""

    stage_counts: tuple[int, ...] = (32, 64)
    """Numbers of stages that each price is tried with."""
    share: float = 0.01
    """Price at each stage as a share of that at the end of the forward."""
    factors: tuple[float, ...] = (1.0, 1.5, 2.5, 4.0)
    """Prices tried for one budget, in multiples of its lower bound's price."""
    factors_along: tuple[float, ...] = (1.5,)
    """``factors`` for each budget of a frontier of more than ``short_frontier`` points."""
    small_ops: int = 150
    """Most forward ops of a small program."""
    small_factors: tuple[float, ...] = (1.0, 1.5, 2.5, 4.0, 0.5, 0.25, 8.0, 16.0, 64.0)
    """``factors`` for small programs."""
    least_peak_shares: tuple[float, ...] = (0.01, 0.001)
    """Shares tried for the least peak."""
    least_peak_prices: int = 3
    """Number of prices tried for the least peak."""
    descents: int = 6
    """Most evictions that lower the least peak further."""
    descent: float = 0.95
    """Share of the peak that each of them aims at."""
    near_peak: float = 0.02
    """Distance of the least peak to its lower bound at which no chain is searched for it."""
    chain_blocks: tuple[int, ...] = (64,)
    """Numbers of blocks of chains (:mod:`~fxckpt.solver.blocks.chain_program`) whose schedules are
    tried."""
    small_chain_blocks: tuple[int, ...] = (64, 16, 8)
    """``chain_blocks`` for small programs, of which 64 blocks are single ops."""
    chain_parts: int = 512
    """Number of equal parts of a budget, rounded up to a power of two, in which a chain counts
    bytes."""
    chain_limits: tuple[float, ...] = (0.97, 1.0, 1.03, 1.06, 1.1, 1.15, 1.2, 1.25, 1.5)
    """Limits of a chain's schedules, in multiples of the budget that they are then repaired for."""
    chain_prices: int = 4
    """Number of limits at which each kind of block is searched; fewer where there are many."""
    chain_descent: float = 0.7
    """``descent`` from a chain's schedule, whose peak evictions lower by more."""
    chain_recomputes: float = 5.0
    """Most extra time of a chain's schedule of least peak, in multiples of the time of the
    forward."""
    repaired_recomputes: float = 10.0
    """``chain_recomputes`` of schedules for one limit, and where that lowers the least peak, of
    programs that are not small."""
    evicted_recomputes: float = 2.0
    """Most extra time of any schedule of a program that is not small, in multiples of
    ``chain_recomputes``."""
    further_recomputes: float = 32.0
    """``chain_recomputes`` where nothing else fits a budget."""
    wide_gap: float = 0.03
    """Distance to the lower bound, as a share of the step's time, at which a chain's schedules are
    repaired."""
    refined: int = 12
    """Number of schedules repaired for one budget."""
    refined_along: int = 2
    """``refined`` for each budget of a frontier of more than ``short_frontier`` points."""
    short_frontier: int = 8
    """Most points of a frontier that is searched as thoroughly as a single budget."""
    perturbations: tuple[float, ...] = (0.9, 0.9, 0.97, 0.98)
    """Shares of the budget that the best schedule is evicted to before it is repaired."""
    wide_perturbations: tuple[float, ...] = (0.85, 0.8, 0.95, 0.9, 0.9, 0.9, 0.97, 0.98)
    """Further ``perturbations`` where the distance to the lower bound is wide."""
    approached: float = 1.12
    """Limit searched last, in multiples of a single budget, where that distance is still wide."""
    restarts: int = 200
    """Number of random restarts for small programs."""
    restart_ops: int = 1500
    """Most restarts times forward ops."""
    noise: float = 1.5
    """Standard deviation of the logarithm of the random factors on the ops' seconds."""
    depths: tuple[float, ...] = (0.9, 0.7, 0.5, 0.97)
    """Shares of the budget that restarts evict to, in turn."""
    exact_states: int = 2**24
    """Most states for which a dynamic program is solved: about half a second and 100 MB."""
    exact_states_along: int = 2**22
    """``exact_states`` for each of many limits: those of a long frontier, or of a given time."""
    exact_size: int = 320
    """Most forward ops times backward ops for which an integer program is solved otherwise."""
    exact_nodes: int = 2000
    """Most nodes of the integer program's search tree."""
    offload_shares: tuple[float, ...] = (0.1, 0.25, 0.45, 0.7)
    """Peaks at which schedules are searched that send values away to fit a budget, as shares of
    the way from the budget to the uncheckpointed peak."""
    offload_depths: tuple[float, ...] = (0.85, 0.7)
    """Shares of the budget that values are sent away to fit, before recomputes are removed."""
    offload_rounds: int = 2
    """Number of times that peaks near that of the best such schedule are searched."""
    fetches_early: bool = True
    """Whether values are fetched as early as the peak allows, not as late as the link does."""
    bisections: int = 10
    """Most limits tried for the least peak within a given time."""
    probes: int = 4
    """Most limits tried below the least peak of a program that is not small."""
    path_rounds: int = 0
    """Rounds of a search for tighter bounds (:mod:`~fxckpt.solver.exact.path_bounds`),
    which takes seconds; 0 leaves it out."""
    path_moments: int = 8
    """Moments of the backward that such bounds look at; more take more time, and more rounds."""
    tolerance: float = 0.005
    """Relative distance to the lower bound at which the search stops."""
    cut: StagedCut = field(default_factory=StagedCut)
    """Solver of one choice of prices."""
