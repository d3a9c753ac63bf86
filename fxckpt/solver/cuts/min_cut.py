"""The min-cut of one stage: keep values at the price of their bytes or recompute them, exactly.

Max-flow min-cut (Ford and Fulkerson 1956) on a bipartite form of the recompute graph. An op and the
values it writes are separate vertices, so that an op with several results is paid once:

    source -> op       capacity: cost of recomputing the op   (op on the sink side: recomputed)
    op     -> value    capacity: cost of keeping the value    (arc cut: the value is kept)
    value  -> op       infinite                               (a recomputed op needs its inputs)
    value  -> sink     infinite                               (the stage needs the value)

The arc of a value that no op can recompute comes from the source. The least cut is the least of all
legal choices of ``recompute cost + keep cost``, shared ancestors counted once. ``networkx`` is the
model and the reference solver; ``scipy`` solves the same network in integers, about a hundred times
faster. Planning calls :meth:`Network.solve`, which takes many stages at once; the functions
:func:`solve_networkx` and :func:`solve_scipy` are for tests and for looking.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import networkx as nx
import numpy as np
from scipy.sparse import csr_array
from scipy.sparse.csgraph import breadth_first_order, maximum_flow

from fxckpt.solver.program import BoolArray, FloatArray, IntArray

Vertex = tuple[str, int] | str
SOURCE, SINK = "source", "sink"
FINITE_SUM = 2**30
"""Sum of the finite capacities after scaling; scipy's solvers take int32."""
INFINITE = 2**31 - 1
"""Capacity of an arc that may not be cut: the largest that scipy's maximum flow takes."""
NEGLIGIBLE = 1e-250
"""Sum of costs below which they count as zero: scaled, they would overflow."""


@dataclass(frozen=True)
class CutProblem:
    """Ops and values of one stage, by position; a cost of ``math.inf`` forbids the choice."""

    recompute_cost: tuple[float, ...]
    """Seconds, and bytes by their price, of recomputing each op."""
    op_reads: tuple[tuple[int, ...], ...]
    """Values that each op reads."""
    keep_cost: tuple[float, ...]
    """Price of keeping each value."""
    producer: tuple[int, ...]
    """Op that writes each value, or -1."""
    needed: tuple[int, ...]
    """Values that the stage needs."""

    def network(self) -> nx.DiGraph[Vertex]:
        """Return the flow network.

        Its vertices are ``("op", i)``, ``("value", i)``, ``"source"`` and ``"sink"``.
        """
        graph: nx.DiGraph[Vertex] = nx.DiGraph()
        graph.add_nodes_from((SOURCE, SINK))
        for i, cost in enumerate(self.recompute_cost):
            graph.add_edge(SOURCE, ("op", i), capacity=cost, reason="is recomputed")
            for v in self.op_reads[i]:
                graph.add_edge(
                    ("value", v), ("op", i), capacity=math.inf, reason="needs its inputs"
                )
        for v, cost in enumerate(self.keep_cost):
            tail: Vertex = ("op", self.producer[v]) if self.producer[v] >= 0 else SOURCE
            graph.add_edge(tail, ("value", v), capacity=cost, reason="is kept")
        for v in self.needed:
            graph.add_edge(("value", v), SINK, capacity=math.inf, reason="the stage needs it")
        return graph


@dataclass(frozen=True)
class Cut:
    """Solution of a cut problem: kept values and recomputed ops, by position."""

    kept: frozenset[int]
    runs: frozenset[int]

    def price(self, problem: CutProblem) -> float:
        """Return the sum of the costs of the choice."""
        return sum(problem.keep_cost[v] for v in self.kept) + sum(
            problem.recompute_cost[o] for o in self.runs
        )


Solver = Callable[[CutProblem], Cut]


class InfeasibleCut(Exception):
    """Error for a needed value that can be neither kept nor recomputed, at position ``value``."""

    def __init__(self, value: int) -> None:
        super().__init__(f"value {value} can be neither kept nor recomputed")
        self.value = value


def _cut_from_sink_side(problem: CutProblem, ops: set[int], values: set[int]) -> Cut:
    """Return the cut whose sink side has these ops and values."""
    kept = frozenset(v for v in values if problem.producer[v] < 0 or problem.producer[v] not in ops)
    return Cut(kept, frozenset(ops))


def _infeasible_value(problem: CutProblem) -> int | None:
    """Return a needed value without a choice of finite cost, or None."""
    possible: dict[int, bool] = {}
    for root in problem.needed:
        stack = [root]
        while stack:
            v = stack[-1]
            if v in possible:
                stack.pop()
                continue
            op = problem.producer[v]
            if math.isfinite(problem.keep_cost[v]):
                possible[v] = True
            elif op < 0 or math.isinf(problem.recompute_cost[op]):
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
    """Return a least cut by ``networkx.minimum_cut``, the reference solver.

    Raises :class:`InfeasibleCut` if a needed value has no choice of finite cost.
    """
    infeasible = _infeasible_value(problem)
    if infeasible is not None:
        raise InfeasibleCut(infeasible)
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


def solve_scipy(problem: CutProblem) -> Cut:
    """Return a least cut by :class:`Network`, the fast solver.

    Raises :class:`InfeasibleCut` if a needed value has no choice of finite cost.
    """
    network = Network.disjoint_union([problem])
    kept, runs = network.solve(np.asarray(problem.recompute_cost), np.asarray(problem.keep_cost))
    return Cut(frozenset(np.flatnonzero(kept).tolist()), frozenset(np.flatnonzero(runs).tolist()))


@dataclass(frozen=True, eq=False)
class Network:
    """Disjoint union of several cut problems as one flow network in arrays.

    The arrays are built once; only costs change between solves. Ops and values are numbered through
    all problems. An infinite arc that is the only one out of a value is contracted: a value that
    the stage needs becomes the sink, and a value with one reader becomes that op. Each arc is
    stored with its reverse of capacity 0, for scipy returns the flow in the sparsity pattern it was
    given.
    """

    problems: tuple[CutProblem, ...]
    problem_of_op: IntArray
    """Problem of each op."""
    problem_of_value: IntArray
    """Problem of each value."""
    counts: IntArray
    """Number of costs of each problem."""
    producer: IntArray
    """Op that writes each value, or -1."""
    needed: IntArray
    """Values that their stages need."""
    vertex: IntArray
    """Vertex of each op, then of each value; the source and the sink are the last two vertices."""
    arc: IntArray
    """Index of the arc with the cost of each op, then of each value.

    Values may share an arc; the index is one past the last if no cut depends on the cost.
    """
    head: IntArray
    """Head of each arc."""
    indptr: IntArray
    """First arc of each vertex."""
    reverse: IntArray
    """Index of the reverse of each arc."""
    infinite: FloatArray
    """Capacity of each arc beside the costs: infinite or 0."""

    @classmethod
    def disjoint_union(cls, problems: Sequence[CutProblem]) -> Network:
        """Return the network of ``problems``, whose costs are not read."""
        count = len(problems)
        ops, values = [len(p.op_reads) for p in problems], [len(p.producer) for p in problems]
        problem_of_op = np.repeat(np.arange(count), ops)
        problem_of_value = np.repeat(np.arange(count), values)
        first_op = np.cumsum([0, *ops], dtype=np.int64)
        first_value = np.cumsum([0, *values], dtype=np.int64)
        n_ops = int(first_op[-1])
        producer = np.asarray([o for p in problems for o in p.producer], dtype=np.int64)
        producer = np.where(producer >= 0, producer + first_op[problem_of_value], -1)
        needed = np.asarray([v for p in problems for v in p.needed], dtype=np.int64)
        wanted = needed + np.repeat(first_value[:-1], [len(p.needed) for p in problems])
        reader = np.repeat(np.arange(n_ops), [len(reads) for p in problems for reads in p.op_reads])
        read = (
            np.asarray([v for p in problems for reads in p.op_reads for v in reads], dtype=np.int64)
            + first_value[problem_of_op[reader]]
        )
        vertex, size = _contracted(n_ops, len(producer), wanted, reader, read)
        source, sink = size - 2, size - 1
        is_shared = (vertex[read] >= n_ops) & (vertex[read] < source)
        tails = np.concatenate(
            (
                np.full(n_ops, source),
                np.where(producer >= 0, producer, source),
                vertex[read[is_shared]],
            )
        )
        heads = np.concatenate((np.arange(n_ops), vertex, reader[is_shared]))
        # No cut depends on the arc of a value without readers, nor on that of one kept in any case.
        matters = np.flatnonzero((heads != source) & ((tails != source) | (heads != sink)))
        ways = tails[matters] * size + heads[matters], heads[matters] * size + tails[matters]
        places, place_of = np.unique(np.concatenate(ways), return_inverse=True)
        place = np.full(len(tails), len(places))
        place[matters] = place_of[: len(matters)]
        priced = n_ops + len(producer)
        infinite = np.zeros(len(places))
        infinite[place[priced:]] = INFINITE
        return cls(
            tuple(problems),
            problem_of_op,
            problem_of_value,
            np.diff(first_op) + np.diff(first_value),
            producer,
            wanted,
            np.concatenate((np.arange(n_ops), vertex)),
            place[:priced],
            (places % size).astype(np.int32),
            np.searchsorted(places, np.arange(size + 1) * size).astype(np.int32),
            np.searchsorted(places, places % size * size + places // size),
            infinite,
        )

    def disjoint_copies(self, count: int) -> Network:
        """Return the network of ``count`` copies of the same problems.

        The copies share the source and the sink.
        """
        if count == 1:
            return self
        copy = np.arange(count)[:, np.newaxis]
        inner, arcs = len(self.indptr) - 3, len(self.head)
        # Arcs are sorted by their tails: inner vertices first, then the source, then the sink.
        begin, ends = 0, (int(self.indptr[inner]), int(self.indptr[inner + 1]), arcs)
        blocks, starts = [], [(copy * ends[0] + self.indptr[:inner]).ravel()]
        for end in ends:
            blocks.append(count * begin + copy * (end - begin) + np.arange(end - begin))
            starts.append(np.asarray([count * end]))
            begin = end
        place = np.concatenate((*blocks, np.full((count, 1), count * arcs)), axis=1)
        head, reverse = (
            np.empty(count * arcs, dtype=np.int32),
            np.empty(count * arcs, dtype=np.int64),
        )
        head[place[:, :-1]] = self._renumbered(self.head, copy)
        reverse[place[:, :-1]] = place[:, self.reverse]
        infinite = np.zeros(count * arcs)
        infinite[place[:, :-1]] = self.infinite
        n_ops, n_values = len(self.problem_of_op), len(self.producer)
        of_ops, of_values = slice(0, n_ops), slice(n_ops, None)
        vertex, arc = self._renumbered(self.vertex, copy), place[:, self.arc]
        return Network(
            self.problems * count,
            (copy * len(self.problems) + self.problem_of_op).ravel(),
            (copy * len(self.problems) + self.problem_of_value).ravel(),
            np.tile(self.counts, count),
            np.where(self.producer >= 0, self.producer + copy * n_ops, -1).ravel(),
            (copy * n_values + self.needed).ravel(),
            np.concatenate((vertex[:, of_ops].ravel(), vertex[:, of_values].ravel())),
            np.concatenate((arc[:, of_ops].ravel(), arc[:, of_values].ravel())),
            head,
            np.concatenate(starts).astype(np.int32),
            reverse,
            infinite,
        )

    def _renumbered(self, vertices: IntArray, copy: IntArray) -> IntArray:
        """Return the numbers of ``vertices`` in each copy, one row per copy."""
        inner = len(self.indptr) - 3
        return np.where(
            vertices < inner, vertices + copy * inner, vertices + (len(copy) - 1) * inner
        )

    def solve(
        self, recompute_cost: FloatArray, keep_cost: FloatArray
    ) -> tuple[BoolArray, BoolArray]:
        """Return which values are kept and which ops are recomputed.

        Of equal cuts it is the one of smallest sink side: fewest recomputes and fewest kept values.
        Costs are rounded to about 1e-9 of their problem's sum (Dinic's algorithm on int32). Raises
        :class:`InfeasibleCut` if a needed value has no choice of finite cost.
        """
        n_ops, n_values = len(recompute_cost), len(keep_cost)
        if not len(self.needed):
            return np.zeros(n_values, dtype=bool), np.zeros(n_ops, dtype=bool)
        capacity = self._capacity(recompute_cost, keep_cost)
        size = len(self.indptr) - 1
        source, sink = size - 2, size - 1
        flow = maximum_flow(
            csr_array((capacity, self.head, self.indptr), shape=(size, size)),
            source,
            sink,
            method="dinic",
        ).flow
        # The residual graph backwards: an arc is there if its reverse has capacity left.
        is_open = (capacity > flow.data)[self.reverse]
        starts = np.concatenate(([0], np.cumsum(is_open)), dtype=np.int32)[self.indptr]
        residual = csr_array((np.ones(starts[-1]), self.head[is_open], starts), shape=(size, size))
        sink_side = np.zeros(size, dtype=bool)
        sink_side[breadth_first_order(residual, sink, return_predecessors=False)] = True
        runs, wanted = sink_side[self.vertex[:n_ops]], sink_side[self.vertex[n_ops:]]
        kept = wanted & ~(np.append(runs, False)[self.producer])
        self._check(kept, runs, wanted, recompute_cost, keep_cost)
        return kept, runs

    def rounding_errors(self, recompute_cost: FloatArray, keep_cost: FloatArray) -> FloatArray:
        """Return the most by which rounding may raise each problem's cut above the least."""
        errors: FloatArray = self.counts / self._scale(recompute_cost, keep_cost)
        return errors

    def _scale(self, recompute_cost: FloatArray, keep_cost: FloatArray) -> FloatArray:
        """Return the factor from costs to capacities of each problem."""
        parts = len(self.problems)
        total = np.bincount(
            self.problem_of_op,
            weights=np.where(np.isfinite(recompute_cost), recompute_cost, 0.0),
            minlength=parts,
        )
        total += np.bincount(
            self.problem_of_value,
            weights=np.where(np.isfinite(keep_cost), keep_cost, 0.0),
            minlength=parts,
        )
        return (FINITE_SUM - self.counts) / np.where(total > NEGLIGIBLE, total, 1.0)

    def _capacity(self, recompute_cost: FloatArray, keep_cost: FloatArray) -> IntArray:
        """Return the capacities as int32, each problem scaled on its own.

        Infinite costs become greater than the sum of all finite ones.
        """
        scale = self._scale(recompute_cost, keep_cost)
        whole = np.ceil(
            np.concatenate(
                (
                    recompute_cost * scale[self.problem_of_op],
                    keep_cost * scale[self.problem_of_value],
                )
            )
        )
        finite = np.bincount(
            self.arc, weights=np.minimum(whole, INFINITE), minlength=len(self.infinite) + 1
        )
        capacity = self.infinite + finite[:-1]
        return np.minimum(capacity, INFINITE).astype(np.int32)

    def _check(
        self,
        kept: BoolArray,
        runs: BoolArray,
        wanted: BoolArray,
        recompute_cost: FloatArray,
        keep_cost: FloatArray,
    ) -> None:
        """Raise :class:`InfeasibleCut` if the cut contains an infinite arc."""
        if (
            wanted[self.needed].all()
            and np.isfinite(keep_cost[kept]).all()
            and np.isfinite(recompute_cost[runs]).all()
        ):
            return
        first_op = first_value = 0
        for problem in self.problems:
            n_ops, n_values = len(problem.op_reads), len(problem.producer)
            priced = replace(
                problem,
                recompute_cost=tuple(recompute_cost[first_op : first_op + n_ops].tolist()),
                keep_cost=tuple(keep_cost[first_value : first_value + n_values].tolist()),
            )
            infeasible = _infeasible_value(priced)
            if infeasible is not None:
                raise InfeasibleCut(first_value + infeasible)
            first_op, first_value = first_op + n_ops, first_value + n_values
        raise AssertionError(
            "an infinite arc was cut although every needed value has a finite choice"
        )


def _contracted(
    n_ops: int, n_values: int, needed: IntArray, reader: IntArray, read: IntArray
) -> tuple[IntArray, int]:
    """Return the vertex of each value, and the number of vertices.

    The source and the sink are the last two. ``reader`` reads ``read``, pair by pair. A value
    without a reader joins the source, at no cost.
    """
    readers = np.bincount(read, minlength=n_values)
    is_needed = np.zeros(n_values, dtype=bool)
    is_needed[needed] = True
    is_shared = (readers > 1) & ~is_needed
    source = n_ops + int(is_shared.sum())
    vertex = np.full(n_values, source, dtype=np.int64)
    vertex[read] = reader
    vertex[is_shared] = np.arange(n_ops, source)
    vertex[needed] = source + 1
    return vertex, source + 2
