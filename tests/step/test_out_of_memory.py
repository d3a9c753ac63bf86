"""Steps that run out of memory: calls that run again, and steps that follow."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fxckpt
from fxckpt.memory_meter import allocation_limit
from tests.step.stack import Block, clear, gradients

X = torch.randn(512, 32)


class Counts(nn.Module):
    """Ops whose results are all saved, and buffers that count calls and sum what they saw."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(32))
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))
        self.register_buffer("seen", torch.zeros(32))

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(8):
            x = nn.functional.dropout(x * self.scale, 0.2).sin()
        self.calls.add_(1)
        self.seen.copy_(0.9 * self.seen + 0.1 * x.detach().mean(0))
        return x


def counted() -> nn.Module:
    return nn.Sequential(*(Counts() for _ in range(4)))


class Whole(nn.Module):
    """Modules that are one graph; Dynamo of torch 2.13 makes one of each module of a Sequential."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = counted()

    def forward(self, x: Tensor) -> Tensor:
        return self.parts(x)


def step(of: nn.Module) -> int:
    """Run a step that frees no gradient; return its peak."""
    clear(of)
    torch.manual_seed(3)
    return fxckpt.measure_peak(lambda: of(X).square().mean().backward())


def twins(make: Callable[[], nn.Module] = counted) -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(0)
    first = make()
    second = make()
    second.load_state_dict(first.state_dict())
    return first, second


def assert_same(a: nn.Module, b: nn.Module) -> None:
    """Assert that gradients and buffers are the same, bit by bit."""
    assert all(map(torch.equal, gradients(a), gradients(b)))
    for (name, one), (_, other) in zip(a.named_buffers(), b.named_buffers(), strict=True):
        assert torch.equal(one, other), name


def test_a_forward_short_of_memory_runs_again() -> None:
    """Calls to come are lowered; nothing is drawn or written twice."""
    plain, model = twins()
    backend = fxckpt.compile_blocks(model, "1GiB", inner="aot_eager")
    for _ in range(2):
        step(plain), step(model)
    report = backend.report().step
    assert report is not None and {row.level for row in report.rows} == {1}
    held = max(row.held_bytes for row in report.rows)
    step(plain)
    ended = torch.get_rng_state()
    clear(model)
    # The third call does not fit as it was chosen.
    with allocation_limit(3 * held - held // 8):
        assert step(model) <= 3 * held
    assert torch.equal(ended, torch.get_rng_state())
    assert_same(plain, model)
    report = backend.report().step
    assert report is not None and sum(row.calls for row in report.rows if row.level == 1) == 2
    # Later steps know how much there is.
    before = len(backend.plans)
    step(plain), clear(model)
    with allocation_limit(3 * held - held // 8):
        step(model)
    assert_same(plain, model)
    assert len(backend.plans) <= before + 2


@pytest.mark.parametrize("make", [counted, Whole])
def test_whole_model_short_of_memory_at_first(make: Callable[[], nn.Module]) -> None:
    """The plan for the whole budget gives way to one that fits, in the backward too."""
    plain, model = twins(make)
    peak = step(plain)
    model.compile(backend=fxckpt.Backend("1GiB", inner="aot_eager", scope="step"))
    with allocation_limit(int(0.5 * peak)):
        assert step(model) <= 0.5 * peak
    assert_same(plain, model)


def test_backward_short_of_memory_lowers_next_step() -> None:
    """The error stands; the same step fits when it is run again."""
    plain, model = twins(lambda: nn.Sequential(*(Block() for _ in range(4))))
    backend = fxckpt.compile_blocks(model, "1GiB", inner="aot_eager")
    wide = max(step(model) for _ in range(2))
    report = backend.report().step
    assert report is not None and "the backward of call" in report.peak_at
    clear(model)
    with allocation_limit(wide - 1), pytest.raises(RuntimeError, match="can't allocate memory"):
        model(X).square().mean().backward()
    step(plain)
    assert step(model) < wide
    assert_same(plain, model)


def test_what_fits_nowhere_raises_the_first_error() -> None:
    """The error is torch's own, and the next step is right."""
    plain, model = twins()
    fxckpt.compile_blocks(model, "1GiB", inner="aot_eager")
    step(plain), step(model)
    with allocation_limit(1000), pytest.raises(RuntimeError, match="can't allocate memory"):
        model(X)
    step(plain), step(model)
    assert_same(plain, model)


def test_writes_inside_a_fused_forward_are_not_repeated() -> None:
    """What a kernel wrote before the error is unknown: the error stands."""
    plain, model = twins()
    backend = fxckpt.compile_blocks(model, "1GiB", inner="inductor")
    step(plain), step(model)
    assert backend._graphs and not any(graph.runs_again for graph in backend._graphs)


class Tail(nn.Module):
    """Compiled blocks, and a tail in Python that needs much memory in one of its two phases."""

    def __init__(self, phase: str) -> None:
        super().__init__()
        self.blocks, self.phase = nn.Sequential(*(Block() for _ in range(4))), phase

    def forward(self, x: Tensor) -> Tensor:
        return Needs.apply(self.blocks(x), self.phase)


class Needs(torch.autograd.Function):
    """The identity, with memory that it takes and gives back."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, phase: str) -> Tensor:
        ctx.phase = phase
        if phase == "forward":
            torch.empty(2**20, dtype=torch.uint8)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        if ctx.phase == "backward":
            torch.empty(2**20, dtype=torch.uint8)
        return gradient, None


def runs_out_of_memory(model: nn.Module) -> bool:
    """Return whether a step does; its error, whose traceback holds tensors, is gone by then."""
    try:
        step(model)
    except RuntimeError as error:
        return "can't allocate memory" in str(error)
    return False


@pytest.mark.parametrize("phase", ["forward", "backward"])
def test_code_outside_short_of_memory_lowers_next_step(phase: str) -> None:
    """An error in code between the graphs stands too; the same step fits when it is run again."""
    plain, model = twins(lambda: Tail(phase))
    backend = fxckpt.compile_blocks(model.blocks, "1GiB", inner="aot_eager")
    wide = max(step(model) for _ in range(3))
    report = backend.report().step
    assert report is not None and report.peak_at == "code outside of the graphs"
    clear(model)
    with allocation_limit(wide - 1):
        assert runs_out_of_memory(model)
    step(plain)
    clear(model)
    with allocation_limit(wide - 1):
        assert step(model) < wide
    assert_same(plain, model)
