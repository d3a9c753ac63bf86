"""The priced min-cut of one stage: save by bytes or recompute by time, exactly.

Max-flow min-cut (Ford and Fulkerson 1956) on a bipartite reading of the recompute graph, an op and the values it fills being separate
vertices, so that an op with several outputs is paid once:

    source -> op       capacity: seconds of running it again         (op on the sink side: it runs again)
    op     -> value    capacity: price of keeping the value          (cut here: the value is kept)
    value  -> op       infinite                                      (an op that runs again needs what it reads)
    value  -> sink     infinite                                      (the stage needs the value)

A value no op can fill again hangs on the source by its price. The minimum over all cuts is the minimum over all legal choices of
``recompute time + price of what is kept``, shared ancestors counted once. ``networkx`` is the model and the reference solver;
``scipy`` solves the same network in integers, some hundred times faster.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import networkx as nx
import numpy as np
import numpy.typing as npt
from scipy.sparse import csr_array
from scipy.sparse.csgraph import maximum_flow

Vertex = tuple[str, int] | str
IntArray = npt.NDArray[np.integer[Any]]
FloatArray = npt.NDArray[np.float64]
SOURCE, SINK = "source", "sink"
FINITE_SUM = 2**30
"""Finite capacities are scaled so that they add up to this: int32 is what scipy's solvers take."""


@dataclass(frozen=True)
class CutProblem:
    """Ops and values of one stage by position. ``math.inf`` means must not."""

    run_price: tuple[float, ...]
    """Per op: seconds (and priced bytes) of running it again."""
    op_reads: tuple[tuple[int, ...], ...]
    """Per op: the values it reads."""
    keep_price: tuple[float, ...]
    """Per value: price of keeping it."""
    producer: tuple[int, ...]
    """Per value: the op that fills it, or -1."""
    needed: tuple[int, ...]
    """Values the stage needs."""

    def network(self) -> nx.DiGraph[Vertex]:
        """Return the flow network; vertices are ``("op", i)``, ``("value", i)``, ``"source"`` and ``"sink"``."""
        graph: nx.DiGraph[Vertex] = nx.DiGraph()
        graph.add_nodes_from((SOURCE, SINK))
        for i, price in enumerate(self.run_price):
            graph.add_edge(SOURCE, ("op", i), capacity=price, reason="runs again")
            for v in self.op_reads[i]:
                graph.add_edge(("value", v), ("op", i), capacity=math.inf, reason="needs what it reads")
        for v, price in enumerate(self.keep_price):
            tail: Vertex = ("op", self.producer[v]) if self.producer[v] >= 0 else SOURCE
            graph.add_edge(tail, ("value", v), capacity=price, reason="is kept")
        for v in self.needed:
            graph.add_edge(("value", v), SINK, capacity=math.inf, reason="the stage needs it")
        return graph


@dataclass(frozen=True)
class Cut:
    """The answer: values kept and ops run again, by position."""

    kept: frozenset[int]
    runs: frozenset[int]

    def price(self, problem: CutProblem) -> float:
        """Return what the choice costs."""
        return sum(problem.keep_price[v] for v in self.kept) + sum(problem.run_price[o] for o in self.runs)


Solver = Callable[[CutProblem], Cut]


class Unbounded(Exception):
    """Some needed value can be neither kept nor recomputed; ``value`` is its position."""

    def __init__(self, value: int) -> None:
        super().__init__(f"value {value} can be neither kept nor recomputed")
        self.value = value


def _cut_from_sink_side(problem: CutProblem, ops: set[int], values: set[int]) -> Cut:
    kept = frozenset(v for v in values if problem.producer[v] < 0 or problem.producer[v] not in ops)
    return Cut(kept, frozenset(ops))


def _blocked(problem: CutProblem) -> int | None:
    """Return a needed value for which there is no finite choice, or None."""
    possible: dict[int, bool] = {}
    for root in problem.needed:
        stack = [root]
        while stack:
            v = stack[-1]
            if v in possible:
                stack.pop()
                continue
            op = problem.producer[v]
            if math.isfinite(problem.keep_price[v]):
                possible[v] = True
            elif op < 0 or math.isinf(problem.run_price[op]):
                possible[v] = False
            else:
                pending = [u for u in problem.op_reads[op] if u not in possible]
                if pending:
                    stack.extend(pending)
                    continue
                possible[v] = all(possible[u] for u in problem.op_reads[op])
            stack.pop()
        if not possible[root]:
            return root
    return None


def solve_networkx(problem: CutProblem) -> Cut:
    """Reference solver: ``networkx.minimum_cut``. Raises :class:`Unbounded`."""
    blocked = _blocked(problem)
    if blocked is not None:
        raise Unbounded(blocked)
    if not problem.needed:
        return Cut(frozenset(), frozenset())
    graph = problem.network()
    for _, _, data in list(graph.edges(data=True)):
        if math.isinf(data["capacity"]):
            del data["capacity"]  # networkx reads a missing capacity as infinite
    _, (_, sink_side) = nx.minimum_cut(graph, SOURCE, SINK)
    ops = {v[1] for v in sink_side if isinstance(v, tuple) and v[0] == "op"}
    values = {v[1] for v in sink_side if isinstance(v, tuple) and v[0] == "value"}
    return _cut_from_sink_side(problem, ops, values)


@dataclass(frozen=True)
class Memo:
    """A solver that remembers: identical layers and repeated sweeps pose the same problem again and again."""

    solver: Solver
    answers: dict[CutProblem, Cut] = field(default_factory=dict, compare=False, repr=False)

    def __call__(self, problem: CutProblem) -> Cut:
        """Return the cut of ``problem``, solved once."""
        if not any(math.isfinite(price) for price in problem.run_price) and all(map(math.isfinite, problem.keep_price)):
            return Cut(frozenset(problem.needed), frozenset())
        cut = self.answers.get(problem)
        if cut is None:
            cut = self.answers[problem] = self.solver(problem)
        return cut


def solve_scipy(problem: CutProblem) -> Cut:
    """Fast solver: Dinic's algorithm on int32 capacities, rounded to about 1e-9 of their sum. Raises :class:`Unbounded`."""
    blocked = _blocked(problem)
    if blocked is not None:
        raise Unbounded(blocked)
    if not problem.needed:
        return Cut(frozenset(), frozenset())
    n_ops, n_values = len(problem.run_price), len(problem.keep_price)
    source, sink = n_ops + n_values, n_ops + n_values + 1
    tails, heads, capacities = [source] * n_ops, list(range(n_ops)), list(problem.run_price)
    for i, reads in enumerate(problem.op_reads):
        tails.extend([n_ops + v for v in reads])
        heads.extend([i] * len(reads))
        capacities.extend([math.inf] * len(reads))
    tails.extend([p if p >= 0 else source for p in problem.producer])
    heads.extend(range(n_ops, n_ops + n_values))
    capacities.extend(problem.keep_price)
    tails.extend([n_ops + v for v in problem.needed])
    heads.extend([sink] * len(problem.needed))
    capacities.extend([math.inf] * len(problem.needed))
    reached = _sink_side(np.asarray(tails), np.asarray(heads), _whole(np.asarray(capacities)), source, sink)
    ops = {i for i in range(n_ops) if reached[i]}
    values = {v for v in range(n_values) if reached[n_ops + v]}
    return _cut_from_sink_side(problem, ops, values)


def _whole(capacities: FloatArray) -> IntArray:
    """Scale capacities to int32; infinite ones become greater than the sum of all finite ones."""
    finite = np.isfinite(capacities)
    total = float(capacities[finite].sum())
    scale = (FINITE_SUM - len(capacities)) / total if total > 0 else 1.0
    whole = np.full(len(capacities), 2 * FINITE_SUM - 1, dtype=np.int64)
    whole[finite] = np.ceil(capacities[finite] * scale)
    return whole.astype(np.int32)


def _sink_side(tails: IntArray, heads: IntArray, capacities: IntArray, source: int, sink: int) -> list[bool]:
    """Return which vertices can still reach the sink under a maximum flow: the least sink side, fewest runs and fewest kept values.

    Every arc is given with its reverse of capacity 0, so that the flow comes back on the same places and nothing is sorted twice.
    """
    size = sink + 1
    arcs = len(tails)
    from_, to = np.concatenate((tails, heads)), np.concatenate((heads, tails))
    order = np.argsort(from_ * size + to, kind="stable")
    data = np.concatenate((capacities, np.zeros(arcs, dtype=np.int32)))[order]
    indptr = np.concatenate(([0], np.cumsum(np.bincount(from_, minlength=size)))).astype(np.int32)
    network = csr_array((data, to[order].astype(np.int32), indptr), shape=(size, size))
    flow = maximum_flow(network, source, sink, method="dinic").flow
    left = data - flow.data
    # Place of each arc's reverse: arc i and arc i + arcs are one pair.
    place = np.empty(2 * arcs, dtype=np.int64)
    place[order] = np.arange(2 * arcs)
    reverse = np.concatenate((place[arcs:], place[:arcs]))[order]
    open_into = (left[reverse] > 0).tolist()
    neighbours, starts = to[order].tolist(), indptr.tolist()
    reached = [False] * size
    reached[sink] = True
    stack = [sink]
    while stack:
        v = stack.pop()
        for position in range(starts[v], starts[v + 1]):
            if open_into[position] and not reached[neighbours[position]]:
                reached[neighbours[position]] = True
                stack.append(neighbours[position])
    return reached
