"""One budget over blocks compiled one by one, beside torch's checkpoint and a whole graph.

python bench/step.py [aot_eager] [inductor]
"""

from __future__ import annotations

import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from unittest import mock

import torch
from tabulate import tabulate
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import fxckpt

BLOCKS, WIDTH, VOCABULARY, ROUNDS = 8, 256, 1000, 7
SHARES = (0.8, 0.6, 0.4)


class Block(nn.Module):
    """Attention without heads, and an MLP."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.query = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x)
        h = h + torch.softmax(self.query(h) @ h.transpose(-1, -2) / WIDTH**0.5, -1) @ h
        return x + self.down(nn.functional.gelu(self.up(h)))


class Model(nn.Module):
    """Blocks, and a head with its loss, which stay eager."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(BLOCKS))
        self.head = nn.Linear(WIDTH, VOCABULARY)
        self.checkpoints = False

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.checkpoints else block(x)
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1), y.flatten())


X, Y = torch.randn(4, 256, WIDTH), torch.randint(0, VOCABULARY, (4, 256))


def made() -> Model:
    """Return the model, the same each time."""
    torch.manual_seed(0)
    torch._dynamo.reset()
    return Model()


def step(model: Model) -> None:
    """Run a forward and a backward, with no gradient before it."""
    model.zero_grad(set_to_none=True)
    model(X, Y).backward()


def peak(model: Model) -> int:
    """Return the peak of a step, which frees no gradient."""
    model.zero_grad(set_to_none=True)
    return fxckpt.measure_peak(lambda: step(model))


def seconds(ways: list[Callable[[], None]]) -> list[float]:
    """Return the median seconds of each way, run in turn."""
    times: list[list[float]] = [[] for _ in ways]
    for _ in range(ROUNDS):
        for way, took in zip(ways, times, strict=True):
            begin = time.perf_counter()
            way()
            took.append(time.perf_counter() - begin)
    return [statistics.median(took) for took in times]


def microseconds_a_call(model: Model, backend: fxckpt.Backend) -> tuple[float, float]:
    """Return the mean microseconds of choosing a call's level, and of following its forward.

    Following is all that a forward takes beyond the compiled one: it measures memory, lets the
    backward be found, and chooses.
    """
    tracker = backend.step
    assert tracker is not None
    spent: Counter[str] = Counter()

    def timed(name: str, function: Callable[..., object]) -> Callable[..., object]:
        def call(*args: object) -> object:
            begin = time.perf_counter()
            try:
                return function(*args)
            finally:
                spent[name] += time.perf_counter() - begin

        return call

    graphs = backend._graphs
    for plan in (e for graph in graphs for e in graph.plans if e.run is not None):
        plan.run = timed("run", plan.run)
    with ExitStack() as stack:
        for name in ("forward", "_settle", "_position"):
            function = timed(name, getattr(tracker, name))
            stack.enter_context(mock.patch.object(tracker, name, function))
        for _ in range(ROUNDS):
            step(model)
    calls = ROUNDS * BLOCKS
    choosing = 1e6 * (spent["_settle"] + spent["_position"]) / calls
    return choosing, 1e6 * (spent["forward"] - spent["run"]) / calls


def main(inner: str) -> None:
    """Print a row for each way, with one inner compiler."""
    eager, checkpointed = made(), made()
    checkpointed.checkpoints = True
    whole = peak(eager)
    ways, rows = (
        [eager, checkpointed],
        [
            ["eager, uncheckpointed", "", "", whole, "", ""],
            ["eager, torch.utils.checkpoint per block", "", "", peak(checkpointed), "", ""],
        ],
    )
    wanted = [p.grad.clone() for p in eager.parameters()]
    for share in SHARES:
        model, limit = made(), int(share * whole)
        backend = fxckpt.compile_blocks(model.blocks, limit, inner=inner)
        first, *_, last = (peak(model) for _ in range(5))
        report = backend.report().step
        assert report is not None
        is_equal = all(map(torch.equal, wanted, (p.grad for p in model.parameters())))
        name = f"fxckpt, blocks, {share:.0%}" + (", bitwise equal" if is_equal else "")
        rows.append([name, limit, first, last, report.predicted_peak_bytes, len(backend.plans)])
        ways.append(model)
    for share in SHARES:
        model, limit = made(), int(share * whole)
        backend = fxckpt.Backend(limit, inner=inner, scope="step")
        model.compile(backend=backend)
        first, *_, last = (peak(model) for _ in range(3))
        plan = backend.plans[-1]
        planned = plan.compiled_peak_bytes or plan.peak_bytes
        name = f"fxckpt, whole model, {share:.0%}"
        rows.append([name, limit, first, last, planned, len(backend.plans)])
        ways.append(model)
    times = seconds([partial(step, way) for way in ways])
    model = made()
    backend = fxckpt.compile_blocks(model.blocks, int(0.6 * whole), inner=inner)
    for _ in range(3):
        step(model)
    choosing, following = microseconds_a_call(model, backend)
    print(f"inner={inner}, {BLOCKS} blocks, {torch.get_num_threads()} threads")
    print(f"a call: {choosing:.0f} us to choose its level, {following:.0f} us to follow it")
    print(
        tabulate(
            [
                [
                    row[0],
                    *(f"{n / 1e6:.2f}" if n else "" for n in row[1:5]),
                    row[5],
                    f"{t / times[0]:.2f}",
                ]
                for row, t in zip(rows, times, strict=True)
            ],
            ["way", "budget MB", "first step MB", "step MB", "predicted MB", "plans", "x eager"],
            tablefmt="github",
        )
    )


if __name__ == "__main__":
    for inner in sys.argv[1:] or ["aot_eager", "inductor"]:
        main(inner)
