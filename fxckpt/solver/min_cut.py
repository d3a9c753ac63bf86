"""The priced min-cut of one stage: save by bytes or recompute by time, exactly.

Max-flow min-cut (Ford and Fulkerson 1956) on a bipartite reading of the recompute graph, an op and the values it fills being separate
vertices, so that an op with several outputs is paid once:

    source -> op       capacity: seconds of running it again         (op on the sink side: it runs again)
    op     -> value    capacity: price of keeping the value          (cut here: the value is kept)
    value  -> op       infinite                                      (an op that runs again needs what it reads)
    value  -> sink     infinite                                      (the stage needs the value)

A value no op can fill again hangs on the source by its price. The minimum over all cuts is the minimum over all legal choices of
``recompute time + price of what is kept``, shared ancestors counted once. ``networkx`` is the model and the reference solver;
``scipy`` solves the same network in integers, some hundred times faster, and many stages in one call.
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
"""Finite capacities are scaled so that they add up to this: int32 is what scipy's solvers take."""
INFINITE = 2**31 - 1
NOTHING = 1e-250
"""Prices that add up to less are all the same: scaled, they would overflow."""


@dataclass(frozen=True)
class CutProblem:
    """Ops and values of one stage by position. ``math.inf`` means must not."""

    recompute_cost: tuple[float, ...]
    """Per op: seconds (and priced bytes) of running it again."""
    op_reads: tuple[tuple[int, ...], ...]
    """Per op: the values it reads."""
    keep_cost: tuple[float, ...]
    """Per value: price of keeping it."""
    producer: tuple[int, ...]
    """Per value: the op that fills it, or -1."""
    needed: tuple[int, ...]
    """Values the stage needs."""

    def network(self) -> nx.DiGraph[Vertex]:
        """Return the flow network; vertices are ``("op", i)``, ``("value", i)``, ``"source"`` and ``"sink"``."""
        graph: nx.DiGraph[Vertex] = nx.DiGraph()
        graph.add_nodes_from((SOURCE, SINK))
        for i, price in enumerate(self.recompute_cost):
            graph.add_edge(SOURCE, ("op", i), capacity=price, reason="runs again")
            for v in self.op_reads[i]:
                graph.add_edge(
                    ("value", v), ("op", i), capacity=math.inf, reason="needs what it reads"
                )
        for v, price in enumerate(self.keep_cost):
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
        return sum(problem.keep_cost[v] for v in self.kept) + sum(
            problem.recompute_cost[o] for o in self.runs
        )


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


def solve_scipy(problem: CutProblem) -> Cut:
    """Fast solver: :class:`Network` of this one problem. Raises :class:`Unbounded`."""
    network = Network.disjoint_union([problem])
    kept, runs = network.solve(np.asarray(problem.recompute_cost), np.asarray(problem.keep_cost))
    return Cut(frozenset(np.flatnonzero(kept).tolist()), frozenset(np.flatnonzero(runs).tolist()))


@dataclass(frozen=True, eq=False)
class Network:
    """Several cut problems side by side in one flow network, laid out as arrays once; only prices change between solves.

    Ops and values are numbered through: those of the first problem first. An infinite arc that is the only way on from a value is contracted:
    what the stage needs is the sink, and a value that one op alone reads is that op. Each arc is stored with its reverse of capacity 0, because
    scipy returns the flow on the places it was given.
    """

    problems: tuple[CutProblem, ...]
    part_of_op: IntArray
    """Per op: the problem it belongs to."""
    part_of_value: IntArray
    prices: IntArray
    """Per problem: how many prices it has."""
    producer: IntArray
    """Per value: the op that fills it, or -1."""
    needed: IntArray
    vertex: IntArray
    """Per op and then per value: its vertex. The source and the sink are the last two."""
    arc: IntArray
    """Per op and then per value: place of the arc that has its price, which several may share; one past the last where no cut depends on it."""
    head: IntArray
    indptr: IntArray
    reverse: IntArray
    """Per arc: place of its reverse."""
    infinite: FloatArray
    """Per arc: its capacity beside those of ops and values, infinite or 0."""

    @classmethod
    def disjoint_union(cls, problems: Sequence[CutProblem]) -> Network:
        """Lay out ``problems``; their prices are not read."""
        count = len(problems)
        ops, values = [len(p.op_reads) for p in problems], [len(p.producer) for p in problems]
        part_of_op, part_of_value = (
            np.repeat(np.arange(count), ops),
            np.repeat(np.arange(count), values),
        )
        first_op, first_value = (
            np.cumsum([0, *ops], dtype=np.int64),
            np.cumsum([0, *values], dtype=np.int64),
        )
        n_ops = int(first_op[-1])
        made_by = np.asarray([o for p in problems for o in p.producer], dtype=np.int64)
        made_by = np.where(made_by >= 0, made_by + first_op[part_of_value], -1)
        needed = np.asarray([v for p in problems for v in p.needed], dtype=np.int64)
        wanted = needed + np.repeat(first_value[:-1], [len(p.needed) for p in problems])
        reader = np.repeat(np.arange(n_ops), [len(reads) for p in problems for reads in p.op_reads])
        read = (
            np.asarray([v for p in problems for reads in p.op_reads for v in reads], dtype=np.int64)
            + first_value[part_of_op[reader]]
        )
        vertex, size = _contracted(n_ops, len(made_by), wanted, reader, read)
        source, sink = size - 2, size - 1
        is_shared = (vertex[read] >= n_ops) & (vertex[read] < source)
        tails = np.concatenate(
            (
                np.full(n_ops, source),
                np.where(made_by >= 0, made_by, source),
                vertex[read[is_shared]],
            )
        )
        heads = np.concatenate((np.arange(n_ops), vertex, reader[is_shared]))
        # No cut depends on the arc of a value that nobody wants, nor on that of one that is kept in any case.
        matters = np.flatnonzero((heads != source) & ((tails != source) | (heads != sink)))
        ways = tails[matters] * size + heads[matters], heads[matters] * size + tails[matters]
        places, place_of = np.unique(np.concatenate(ways), return_inverse=True)
        place = np.full(len(tails), len(places))
        place[matters] = place_of[: len(matters)]
        priced = n_ops + len(made_by)
        infinite = np.zeros(len(places))
        infinite[place[priced:]] = INFINITE
        return cls(
            tuple(problems),
            part_of_op,
            part_of_value,
            np.diff(first_op) + np.diff(first_value),
            made_by,
            wanted,
            np.concatenate((np.arange(n_ops), vertex)),
            place[:priced],
            (places % size).astype(np.int32),
            np.searchsorted(places, np.arange(size + 1) * size).astype(np.int32),
            np.searchsorted(places, places % size * size + places // size),
            infinite,
        )

    def copies(self, count: int) -> Network:
        """Return the network of ``count`` times the same problems; they share the source and the sink."""
        if count == 1:
            return self
        copy = np.arange(count)[:, np.newaxis]
        inner, arcs = len(self.indptr) - 3, len(self.head)
        # The arcs lie by their tails: those of the copies' vertices, then those of the source, and of the sink.
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
        n_ops, n_values = len(self.part_of_op), len(self.producer)
        of_ops, of_values = slice(0, n_ops), slice(n_ops, None)
        vertex, arc = self._renumbered(self.vertex, copy), place[:, self.arc]
        return Network(
            self.problems * count,
            (copy * len(self.problems) + self.part_of_op).ravel(),
            (copy * len(self.problems) + self.part_of_value).ravel(),
            np.tile(self.prices, count),
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
        """Return the numbers of ``vertices`` in each copy, a row a copy."""
        inner = len(self.indptr) - 3
        return np.where(
            vertices < inner, vertices + copy * inner, vertices + (len(copy) - 1) * inner
        )

    def solve(
        self, recompute_cost: FloatArray, keep_cost: FloatArray
    ) -> tuple[BoolArray, BoolArray]:
        """Return which values are kept and which ops run again: the least sink side, fewest runs and fewest kept values.

        Prices are rounded to about 1e-9 of their problem's sum (Dinic's algorithm on int32). Raises :class:`Unbounded`.
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
        open_into = (capacity > flow.data)[self.reverse]
        starts = np.concatenate(([0], np.cumsum(open_into)), dtype=np.int32)[self.indptr]
        residual = csr_array(
            (np.ones(starts[-1]), self.head[open_into], starts), shape=(size, size)
        )
        sink_side = np.zeros(size, dtype=bool)
        sink_side[breadth_first_order(residual, sink, return_predecessors=False)] = True
        runs, wanted = sink_side[self.vertex[:n_ops]], sink_side[self.vertex[n_ops:]]
        kept = wanted & ~(np.append(runs, False)[self.producer])
        self._check(kept, runs, wanted, recompute_cost, keep_cost)
        return kept, runs

    def errors(self, recompute_cost: FloatArray, keep_cost: FloatArray) -> FloatArray:
        """Return, per problem, by how much the cut of :meth:`solve` may be dearer than the least, from rounding."""
        errors: FloatArray = self.prices / self._scale(recompute_cost, keep_cost)
        return errors

    def _scale(self, recompute_cost: FloatArray, keep_cost: FloatArray) -> FloatArray:
        """Return, per problem, what its prices are multiplied by."""
        parts = len(self.problems)
        total = np.bincount(
            self.part_of_op,
            weights=np.where(np.isfinite(recompute_cost), recompute_cost, 0.0),
            minlength=parts,
        )
        total += np.bincount(
            self.part_of_value,
            weights=np.where(np.isfinite(keep_cost), keep_cost, 0.0),
            minlength=parts,
        )
        return (FINITE_SUM - self.prices) / np.where(total > NOTHING, total, 1.0)

    def _capacity(self, recompute_cost: FloatArray, keep_cost: FloatArray) -> IntArray:
        """Scale prices to int32, each problem on its own; infinite ones become greater than the sum of all finite ones."""
        scale = self._scale(recompute_cost, keep_cost)
        whole = np.ceil(
            np.concatenate(
                (recompute_cost * scale[self.part_of_op], keep_cost * scale[self.part_of_value])
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
        """Raise :class:`Unbounded` if the cut goes through an infinite arc."""
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
            blocked = _blocked(priced)
            if blocked is not None:
                raise Unbounded(first_value + blocked)
            first_op, first_value = first_op + n_ops, first_value + n_values
        raise AssertionError(
            "an infinite arc was cut although every needed value has a finite choice"
        )


def _contracted(
    n_ops: int, n_values: int, needed: IntArray, reader: IntArray, read: IntArray
) -> tuple[IntArray, int]:
    """Return the vertex of each value, and how many vertices there are, the source and the sink being the last two.

    ``reader`` reads ``read``, pair by pair. A value that nobody wants is left with the source, where it costs nothing.
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
