"""The min-cut of one stage: the same tests for both solvers, with brute force as the oracle."""

from __future__ import annotations

import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fxckpt.solver.cuts.min_cut import (
    Cut,
    CutProblem,
    InfeasibleCut,
    Solver,
    solve_networkx,
    solve_scipy,
)

SOLVERS = [solve_networkx, solve_scipy]


def legal(problem: CutProblem, cut: Cut) -> bool:
    have = set(cut.kept) | {v for v, o in enumerate(problem.producer) if o in cut.runs}
    needs = [*problem.needed, *(v for o in cut.runs for v in problem.op_reads[o])]
    return all(v in have for v in needs)


def brute_force(problem: CutProblem) -> float:
    values, ops = range(len(problem.keep_cost)), range(len(problem.recompute_cost))
    choices = (
        Cut(frozenset(kept), frozenset(runs))
        for n in range(len(values) + 1)
        for kept in itertools.combinations(values, n)
        for m in range(len(ops) + 1)
        for runs in itertools.combinations(ops, m)
    )
    return min((c.price(problem) for c in choices if legal(problem, c)), default=math.inf)


@st.composite
def problems(draw: st.DrawFn) -> CutProblem:
    """Draw a graph of up to 6 ops, each of which writes one or two of up to 8 values."""
    n_ops = draw(st.integers(1, 6))
    producer: list[int] = [-1] if draw(st.booleans()) else []
    reads = []
    for op in range(n_ops):
        before = len(producer)
        reads.append(tuple(draw(st.sets(st.integers(0, before - 1), max_size=2))) if before else ())
        producer.extend([op] * (2 if len(producer) < 7 and draw(st.booleans()) else 1))
    producer = producer[:8]
    reads = [tuple(v for v in r if v < len(producer)) for r in reads]
    price = st.integers(0, 20).map(float)
    run = tuple(draw(price) for _ in range(n_ops))
    keep = tuple(draw(price) for _ in producer)
    needed = tuple(sorted(draw(st.sets(st.integers(0, len(producer) - 1), min_size=1, max_size=3))))
    return CutProblem(run, tuple(reads), keep, tuple(producer), needed)


@pytest.mark.parametrize("solver", SOLVERS)
@given(problem=problems())
def test_cut_is_the_least_legal_choice(solver: Solver, problem: CutProblem) -> None:
    """The cut is legal, and no legal choice costs less."""
    cut = solver(problem)
    assert legal(problem, cut)
    assert cut.price(problem) == pytest.approx(brute_force(problem), abs=1e-6)


@pytest.mark.parametrize("solver", SOLVERS)
def test_op_of_two_values_costs_once(solver: Solver) -> None:
    """One recompute of an op pays for both of its values."""
    problem = CutProblem((5.0,), ((),), (3.0, 3.0), (0, 0), (0, 1))
    assert solver(problem) == Cut(frozenset(), frozenset({0}))


@pytest.mark.parametrize("solver", SOLVERS)
def test_unbounded_names_the_value(solver: Solver) -> None:
    """The error holds the value that can be neither kept nor recomputed."""
    problem = CutProblem((1.0, 1.0), ((), (0,)), (math.inf, math.inf), (-1, 1), (1,))
    with pytest.raises(InfeasibleCut) as error:
        solver(problem)
    assert error.value.value == 1
