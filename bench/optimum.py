"""The planner's distance from the optimum of an integer program, on small training graphs.

The integer program has the form of Checkmate (Jain et al., MLSys 2020). Cut-down stacks of layers
tell what is far from the optimum where the certificate of a deep one is loose, its plan or its
bound.

    python bench/optimum.py [graphs]
    python bench/optimum.py --stacks
"""

from __future__ import annotations

import functools
import math
import random
import statistics
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from tabulate import tabulate

from fxckpt.solver.exact.lower_bounds import LowerBounds
from fxckpt.solver.exact.milp import optimum
from fxckpt.solver.exact.path_bounds import PathBounds
from fxckpt.solver.program import IN_BACKWARD, Op, Program, Side, Storage
from fxckpt.solver.search.price_search import PriceSearch
from fxckpt.solver.search.prices import price_range

SHARES = (0.0, 0.1, 0.3, 0.6)
"""Budgets, as positions between the floor and the uncheckpointed peak."""
PATH_ROUNDS = 3000
"""Rounds of the search for tighter bounds of stacks."""
PATH_MOMENTS = 32
"""Moments of those bounds."""


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


def stack(layers: int) -> Program:
    """Return layers of five values each, in the proportions of a Llama-style model.

    Queries, keys and values are one value of 3,000 bytes, attention and the residual stream are of
    1,000, and what is between the matmuls of the MLP is of 8,000. Seconds are shares of a step in
    percent, as FLOPs give them with 32 layers at 2,048 tokens and width 256.
    """
    ops: list[Op] = []
    backward: list[Op] = []
    storages: list[Storage] = []

    def run(name: str, seconds: float, reads: tuple[int, ...], nbytes: int) -> int:
        storages.append(Storage(name, nbytes, len(ops)))
        written = len(storages) - 1
        ops.append(Op(name, Side.FORWARD, seconds, 1, reads, (written,)))
        return written

    def run_backward(name: str, reads: tuple[int, ...], nbytes: int) -> int:
        storages.append(Storage(name, nbytes, IN_BACKWARD))
        written = len(storages) - 1
        backward.append(Op(name, Side.BACKWARD, 1.0, 1, reads, (written,)))
        return written

    x = run("x0", 1e-3, (), 1000)
    values = []
    for i in range(layers):
        projected = run(f"projected{i}", 0.0901, (x,), 3000)
        attention = run(f"attention{i}", 0.4808, (projected,), 1000)
        middle = run(f"middle{i}", 0.0300, (x, attention), 1000)
        hidden = run(f"hidden{i}", 0.2404, (middle,), 8000)
        values.append((x, projected, attention, middle, hidden))
        x = run(f"x{i + 1}", 0.1202, (middle, hidden), 1000)
    storages.append(Storage("tangent", 1000, IN_BACKWARD))
    gradient = tangent = len(storages) - 1
    for i, (x, projected, attention, middle, hidden) in reversed(list(enumerate(values))):
        of_hidden = run_backward(f"d_hidden{i}", (gradient, hidden), 8000)
        of_middle = run_backward(f"d_middle{i}", (of_hidden, middle, gradient), 1000)
        of_attention = run_backward(f"d_attention{i}", (of_middle, attention), 1000)
        of_projected = run_backward(f"d_projected{i}", (of_attention, projected, attention), 3000)
        gradient = run_backward(f"d_x{i}", (of_projected, of_middle, x), 1000)
    backward.append(Op("output", Side.BACKWARD, 0.0, 0, (gradient,), ()))
    return Program(tuple(ops), tuple(backward), tuple(storages), (tangent,))


def stacks() -> Iterator[tuple[str, ...]]:
    """Yield a row for each cut-down stack and budget: the optimum, the search and the bounds."""
    search = PriceSearch(small_ops=0, exact_states=0, exact_size=0)
    for layers in (2, 3, 4):
        program = stack(layers)
        for limit in (18_000, 19_000, 20_000, 21_000, 22_000, 23_000, 24_000):
            exact = optimum(program, limit)
            found = search(program, functools.partial(lambda limit, _: limit, limit))
            bounds = LowerBounds(program, *price_range(program))
            tight = PathBounds(bounds, rounds=PATH_ROUNDS, moments=PATH_MOMENTS)
            best = None if found.best is None else found.best.simulation.extra_seconds
            least = "" if exact.seconds is None else f"{exact.seconds:.2f}"
            yield (
                str(layers),
                f"{limit:,}",
                least if exact.is_proven else f"{exact.bound_seconds:.2f} to {least}",
                "does not fit" if best is None else f"{best:.2f}",
                f"{bounds.seconds(limit).seconds:.2f}",
                f"{tight.seconds(limit).seconds:.2f}",
                f"{bounds.peak_bytes:,}",
            )


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


def print_stacks() -> None:
    """Print a table of the cut-down stacks."""
    head = ("layers", "budget", "optimum", "search", "bound", "tighter bound", "no peak below")
    print(tabulate(list(stacks()), head, disable_numparse=True, colalign=("right",) * 7))


if __name__ == "__main__":
    if "--stacks" in sys.argv:
        print_stacks()
    else:
        main(int(sys.argv[1]) if len(sys.argv) > 1 else 60)
