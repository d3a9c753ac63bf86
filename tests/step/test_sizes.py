"""Sizes that vary from step to step under one budget."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.nested._internal.nested_tensor import jagged_from_list

import fxckpt
from fxckpt.solver.step_choice import LevelChoice, Moment, choose_few
from fxckpt.step import levels
from fxckpt.step.record import LearnedStep

TOP = 1024
SCALARS = 64
"""Bytes of a few numbers of the loss, outside of the graphs."""


class Block(nn.Module):
    """A residual MLP behind a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(16), nn.Linear(16, 64), nn.Linear(64, 16)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


class Model(nn.Module):
    """Blocks and a loss over rows."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(5))
        self.head = nn.Linear(16, 40)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x).logsumexp(-1).mean()


def step(model: nn.Module, x: Tensor) -> tuple[int, list[Tensor]]:
    """Return the peak of a step, and its gradients."""
    for p in model.parameters():
        p.grad = None
    peak = fxckpt.measure_peak(lambda: model(x).backward())
    return peak, [p.grad for p in model.parameters() if p.grad is not None]


def lengths() -> list[int]:
    draw = random.Random(1)
    return [TOP, *(draw.randrange(64, TOP + 1) for _ in range(12))]


@pytest.mark.parametrize("by_blocks", [False, True])
def test_each_length_takes_its_own_level(by_blocks: bool) -> None:
    """Random lengths keep the budget, compile nothing anew, and recompute where they must."""
    model = Model()
    longest, _ = step(model, torch.randn(TOP, 16))
    plain = Model()
    plain.load_state_dict(model.state_dict())
    limit = longest // 2
    if by_blocks:
        backend, compiled = fxckpt.compile_blocks(model.blocks, limit, inner="aot_eager"), model
    else:
        backend = fxckpt.Backend(limit, inner="aot_eager")
        compiled = torch.compile(model, backend=backend)
    graphs, seconds = [], {}
    for n in lengths():
        x = torch.randn(n, 16)
        torch._dynamo.mark_dynamic(x, 0, min=2, max=TOP)
        peak, found = step(compiled, x)
        assert peak <= limit
        assert all(map(torch.equal, found, step(plain, x)[1]))
        report = backend.report().step
        assert report is not None and report.measured_peak_bytes <= report.predicted_peak_bytes
        if not by_blocks:
            assert report.measured_peak_bytes == report.predicted_peak_bytes
        graphs.append(len(backend._graphs))
        seconds[n] = report.extra_seconds
    # The first two steps learn what is in flight at once.
    assert len(set(graphs[2:])) == 1
    assert min(seconds.values()) == 0 < seconds[TOP]


def test_lengths_that_were_seen_cost_no_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    """A choice is made once for each length, and not anew for what another length measured."""
    made: list[int] = []

    def counted(*args: Any, **options: Any) -> LevelChoice:
        made.append(0)
        return choose_few(*args, **options)

    monkeypatch.setattr(levels, "choose_few", counted)
    model = Model()
    limit = step(model, torch.randn(TOP, 16))[0] // 2
    compiled = torch.compile(model, backend=fxckpt.Backend(limit, inner="aot_eager"))

    def run() -> int:
        for n in lengths():
            x = torch.randn(n, 16)
            torch._dynamo.mark_dynamic(x, 0, min=2, max=TOP)
            step(compiled, x)
        return len(made)

    # A level that is new is chosen twice: it is compiled in between.
    assert run() <= len(set(lengths())) + 4
    assert run() == run()


def test_growing_lengths_make_one_plan() -> None:
    """A batch that grows under a budget that never binds has one dynamic plan."""
    model = Model()
    backend = fxckpt.Backend("1GiB", inner="aot_eager")
    counter = CompileCounterWithBackend(backend)
    compiled = torch.compile(model, backend=counter)
    for n in (64, 65, 100, 200, 400, 800, 1600, 3200):
        step(compiled, torch.randn(n, 16))
    assert len(backend.plans) == counter.frame_count == 2


def test_growing_lengths_keep_a_budget() -> None:
    """Lengths above all that were seen take lower levels of the same graph."""
    model = Model()
    limit = step(model, torch.randn(TOP, 16))[0] // 2
    backend = fxckpt.Backend(limit, inner="aot_eager")
    compiled = torch.compile(model, backend=backend)
    seconds = []
    for n in (64, 96, 256, 512, 768, TOP):
        assert step(compiled, torch.randn(n, 16))[0] <= limit
        report = backend.report().step
        assert report is not None
        seconds.append(report.extra_seconds)
    assert len(backend._graphs) == 2
    assert seconds[1] == 0 < seconds[-1]


def test_fractions_are_of_the_largest_step() -> None:
    """A fraction is of the uncheckpointed step at the largest sizes."""
    model = Model()
    longest, _ = step(model, torch.randn(TOP, 16))
    compiled = torch.compile(model, backend=fxckpt.Backend(0.6, inner="aot_eager"))
    for n in (64, 96, 512, TOP, TOP, 256):
        assert step(compiled, torch.randn(n, 16))[0] <= 0.61 * longest


@pytest.mark.parametrize("by_blocks", [False, True])
def test_a_smaller_step_may_take_as_much(by_blocks: bool) -> None:
    """A last batch has the budget of the others, though it is a step of its own."""
    model = Model()
    backend = fxckpt.Backend(0.6, inner="aot_eager")
    for block in model.blocks if by_blocks else ():
        block.compile(backend=backend)
    call = model if by_blocks else torch.compile(model, backend=backend)
    found = []
    for n in (512, 512, 512, 64):
        step(call, torch.randn(n, 16))
        report = backend.report().step
        assert report is not None
        found.append(report.budget_bytes)
    assert found[-1] >= found[-2]


def test_floats_that_vary_have_levels() -> None:
    """Graphs with floats as inputs are compiled at several levels, each right for any float."""

    class Scaled(Model):
        scale = 0.3

        def forward(self, x: Tensor) -> Tensor:
            x = x.cos() * self.scale
            torch._dynamo.graph_break()
            return super().forward(x * self.scale)

    model = Scaled()
    limit = int(0.6 * step(model, torch.randn(TOP, 16))[0])
    backend = fxckpt.Backend(limit, inner="aot_eager")
    compiled = torch.compile(model, backend=backend, dynamic=True)
    for k, n in enumerate((512, TOP, 128, TOP, TOP)):
        x, model.scale = torch.randn(n, 16), 0.3 + k / 7
        peak, found = step(compiled, x)
        assert peak <= limit and all(map(torch.equal, found, step(model, x)[1]))
    report = backend.report().step
    assert report is not None and report.settled_at == 2
    assert max(sum(plan.run is not None for plan in g.plans) for g in backend._graphs) > 1


@pytest.mark.parametrize("budget", ["min", 1.0, "10KiB"])
def test_a_dynamic_batch_of_two_stays_dynamic(budget: float | str) -> None:
    """A size at its lower bound is guarded above, and does not become a constant."""
    model = nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 8))
    forward = torch.compile(model, backend=fxckpt.Backend(budget, inner="aot_eager"))
    for batch in (2, 5):
        x = torch.randn(batch, 8)
        torch._dynamo.mark_dynamic(x, 0)
        forward(x).sum().backward()


@pytest.mark.parametrize("budget", [None, "min", 0.9, "1GiB"])
def test_nested_tensors_train(budget: float | str | None) -> None:
    """The ragged size of a jagged tensor is a name, and no number to plan for."""

    def gradients(backend: Any) -> list[Tensor]:
        torch._dynamo.reset()
        torch.manual_seed(0)
        parts = [torch.randn(n, 3, requires_grad=True) for n in (2, 3, 4)]
        ragged, _ = jagged_from_list(parts, None)

        @torch.compile(backend=backend, fullgraph=True, dynamic=True)
        def forward(x: Tensor) -> Tensor:
            return (nn.functional.silu(x.sin()) * x).cos()

        forward(ragged).values().sum().backward()
        return [p.grad for p in parts if p.grad is not None]

    expected = gradients("aot_eager")
    found = gradients(fxckpt.Backend(budget, inner="aot_eager"))
    assert len(found) == 3 and all(map(torch.equal, expected, found))


class Attention(nn.Module):
    """Attention without a kernel of its own, and a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.all = nn.LayerNorm(16), nn.Linear(16, 48)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.all(self.norm(x)).view(*x.shape[:2], 3, 4, 4).permute(2, 0, 3, 1, 4)
        weights = (q @ k.transpose(-1, -2) * 0.5).softmax(-1)
        return x + (weights @ v).transpose(1, 2).flatten(2)


def test_sizes_that_vary_take_no_more() -> None:
    """Values are overwritten as in a graph of fixed sizes, and peaks are predicted."""
    peaks = []
    for dynamic in (False, True):
        torch._dynamo.reset()
        model = Model()
        model.blocks = nn.ModuleList(Attention() for _ in range(2))
        backend = fxckpt.Backend("1GiB", inner="aot_eager")
        for block in model.blocks:
            block.compile(backend=backend, dynamic=dynamic)
        for _ in range(3):
            step(model, torch.randn(2, 200, 16))
        report = backend.report().step
        assert report is not None
        assert abs(report.predicted_peak_bytes - report.measured_peak_bytes) <= SCALARS
        peaks.append(report.measured_peak_bytes)
    assert abs(peaks[0] - peaks[1]) <= SCALARS


def test_larger_sizes_are_foreseen_by_near_ones() -> None:
    """Code outside of the graphs grows with the size, from whichever step near it shows most."""
    moment = Moment(1000, (), None)
    step = LearnedStep((), [(moment,)], ((100,),), ((100,),), (None,))
    assert step.moments_at(((150,),)) == (replace(moment, outside_bytes=1500),)
    near, far = (((50,),), (700,)), (((49,),), (10**6,))
    step = replace(step, measured=(near, far))
    assert step.moments_at(((150,),)) == (replace(moment, outside_bytes=2100),)
    assert step.moments_at(((90,),)) == (moment,)
