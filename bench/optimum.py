"""The planner's distance from the optimum of an integer program, on small training graphs.

The integer program has the form of Checkmate (Jain et al., MLSys 2020).

    python bench/optimum.py [graphs]
"""

from __future__ import annotations

import math
import random
import statistics
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from tabulate import tabulate

from fxckpt.solver.exact.milp import optimum
from fxckpt.solver.program import IN_BACKWARD, Op, Program, Side, Storage
from fxckpt.solver.search.price_search import PriceSearch

SHARES = (0.0, 0.1, 0.3, 0.6)
"""Budgets, as positions between the floor and the uncheckpointed peak."""


def training_graph(seed: int, ops: int) -> Program:
    """Return a random training graph of at most ``ops`` forward ops.

    The forward is a chain with skips. The backward op of each forward op reads its inputs, its
    output or both.
    """
    draw = random.Random(seed)
    count = draw.randint(max(4, ops - 5), ops)
    forward: list[Op] = []
    storages: list[Storage] = []
    for i in range(count):
        reads = {i - 1} if i else set[int]()
        if i > 1 and draw.random() < 0.35:
            reads.add(draw.randrange(max(0, i - 5), i - 1))
        nbytes = 1 if i == count - 1 else draw.choice([1, 2, 4, 4, 8, 8, 16])
        storages.append(Storage(f"v{i}", nbytes, i, is_output=i == count - 1))
        forward.append(
            Op(
                f"f{i}",
                Side.FORWARD,
                float(draw.choice([0, 1, 1, 2, 3, 8, 20])),
                1,
                tuple(sorted(reads)),
                (i,),
            )
        )
    backward: list[Op] = []
    for i in reversed(range(count)):
        kind = draw.random()
        reads = (
            {i, *forward[i].reads}
            if kind >= 0.8
            else {i}
            if kind >= 0.45
            else set(forward[i].reads)
        )
        reads = {s for s in reads if not storages[s].is_output} | (
            {backward[-1].writes[0]} if backward else set()
        )
        storages.append(Storage(f"g{i}", storages[i - 1].bytes if i else 1, IN_BACKWARD))
        backward.append(
            Op(f"b{i}", Side.BACKWARD, 1.0, 1, tuple(sorted(reads)), (len(storages) - 1,))
        )
    backward.append(Op("output", Side.BACKWARD, 0.0, 0, backward[-1].writes, ()))
    storages.append(Storage("t", 1, IN_BACKWARD))
    backward[0] = replace(backward[0], reads=(*backward[0].reads, len(storages) - 1))
    return Program(tuple(forward), tuple(backward), tuple(storages), (len(storages) - 1,))


@dataclass
class Tally:
    """The relative gaps of one search to the optimum, and its time."""

    gaps: list[float] = field(default_factory=list)
    seconds: float = 0.0

    def row(self, name: str) -> tuple[str, ...]:
        """Return a row of the table."""
        pairs = len(self.gaps)
        near = (f"{sum(g <= share for g in self.gaps) / pairs:.1%}" for share in (0.01, 0.05))
        return (
            name,
            str(pairs),
            *near,
            f"{statistics.mean(self.gaps):.2%}",
            f"{max(self.gaps):.0%}",
            f"{self.seconds / pairs:.2f}",
        )


def compare(graphs: int, ops: int) -> Iterator[tuple[str, ...]]:
    """Yield a row for the planner, one without its exact solvers, and one for the optimum."""
    searches = {
        "planner": PriceSearch(),
        "planner, no exact solver": PriceSearch(exact_states=0, exact_size=0),
    }
    tallies = {name: Tally() for name in searches}
    solver = Tally()
    unproven = 0
    for seed in range(graphs):
        program = training_graph(seed, ops)
        free = PriceSearch()(program, lambda baseline: baseline)
        low, high = free.least_peak.simulation.peak_bytes, free.baseline.simulation.peak_bytes
        for share in SHARES:
            limit = int(low + share * (high - low))
            start = time.perf_counter()
            exact = optimum(program, limit)
            solver.seconds += time.perf_counter() - start
            if exact.seconds is None or not exact.is_proven:
                unproven += 1
                continue
            solver.gaps.append(0.0)
            for name, search in searches.items():
                start = time.perf_counter()
                best = search(program, lambda baseline, limit=limit: limit).best  # type: ignore[misc]
                tallies[name].seconds += time.perf_counter() - start
                extra = math.inf if best is None else best.simulation.extra_seconds
                gap = extra - exact.seconds
                tallies[name].gaps.append(
                    gap / exact.seconds if exact.seconds > 0 else float(gap > 0)
                )
    nodes = f"at most {2 * ops} nodes: "
    for name, tally in tallies.items():
        yield tally.row(nodes + name)
    yield solver.row(f"{nodes}integer program ({unproven} more not proven in a minute)")


def main(graphs: int) -> None:
    """Print a table of the gaps."""
    rows = [*compare(graphs, 15), *compare(graphs // 3, 20)]
    head = (
        "graphs of",
        "pairs",
        "within 1 %",
        "within 5 %",
        "mean gap",
        "greatest",
        "seconds a plan",
    )
    print(tabulate(rows, head, disable_numparse=True, colalign=("left", *["right"] * 6)))


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 60)
