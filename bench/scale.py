"""Growth of the planner's time and memory with the number of layers of a Llama-style stack.

python bench/scale.py [layers ...]
"""

from __future__ import annotations

import math
import resource
import sys
import time

from models import llama_style
from tabulate import tabulate

from fxckpt.costs.models import checked
from fxckpt.costs.roofline import Roofline
from fxckpt.passes.analysis.joint import read_facts
from fxckpt.planner.capture import capture_joint
from fxckpt.planner.pipeline import prepare
from fxckpt.solver.search.price_search import PriceSearch

COST = Roofline(100e12, 1.5e12, 0.0)


def main(layers: list[int]) -> None:
    """Print a row for each stack.

    The exponents are those of time over nodes, from one row to the next. Memory is the growth of
    the process's peak.
    """
    table = []
    before: tuple[int, float] | None = None
    for count in layers:
        model, inputs = llama_style(count)
        joint = capture_joint(model, (), inputs)
        prepare(joint)
        peak_before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        start = time.perf_counter()
        facts = read_facts(joint.module, num_fwd_outputs=joint.num_fwd_outputs, cost=checked(COST))
        collected = time.perf_counter()
        found = PriceSearch()(facts.program, lambda baseline: baseline // 2)
        done = time.perf_counter()
        growth = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - peak_before) / 1024
        nodes, seconds = len(joint.module.graph.nodes), done - start
        exponent = (
            ""
            if before is None
            else f"{math.log(seconds / before[1]) / math.log(nodes / before[0]):.2f}"
        )
        assert found.best is not None
        extra, least = (
            found.best.simulation.extra_seconds / facts.program.step_seconds,
            found.bound.seconds / facts.program.step_seconds,
        )
        table.append(
            (
                count,
                nodes,
                f"{collected - start:.2f}",
                f"{done - collected:.2f}",
                exponent,
                f"{growth:.0f}",
                f"{extra:+.2%}",
                f"{least:+.2%}",
            )
        )
        before = nodes, seconds
        print(table[-1], flush=True)
    head = (
        "layers",
        "joint nodes",
        "facts s",
        "search s",
        "exponent",
        "MiB",
        "extra time at half the peak",
        "least possible",
    )
    print(tabulate(table, head, disable_numparse=True, colalign=("right",) * 8))


if __name__ == "__main__":
    main([int(a) for a in sys.argv[1:]] or [16, 32, 64, 128])
