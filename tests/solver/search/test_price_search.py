"""The search: within the budget, no worse than its candidates, and deterministic."""

from __future__ import annotations

import contextlib
import functools
import io
import itertools
import math
import os
import subprocess
import sys
from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from fxckpt.solver.cuts.stages import StageBoundaries
from fxckpt.solver.moves.heuristics import Heuristics
from fxckpt.solver.program import IN_BACKWARD, Op, Program, Side, Storage
from fxckpt.solver.schedule import save_all
from fxckpt.solver.search.price_search import PriceSearch, evenly_spaced, never_slower
from tests.solver.programs import QUICK_SEARCH, blocks, chain, interpret, programs


@given(program=programs(), share=st.floats(0.0, 1.0))
def test_best_is_within_the_budget(program: Program, share: float) -> None:
    """The best schedule fits the budget; there is none only below the least peak found."""
    found = QUICK_SEARCH(program, lambda baseline: int(share * baseline))
    limit = int(share * found.baseline.simulation.peak_bytes)
    if found.best is None:
        assert limit < found.least_peak.simulation.peak_bytes
        return
    ran = interpret(program, found.best.schedule)
    assert max(ran.profile) <= limit
    assert found.bound.seconds <= ran.seconds + 1e-6


@given(program=programs())
def test_never_worse_than_a_heuristic(program: Program) -> None:
    """At the peak of a heuristic plan, the search is at least as fast."""
    for schedule in (save_all(program), *Heuristics(program, StageBoundaries(program))()):
        reference = interpret(program, schedule)
        peak = max(reference.profile, default=0)
        found = QUICK_SEARCH(program, functools.partial(lambda limit, baseline: limit, peak))
        assert found.best is not None
        assert found.best.simulation.extra_seconds <= reference.seconds


@given(program=programs())
def test_the_least_peak_is_feasible(program: Program) -> None:
    """A budget of exactly the least peak found has a schedule."""
    peak = QUICK_SEARCH(program, lambda baseline: 0).least_peak.simulation.peak_bytes
    assert QUICK_SEARCH(program, lambda baseline: peak).best is not None


@given(program=programs(), share=st.floats(0.0, 1.0))
def test_no_limit_reaches_below_the_least(program: Program, share: float) -> None:
    """A limit below the least peak that the search reaches, and names, has no schedule."""
    least = QUICK_SEARCH.least_memory(program, math.inf).limit
    assert least is not None
    limit = int(share * least) - 1
    found = QUICK_SEARCH(program, lambda baseline: limit)
    assert found.best is None
    assert found.least_peak.simulation.peak_bytes == least


@given(program=programs())
def test_the_further_floor_is_feasible(program: Program) -> None:
    """Where nothing fits, a further search finds a schedule at the least peak that it names."""
    first = QUICK_SEARCH(program, lambda baseline: 0)
    least = QUICK_SEARCH.further(program, first).least_peak.simulation.peak_bytes
    assert least <= first.least_peak.simulation.peak_bytes
    found = QUICK_SEARCH.further(program, QUICK_SEARCH(program, lambda baseline: least))
    assert found.best is not None
    assert max(interpret(program, found.best.schedule).profile) <= least


def inputs_read_first(count: int) -> Program:
    """Return blocks whose stages read what crosses into them first, as beside adapters."""
    ops: list[Op] = []
    storages: list[Storage] = []
    reads: list[int] = []

    def value(nbytes: int, *inputs: int) -> int:
        ops.append(Op("", Side.FORWARD, 1.0, 1, inputs, (len(storages),)))
        storages.append(Storage("", nbytes, len(ops) - 1))
        return len(storages) - 1

    x = value(10)
    for block in range(count):
        norm = value(10, x)
        wide = value(30, norm)
        activation = value(30, wide)
        out = value(10, activation)
        low = value(1, x)
        adapted = value(10, low)
        added = value(10, x, out)
        reads += [x, norm, wide, activation] if block % 3 == 0 else [x, wide]
        reads += [x, low]
        x = value(10, added, adapted)
    backward: list[Op] = []
    for s in reversed(reads):
        gradient = (len(storages) - 1,) if backward else ()
        backward.append(Op("", Side.BACKWARD, 1.0, 1, (s, *gradient), (len(storages),)))
        storages.append(Storage("", 10, IN_BACKWARD))
    return Program(tuple(ops), tuple(backward), tuple(storages), ())


def test_both_forms_of_blocks_lower_the_least_peak() -> None:
    """Where stages read inputs first, blocks that hold them reach the least peak, and it is named.

    It is found within the rule on recomputes, and no budget below it fits before it is told.
    """
    program, search = inputs_read_first(16), PriceSearch(small_ops=0)
    found = search.least_memory(program, math.inf)
    assert found.limit == found.least_peak.simulation.peak_bytes == 80
    assert found.best is not None
    ran = interpret(program, found.best.schedule)
    assert max(ran.profile) <= 80 and ran.seconds <= 2 * search.chain_recomputes * len(program.ops)
    for limit in (79, 80, 81, 95):
        best = search(program, functools.partial(lambda limit, baseline: limit, limit))
        assert (best.best is None) == (limit < 80)
        assert best.best is not None or best.least_peak.simulation.peak_bytes == 80


def test_budgets_below_the_floor_are_searched_further() -> None:
    """Of 100 blocks, the forward is run more than 5 times for a budget below their floor."""
    program = blocks(100, crossing=10, inner=20)
    search = PriceSearch()
    first = search(program, lambda baseline: 60)
    assert first.best is None and first.least_peak.simulation.peak_bytes == 70
    found = search.further(program, first)
    assert found.best is not None
    ran = interpret(program, found.best.schedule)
    assert found.peak_bound_bytes == 50 <= max(ran.profile) <= 60
    assert ran.seconds > 5 * len(program.ops)
    (along,) = search.frontier(program, lambda least, baseline: [60])
    assert along.best is not None and along.best.simulation.peak_bytes <= 60


def test_the_least_peak_recomputes_ten_forwards() -> None:
    """Chains of 5 to 10 forwards lower the least peak, and no plan of it takes more."""
    program, search = chain(300), PriceSearch()
    found = search.least_memory(program, math.inf)
    assert found.limit == 50 and found.best is not None
    assert 5 < interpret(program, found.best.schedule).seconds / len(program.ops) <= 10
    first = replace(search, repaired_recomputes=0.0).least_memory(program, math.inf)
    assert first.limit == 60
    best = search(program, lambda baseline: 50).best
    assert best is not None and best.simulation.peak_bytes <= 50


def test_enough_time_reaches_the_least_peak() -> None:
    """Time that does not bind gives the plan of the least peak, and far more a lower one."""
    program, search = blocks(100, crossing=10, inner=20), PriceSearch()
    least = search.least_memory(program, math.inf)
    forward = len(program.ops)
    assert least.best is not None and least.limit == 70
    same = search.least_memory(program, least.best.simulation.extra_seconds)
    assert same.best is not None and same.best.schedule == least.best.schedule
    lower = search.least_memory(program, 16 * forward)
    assert lower.best is not None and lower.limit == 60
    assert 10 < interpret(program, lower.best.schedule).seconds / forward <= 16


@given(program=programs(), points=st.integers(2, 6))
def test_time_falls_along_a_frontier(program: Program, points: int) -> None:
    """A greater limit of a frontier never takes more time."""
    frontier = QUICK_SEARCH.frontier(program, functools.partial(evenly_spaced, points))
    found = [f.best for f in frontier]
    assert all(f.best.simulation.peak_bytes <= f.limit for f in frontier)
    assert all(
        a.simulation.extra_seconds >= b.simulation.extra_seconds
        for a, b in itertools.pairwise(found)
    )
    assert all(f.bound.seconds <= f.best.simulation.extra_seconds + 1e-6 for f in frontier)


def test_schedules_of_lower_limits_are_taken() -> None:
    """Of results that were searched apart, a slower one takes the schedule of a lower limit."""
    program = blocks(6, crossing=10, inner=20)
    low, middle, high = QUICK_SEARCH.frontier(program, lambda least, baseline: [90, 120, 150])
    slow, none = replace(middle, best=low.best), replace(high, best=None)
    found = never_slower([replace(low, best=middle.best), slow, none, high])
    assert [f.best for f in found] == [middle.best, middle.best, middle.best, high.best]
    assert [f.limit for f in found] == [90, 120, 150, 150]


def test_same_plan_in_any_process() -> None:
    """A plan does not depend on the hash seed of the process.

    Rates of the machine are measured anew where a process has another number of threads.
    """
    program = (
        "import torch, fxckpt\n"
        "m = torch.nn.Sequential(*(torch.nn.Sequential(torch.nn.Linear(16, 64), "
        "torch.nn.GELU(), torch.nn.Dropout(), torch.nn.Linear(64, 16)) for _ in range(4)))\n"
        "p = fxckpt.plan(m, torch.ones(64, 16), budget=0.6, cost='flops')\n"
        "print(p.saved, p.schedule, p.peak_bytes)\n"
    )
    # This process has a seed of its own.
    seed = "2" if os.environ.get("PYTHONHASHSEED") == "1" else "1"
    other = subprocess.run(
        [sys.executable, "-c", program],
        check=True,
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONHASHSEED": seed},
        timeout=120,
    )
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        exec(program, {})
    assert other.stdout == printed.getvalue() != ""
