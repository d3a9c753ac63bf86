"""How far the planner is from the optimum: an integer program in Checkmate's form on small training graphs.

python bench/optimum.py [graphs]
"""

from __future__ import annotations

import random
import statistics
import sys
import time

from tabulate import tabulate

from fxckpt.passes.oracle import optimum
from fxckpt.passes.price_search import PriceSearch
from fxckpt.passes.program import IN_BACKWARD, Op, Program, Side, Storage

SHARES = (0.0, 0.1, 0.3, 0.6)
"""Budgets: how far from the floor to the uncheckpointed peak."""


def training_graph(seed: int, ops: int) -> Program:
    """Return a random net: a chain with skips, and a backward op for every forward op that reads its input, its output or both."""
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
        forward.append(Op(f"f{i}", Side.FORWARD, float(draw.choice([0, 1, 1, 2, 3, 8, 20])), 1, tuple(sorted(reads)), (i,)))
    backward: list[Op] = []
    for i in reversed(range(count)):
        kind = draw.random()
        reads = {i, *forward[i].reads} if kind >= 0.8 else {i} if kind >= 0.45 else set(forward[i].reads)
        reads = {s for s in reads if not storages[s].is_output} | ({backward[-1].writes[0]} if backward else set())
        storages.append(Storage(f"g{i}", storages[i - 1].bytes if i else 1, IN_BACKWARD))
        backward.append(Op(f"b{i}", Side.BACKWARD, 1.0, 1, tuple(sorted(reads)), (len(storages) - 1,)))
    backward.append(Op("output", Side.BACKWARD, 0.0, 0, backward[-1].writes, ()))
    return Program(tuple(forward), tuple(backward), tuple(storages), 1)


def main(graphs: int) -> None:
    """Print the gaps."""
    search = PriceSearch()
    gaps: list[float] = []
    ours = solver = 0.0
    unproven = 0
    for seed in range(graphs):
        program = training_graph(seed, 15)
        free = search(program, lambda baseline: baseline)
        low, high = free.floor.simulation.peak_bytes, free.baseline.simulation.peak_bytes
        for share in SHARES:
            limit = int(low + share * (high - low))
            begin = time.perf_counter()
            best = search(program, lambda baseline, limit=limit: limit).best  # type: ignore[misc]
            between = time.perf_counter()
            exact = optimum(program, limit)
            ours, solver = ours + between - begin, solver + time.perf_counter() - between
            if best is None or exact.seconds is None or not exact.is_proven:
                unproven += 1
                continue
            extra = best.simulation.extra_seconds
            gaps.append((extra - exact.seconds) / exact.seconds if exact.seconds > 0 else float(extra > 0))
    pairs = len(gaps)
    table = [
        ("graphs of at most 30 nodes x budgets, proven", f"{pairs} ({unproven} not proven)"),
        ("within 1 % of the optimum's time", f"{sum(g <= 0.01 for g in gaps) / pairs:.1%}"),
        ("within 5 %", f"{sum(g <= 0.05 for g in gaps) / pairs:.1%}"),
        ("mean, greatest gap", f"{statistics.mean(gaps):.2%}, {max(gaps):.0%}"),
        ("seconds a plan: fxckpt, integer program", f"{ours / pairs:.2f}, {solver / pairs:.2f}"),
    ]
    print(tabulate(table, disable_numparse=True))


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 60)
