"""Planned steps: right values, and peaks that count what is live."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import fxckpt
from tests.models.blocks import Net, gradients


def test_in_place_ops_and_plain_arguments() -> None:
    def f(x: Tensor, scale: float, flags: dict[str, bool]) -> Tensor:
        y = x.sin()
        y.mul_(scale)
        if flags["twice"]:
            y[0] += 1.0
        return (y.exp().sin().exp().sin().exp().sin() * x).sum()

    x = torch.randn(100, requires_grad=True)
    (expected,) = torch.autograd.grad(f(x, 2.0, {"twice": True}), x)
    compiled = torch.compile(f, backend=fxckpt.Backend(budget="min", inner="aot_eager"))
    (got,) = torch.autograd.grad(compiled(x, 2.0, {"twice": True}), x)
    assert torch.equal(expected, got)


def test_policy_binds() -> None:
    from torch.utils.checkpoint import CheckpointPolicy

    def save_no_matmul(
        ctx: object, op: object, *args: object, **kwargs: object
    ) -> CheckpointPolicy:
        matmul = op is torch.ops.aten.addmm.default
        return CheckpointPolicy.MUST_RECOMPUTE if matmul else CheckpointPolicy.PREFER_SAVE

    model, x = Net(), torch.randn(512, 32)
    backend = fxckpt.Backend(policy=save_no_matmul, inner="aot_eager")
    expected = gradients(model, model, x)
    got = gradients(model, torch.compile(model, backend=backend), x)
    assert all(torch.equal(a, b) for a, b in zip(expected, got, strict=True))
    assert not any(name.startswith("addmm") for name in backend.plans[0].saved)
    assert any(name.startswith("addmm") for name in backend.plans[0].recomputed)


class Regions(nn.Module):
    """Blocks, each in a ``torch.utils.checkpoint`` by the user."""

    def __init__(self, net: Net) -> None:
        super().__init__()
        self.net = net

    def forward(self, x: Tensor) -> Tensor:
        for block in self.net.blocks:
            x = x + checkpoint(block, x, use_reentrant=False)
        return x


def test_checkpoint_regions_bind_without_budget() -> None:
    """The user's regions bind without a budget, and are no better than a plan with one."""
    plain, x = Net(), torch.randn(512, 32)
    marked = Regions(plain)
    expected = gradients(plain, plain, x)

    def planned(model: nn.Module, budget: int | None) -> fxckpt.Plan:
        torch._dynamo.reset()
        backend = fxckpt.Backend(budget=budget, inner="aot_eager")
        got = gradients(plain, torch.compile(model, backend=backend), x)
        assert all(torch.equal(a, b) for a, b in zip(expected, got, strict=True)), budget
        return backend.plans[0]

    unmarked, regions = planned(plain, None), planned(marked, None)
    assert regions.peak_bytes < 0.75 * unmarked.peak_bytes
    tight = planned(marked, regions.peak_bytes)
    assert tight.peak_bytes <= regions.peak_bytes
    assert tight.recompute_seconds <= regions.recompute_seconds


def test_branches_of_cond_count_in_the_peak() -> None:
    weight = torch.randn(32, 32, requires_grad=True)

    def f(x: Tensor) -> Tensor:
        h = torch.cond(x.sum() > 0, lambda t: (t.sin() * t).exp(), lambda t: t.cos(), (x @ weight,))
        return (h @ weight).tanh().sum()

    x = torch.ones(64, 32)
    backend = fxckpt.Backend(budget=1.0, inner="aot_eager")
    compiled = torch.compile(f, backend=backend)
    compiled(x).backward()
    weight.grad = None
    measured = fxckpt.measure_peak(lambda: compiled(x).backward())
    assert measured <= backend.plans[0].peak_bytes <= 1.01 * measured


@pytest.mark.parametrize("budget", [None, 0.9, 0.8])
def test_dynamic_rows_and_gradient_accumulation(budget: float | None) -> None:
    """Any number of rows, two forwards before a backward, and accumulated gradients."""

    def run(backend: object) -> list[Tensor]:
        torch._dynamo.reset()
        torch.manual_seed(5)
        model = Net()
        compiled = torch.compile(model, backend=backend, dynamic=True) if backend else model
        for rows in (64, 33):
            first, second = (compiled(torch.randn(rows, 32)).square().mean() for _ in range(2))
            second.backward(retain_graph=True)
            second.backward()
            first.backward()
        return [torch.get_rng_state(), *(p.grad for p in model.parameters() if p.grad is not None)]

    backend = fxckpt.Backend(budget=budget, inner="aot_eager", scope="graph")
    expected, got = run(None), run(backend)
    assert all(torch.equal(a, b) for a, b in zip(expected, got, strict=True))
    assert len(backend.plans) == 1


class ReadThenWrite(torch.autograd.Function):
    """A function whose backward reads a buffer for the gradient, then writes it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, buffer: Tensor) -> Tensor:
        ctx.buffer = buffer
        return x.sum()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        out = ctx.buffer.sin()
        ctx.buffer.add_(1.0)
        return out, None


@pytest.mark.parametrize("budget", [None, 1.0])
def test_backward_reads_buffer_before_writing_it(budget: float | None) -> None:
    """A buffer that the backward writes is read before the write."""
    x, buffer = torch.ones(64, 8, requires_grad=True), torch.ones(64, 8)
    backend = fxckpt.Backend(budget=budget, inner="aot_eager")
    torch.compile(lambda x, b: ReadThenWrite.apply(x, b), backend=backend)(x, buffer).backward()
    assert torch.equal(x.grad, torch.ones(64, 8).sin())
    assert torch.equal(buffer, torch.full((64, 8), 2.0))


def test_attention_of_tensor_with_itself() -> None:
    """An attention reads one tensor as query, key and value."""
    weight = torch.randn(32, 32, requires_grad=True)

    def f(x: Tensor) -> Tensor:
        h = (x @ weight).view(2, 16, 4, 8).transpose(1, 2)
        return nn.functional.scaled_dot_product_attention(h, h, h).square().sum()

    x = torch.randn(2, 16, 32)
    (expected,) = torch.autograd.grad(f(x), weight)
    (got,) = torch.autograd.grad(
        torch.compile(f, backend=fxckpt.Backend(inner="aot_eager"))(x), weight
    )
    assert torch.equal(expected, got)


def test_cloned_gradients_count_in_peak() -> None:
    """Gradients that autograd clones count in the peak."""
    a, b, c = (torch.randn(64, 32, requires_grad=True) for _ in range(3))

    def f(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
        return ((a + b).sin() + c.sum()).sum()

    backend = fxckpt.Backend(budget=1.0, inner="aot_eager")
    compiled = torch.compile(f, backend=backend)

    def step() -> None:
        compiled(a, b, c).backward()

    step()
    a.grad = b.grad = c.grad = None
    assert fxckpt.measure_peak(step) <= backend.plans[0].peak_bytes


def test_output_under_recompute_policy_is_live() -> None:
    """An output that a policy wants recomputed is live anyway."""
    from torch.utils.checkpoint import CheckpointPolicy

    def f(x: Tensor) -> tuple[Tensor, Tensor]:
        y = x.exp()
        return y, y.sin().sum()

    backend = fxckpt.Backend(
        policy=lambda ctx, op, *args, **kwargs: CheckpointPolicy.MUST_RECOMPUTE, inner="aot_eager"
    )
    x = torch.ones(16, requires_grad=True)
    torch.compile(f, backend=backend)(x)[1].backward()
    assert torch.equal(x.grad, x.detach().exp().cos() * x.detach().exp())


def test_growing_batches_within_bytes_share_a_plan() -> None:
    """Sizes may grow until the plan would be over the budget, and are planned anew from there."""

    def run(budget: str) -> tuple[list[int], fxckpt.Backend]:
        torch._dynamo.reset()
        model = Net()
        backend = fxckpt.Backend(budget=budget, inner="aot_eager", scope="graph")
        compiled, peaks = torch.compile(model, backend=backend, dynamic=True), []
        for rows in (16, 24, 32, 64, 128, 200, 256):
            x = torch.randn(rows, 32)
            compiled(x).square().mean().backward()
            model.zero_grad(set_to_none=True)
            peaks.append(fxckpt.measure_peak(lambda x=x: compiled(x).square().mean().backward()))
            model.zero_grad(set_to_none=True)
        return peaks, backend

    peaks, backend = run("1GiB")
    assert len(backend.plans) == 1
    limit = int(0.8 * max(peaks))
    peaks, backend = run(f"{limit}B")
    assert max(peaks) <= limit and 1 < len(backend.plans) < 5
