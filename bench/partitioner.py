"""Time the planner by its two faces: ``python bench/partitioner.py``.

``fxckpt.Backend`` and ``fxckpt.Partitioner`` plan the same 16 layers in turn; what counts is the
time in the partition function. A graph without a backward is compiled by fxckpt and by torch's
``aot_eager`` in turn. Both times vary by more than they differ, so that what fxckpt adds is the
time in its backend outside of AOTAutograd.
"""

from __future__ import annotations

import gc
import random
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from functorch.compile import aot_module_simplified, make_boxed_func
from models import LlamaStyle
from torch import Tensor, fx, nn

import fxckpt
from fxckpt.utils.tables import Column, Table

ROUNDS = 7
OPS = 100


class Timed:
    """A function, and the seconds that each call took."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function
        self.seconds: list[float] = []

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        begin = time.perf_counter()
        try:
            return self.function(*args, **kwargs)
        finally:
            self.seconds.append(time.perf_counter() - begin)


def boxed(gm: fx.GraphModule, inputs: Any) -> Callable[..., Any]:
    """Return a graph as a compiled function."""
    return make_boxed_func(gm.forward)


def by_backend(model: nn.Module, x: Tensor) -> tuple[float, str]:
    """Return the seconds that planning takes in a compile by the backend, and the plan's digest."""
    torch.compiler.reset()
    gc.collect()
    backend = fxckpt.Backend(0.7, inner="aot_eager", scope="graph")
    backend.partitioner.partition = timed = Timed(backend.partitioner.partition)  # type: ignore[method-assign]
    torch.compile(model, backend=backend)(x)
    return sum(timed.seconds), backend.plans[0].digest


def by_partitioner(model: nn.Module, x: Tensor) -> tuple[float, str]:
    """Return the seconds and the digest where the partitioner is given to AOTAutograd."""
    torch.compiler.reset()
    gc.collect()
    partitioner = fxckpt.Partitioner(0.7)
    partitioner.expect_ops()  # As the backend does: both faces are to make the same plan.
    partition = Timed(partitioner)

    def backend(gm: fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        return aot_module_simplified(gm, inputs, fw_compiler=boxed, partition_fn=partition)

    torch.compile(model, backend=backend)(x)
    return sum(partition.seconds), partitioner.plans[0].digest


def passing(backend: Any) -> float:
    """Return the seconds of a compile of a graph without a backward."""
    torch.compiler.reset()

    def function(x: Tensor) -> Tensor:
        for _ in range(OPS):
            x = x.sin()
        return x

    compiled = torch.compile(function, backend=backend)
    gc.collect()  # Graphs of earlier compiles are freed now, and not in this one.
    begin = time.perf_counter()
    compiled(torch.ones(8))
    return time.perf_counter() - begin


def own(budget: str | None) -> float:
    """Return the seconds in the backend, outside of AOTAutograd, for such a graph."""
    backend = fxckpt.Backend(budget, inner="aot_eager")
    backend._compile = within = Timed(backend._compile)  # type: ignore[method-assign]
    whole = Timed(backend)
    passing(whole)
    return sum(whole.seconds) - sum(within.seconds)


def main() -> None:
    """Print the medians."""
    model, x = LlamaStyle(16), torch.randn(1, 1024, 256)
    faces = {"Backend": by_backend, "Partitioner": by_partitioner}
    ways = {
        "fxckpt": lambda: fxckpt.Backend("1GiB", inner="aot_eager"),
        "aot_eager": lambda: "aot_eager",
    }
    # The first run measures each kernel's workspace, once in a process.
    digests = {face(model, x)[1] for face in faces.values()}
    assert len(digests) == 1, "the faces make different plans"
    passing("aot_eager")
    seconds: dict[str, list[float]] = {name: [] for name in (*faces, *ways)}
    for _ in range(ROUNDS):
        for name in random.sample(list(faces), len(faces)):
            seconds[name].append(faces[name](model, x)[0])
    for _ in range(3 * ROUNDS):
        for name in random.sample(list(ways), len(ways)):
            seconds[name].append(passing(ways[name]()))
    middle = {name: statistics.median(each) for name, each in seconds.items()}
    rows = tuple(
        (what, 1e3 * middle[name], middle[name] / middle[beside])
        for what, name, beside in (
            ("planning, Backend", "Backend", "Backend"),
            ("planning, Partitioner", "Partitioner", "Backend"),
            (f"{OPS} ops without a backward, aot_eager", "aot_eager", "aot_eager"),
            (f"{OPS} ops without a backward, fxckpt", "fxckpt", "aot_eager"),
        )
    )
    columns = (
        Column("what", "what"),
        Column("ms", "ms", lambda ms: f"{ms:.1f}", is_number=True),
        Column("ratio", "ratio", lambda ratio: f"{ratio:.3f}", is_number=True),
    )
    print(Table(columns, rows))
    for budget in (None, "1GiB"):
        added = statistics.median(own(budget) for _ in range(3 * ROUNDS))
        print(f"a graph that passes through at budget={budget} costs {1e3 * added:.2f} ms")


if __name__ == "__main__":
    main()
