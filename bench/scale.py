"""How the planner's time and memory grow: Llama-style stacks of many layers.

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
from fxckpt.passes.analysis.joint import collect
from fxckpt.planner.capture import capture_joint
from fxckpt.planner.pipeline import prepare
from fxckpt.solver.search import PriceSearch

COST = Roofline(100e12, 1.5e12, 0.0)


def main(layers: list[int]) -> None:
    """Print a row a stack; the exponents are of time over nodes, from one row to the next. Memory is the process's, less what it had before."""
    table = []
    before: tuple[int, float] | None = None
    for count in layers:
        model, inputs = llama_style(count)
        joint = capture_joint(model, (), inputs)
        prepare(joint)
        held = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        begin = time.perf_counter()
        facts = collect(joint.module, num_fwd_outputs=joint.num_fwd_outputs, cost=checked(COST))
        read = time.perf_counter()
        found = PriceSearch()(facts.program, lambda baseline: baseline // 2)
        done = time.perf_counter()
        more = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - held) / 1024
        nodes, seconds = len(joint.module.graph.nodes), done - begin
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
                f"{read - begin:.2f}",
                f"{done - read:.2f}",
                exponent,
                f"{more:.0f}",
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
