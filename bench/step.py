"""One budget over blocks compiled one by one, beside torch's checkpoint and a whole graph.

python bench/step.py [aot_eager] [inductor]
"""

from __future__ import annotations

import statistics
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from functools import partial
from unittest import mock

import torch
from tabulate import tabulate
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import fxckpt

BLOCKS, WIDTH, VOCABULARY, ROUNDS = 8, 256, 1000, 15
SHARES = (0.8, 0.6, 0.4)
STOCK = {"aot_eager": "aot_eager_decomp_partition", "inductor": "inductor"}
"""Compilers of torch that heed its own budget."""
MICRO_BATCHES = 4
SCHEDULES = {
    "GPipe": "F0 F0 F0 F0 F1 F1 F1 F1 B1 B1 B1 B1 B0 B0 B0 B0",
    "1F1B": "F0 F0 F1 B1 F0 B0 F1 B1 F0 B0 F1 B1 B0 F1 B1 B0",
}
"""Forwards and backwards of two stages in one process, in the order of a schedule."""


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
        self.torchs_budget = 1.0
        """Torch's own budget whenever its blocks are compiled: other models' resets make it so."""

    def through(self, blocks: Iterable[nn.Module], x: Tensor) -> Tensor:
        """Return what some of the blocks make of their input."""
        for block in blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.checkpoints else block(x)
        return x

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        """Return the loss of what the last block makes."""
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1), y.flatten())

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.loss(self.through(self.blocks, x), y)


X, Y = torch.randn(4, 256, WIDTH), torch.randint(0, VOCABULARY, (4, 256))


def made() -> Model:
    """Return the model, the same each time."""
    torch.manual_seed(0)
    torch._dynamo.reset()
    return Model()


def step(model: Model) -> None:
    """Run a forward and a backward, with no gradient before it."""
    model.zero_grad(set_to_none=True)
    with torch._functorch.config.patch(activation_memory_budget=model.torchs_budget):
        model(X, Y).backward()


def peak(model: Model) -> int:
    """Return the peak of a step, which frees no gradient."""
    model.zero_grad(set_to_none=True)
    return fxckpt.measure_peak(lambda: step(model))


def ratios(ways: list[Callable[[], None]]) -> list[float]:
    """Return the median, over rounds that run each way once, of its time over the first way's.

    It is this process's time on the processor, which other work disturbs less than a clock's.
    """
    times: list[list[float]] = [[] for _ in ways]
    for _ in range(ROUNDS):
        for way, took in zip(ways, times, strict=True):
            begin = time.process_time()
            way()
            took.append(time.process_time() - begin)
    return [
        statistics.median(mine / first for mine, first in zip(took, times[0], strict=True))
        for took in times
    ]


def pipelined(model: Model, schedule: str) -> None:
    """Run a step of two stages, each half of the blocks, by a schedule."""
    model.zero_grad(set_to_none=True)
    halves = model.blocks[: BLOCKS // 2], model.blocks[BLOCKS // 2 :]
    xs, ys = X.chunk(MICRO_BATCHES), Y.chunk(MICRO_BATCHES)
    sent: list[Tensor] = []
    received: list[Tensor] = []
    losses: list[Tensor] = []
    done = Counter[str]()
    for act in schedule.split():
        i = done[act]
        done[act] += 1
        if act == "F0":
            sent.append(model.through(halves[0], xs[i]))
        elif act == "F1":
            received.append(sent[i].detach().requires_grad_())
            losses.append(model.loss(model.through(halves[1], received[i]), ys[i]))
        elif act == "B1":
            losses[i].backward()
            losses[i] = sent[i].new_empty(0)
        else:
            sent[i].backward(received[i].grad)
            sent[i] = received[i] = sent[i].new_empty(0)


def pipelines(inner: str) -> None:
    """Print a row for each way to run a pipeline."""
    rows = []
    for name, schedule in SCHEDULES.items():
        eager, checkpointed = made(), made()
        checkpointed.checkpoints = True
        ways = [eager, checkpointed]
        peaks = [[pipeline_peak(way, schedule)] for way in ways]
        wanted = [p.grad.clone() for p in eager.parameters()]
        names, limits = ["eager, uncheckpointed", "eager, checkpoint per block"], [0, 0]
        for share in SHARES[:2]:
            model, limit = made(), int(share * peaks[0][0])
            fxckpt.compile_blocks(model.blocks, limit, inner=inner, in_flight=MICRO_BATCHES)
            peaks.append([pipeline_peak(model, schedule) for _ in range(5)])
            is_equal = all(map(torch.equal, wanted, (p.grad for p in model.parameters())))
            names.append(f"fxckpt, blocks, {share:.0%}" + (", bitwise equal" if is_equal else ""))
            ways.append(model)
            limits.append(limit)
        times = ratios([partial(pipelined, way, schedule) for way in ways])
        for way, limit, found, ratio in zip(names, limits, peaks, times, strict=True):
            cells = (limit, found[0] if limit else 0, found[-1])
            rows.append(
                [
                    name,
                    way,
                    *(f"{n / 1e6:.2f}" if n else "" for n in cells),
                    f"{ratio:.2f}",
                ]
            )
    heads = ["schedule", "way", "budget MB", "first step MB", "step MB", "x eager"]
    print(tabulate(rows, heads, tablefmt="github"))


def pipeline_peak(model: Model, schedule: str) -> int:
    """Return the peak of a pipelined step."""
    model.zero_grad(set_to_none=True)
    return fxckpt.measure_peak(lambda: pipelined(model, schedule))


def microseconds_a_call(model: Model, backend: fxckpt.Backend) -> tuple[float, float]:
    """Return the median microseconds of choosing a call's level, and of following its forward.

    Following is all that a forward takes beyond the compiled one: it measures memory, lets the
    backward be found, and chooses. The clock is one that takes no call of the kernel.
    """
    tracker = backend.step
    assert tracker is not None
    spent: dict[str, list[float]] = defaultdict(list)

    def timed(name: str, function: Callable[..., object]) -> Callable[..., object]:
        def call(*args: object) -> object:
            begin = time.perf_counter()
            try:
                return function(*args)
            finally:
                spent[name].append(time.perf_counter() - begin)

        return call

    for plan in (e for graph in backend._graphs for e in graph.plans if e.run is not None):
        plan.run = timed("run", plan.run)
    with ExitStack() as stack:
        for name in ("forward", "_position"):
            function = timed(name, getattr(tracker, name))
            stack.enter_context(mock.patch.object(tracker, name, function))
        for _ in range(ROUNDS):
            step(model)
    following = [a - b for a, b in zip(spent["forward"], spent["run"], strict=True)]
    return 1e6 * statistics.median(spent["_position"]), 1e6 * statistics.median(following)


Row = tuple[str, int, int, int, int, str, str]
"""A way to run the step: its name, budget, peaks of the first and of a later step, predicted peak,
milliseconds of planned recompute and number of plans; 0 and empty where there is none."""


def baselines(inner: str) -> list[tuple[Model, Row]]:
    """Return the model without fxckpt: eager, checkpointed, and within torch's own budget."""
    eager, checkpointed, budgeted = made(), made(), made()
    checkpointed.checkpoints = True
    budgeted.torchs_budget = 0.5
    for block in budgeted.blocks:
        block.compile(backend=STOCK[inner])
    step(budgeted)
    return [
        (model, (name, 0, 0, peak(model), 0, "", ""))
        for model, name in (
            (eager, "eager, uncheckpointed"),
            (checkpointed, "eager, torch.utils.checkpoint per block"),
            (budgeted, "torch's budget 0.5, blocks"),
        )
    ]


def by_blocks(share: float, limit: int, inner: str, wanted: list[Tensor]) -> tuple[Model, Row]:
    """Return the model with its blocks compiled one by one within a budget of the step."""
    model = made()
    backend = fxckpt.compile_blocks(model.blocks, limit, inner=inner)
    first, *_, last = (peak(model) for _ in range(5))
    report = backend.report().step
    assert report is not None
    is_equal = all(map(torch.equal, wanted, (p.grad for p in model.parameters())))
    name = f"fxckpt, blocks, {share:.0%}" + (", bitwise equal" if is_equal else "")
    extra, plans = f"{1e3 * report.extra_seconds:.1f}", str(len(backend.plans))
    return model, (name, limit, first, last, report.predicted_peak_bytes, extra, plans)


def as_one(share: float, limit: int, inner: str) -> tuple[Model, Row]:
    """Return the model compiled as one graph within a budget."""
    model = made()
    backend = fxckpt.Backend(limit, inner=inner, scope="step")
    model.compile(backend=backend)
    first, *_, last = (peak(model) for _ in range(3))
    plan = backend.plans[-1]
    planned = plan.compiled_peak_bytes or plan.peak_bytes
    name = f"fxckpt, whole model, {share:.0%}"
    extra, plans = f"{1e3 * plan.recompute_seconds:.1f}", str(len(backend.plans))
    return model, (name, limit, first, last, planned, extra, plans)


def main(inner: str) -> None:
    """Print a row for each way, with one inner compiler."""
    found = baselines(inner)
    (eager, (*_, whole, _, _, _)), (_, (*_, least, _, _, _)) = found[:2]
    wanted = [p.grad.clone() for p in eager.parameters()]
    for share in (*SHARES, least / whole):
        found.append(by_blocks(share, round(share * whole), inner, wanted))
    for share in SHARES:
        found.append(as_one(share, round(share * whole), inner))
    times = ratios([partial(step, model) for model, _ in found])
    model = made()
    backend = fxckpt.compile_blocks(model.blocks, int(0.6 * whole), inner=inner)
    for _ in range(3):
        step(model)
    choosing, following = microseconds_a_call(model, backend)
    print(f"inner={inner}, {BLOCKS} blocks, {torch.get_num_threads()} threads")
    print(f"a call: {choosing:.0f} us to choose its level, {following:.0f} us to follow it")
    rows = [
        [name, *(f"{n / 1e6:.2f}" if n else "" for n in sizes), extra, plans, f"{ratio:.2f}"]
        for (_, (name, *sizes, extra, plans)), ratio in zip(found, times, strict=True)
    ]
    sizes_in_mb = ("budget MB", "first step MB", "step MB", "predicted MB")
    heads = ["way", *sizes_in_mb, "recompute ms", "plans", "x eager"]
    print(tabulate(rows, heads, tablefmt="github"))


if __name__ == "__main__":
    torch.set_num_threads(1)
    for inner in sys.argv[1:] or ["aot_eager", "inductor"]:
        main(inner)
        pipelines(inner)
