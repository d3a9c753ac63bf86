"""Time the planner by its two faces: ``python bench/partitioner.py``.

``fxckpt.Backend`` and ``fxckpt.Partitioner`` plan the same 16 layers in turn; what counts is the
time in the partition function. A graph without a backward is compiled by fxckpt and by torch's
``aot_eager`` in turn; what counts is the difference.
"""

from __future__ import annotations

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


def by_backend(model: nn.Module, x: Tensor) -> float:
    """Return the seconds that planning takes in a compile by the backend."""
    torch.compiler.reset()
    backend = fxckpt.Backend(0.7, inner="aot_eager", scope="graph")
    backend.partitioner.split = split = Timed(backend.partitioner.split)  # type: ignore[method-assign]
    torch.compile(model, backend=backend)(x)
    return sum(split.seconds)


def by_partitioner(model: nn.Module, x: Tensor) -> float:
    """Return the seconds that planning takes in a compile with a partitioner for AOTAutograd."""
    torch.compiler.reset()
    partition = Timed(fxckpt.Partitioner(0.7))

    def backend(gm: fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        return aot_module_simplified(gm, inputs, fw_compiler=boxed, partition_fn=partition)

    torch.compile(model, backend=backend)(x)
    return sum(partition.seconds)


def passing(backend: Any) -> float:
    """Return the seconds of a compile of a graph without a backward."""
    torch.compiler.reset()

    def function(x: Tensor) -> Tensor:
        for _ in range(OPS):
            x = x.sin()
        return x

    compiled = torch.compile(function, backend=backend)
    begin = time.perf_counter()
    compiled(torch.ones(8))
    return time.perf_counter() - begin


def main() -> None:
    """Print the medians."""
    model, x = LlamaStyle(16), torch.randn(1, 1024, 256)
    for measure in (by_backend, by_partitioner):
        measure(model, x)  # Measures each kernel's workspace, once in a process.
    faces: dict[str, list[float]] = {"Backend": [], "Partitioner": []}
    passed: dict[str, list[float]] = {"fxckpt": [], "aot_eager": []}
    for _ in range(ROUNDS):
        faces["Backend"].append(by_backend(model, x))
        faces["Partitioner"].append(by_partitioner(model, x))
    passing("aot_eager")
    for _ in range(3 * ROUNDS):
        passed["fxckpt"].append(passing(fxckpt.Backend("1GiB", inner="aot_eager")))
        passed["aot_eager"].append(passing("aot_eager"))
    middle = {name: statistics.median(s) for name, s in {**faces, **passed}.items()}
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
    difference = middle["fxckpt"] - middle["aot_eager"]
    print(f"a graph that passes through costs {1e3 * difference:.2f} ms")


if __name__ == "__main__":
    main()
