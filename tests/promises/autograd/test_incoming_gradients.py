"""Incoming gradients of the backward, which autograd frees after their last read."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor, nn

import fxckpt

MODEL = nn.Sequential(
    nn.Linear(1024, 1024), nn.Tanh(), nn.Linear(1024, 32), nn.Tanh(), nn.Linear(32, 256)
)
"""The gradient of the output is read long before the peak."""

INPUTS = torch.randn(512, 1024)

OUTPUT_BYTES = 512 * 256 * 4


def loss_outside(forward: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """The gradient of the output is made outside, by the backward of the product."""
    output = forward(x)
    (2 * output).sum().backward()
    return output


def measured(step: Callable[[], object]) -> int:
    MODEL.zero_grad(set_to_none=True)
    step()
    MODEL.zero_grad(set_to_none=True)
    return fxckpt.measure_peak(step)


def as_compiled(backend: fxckpt.Backend) -> int:
    (plan,) = backend.plans
    return plan.peak_bytes if plan.compiled_peak_bytes is None else plan.compiled_peak_bytes


@pytest.mark.parametrize("inner", ["aot_eager", "inductor"])
def test_incoming_gradient_counts_until_last_read(inner: str) -> None:
    """An incoming gradient counts until its last read."""
    torch._dynamo.reset()
    backend = fxckpt.Backend(inner=inner)
    compiled = torch.compile(MODEL, backend=backend)
    outside = measured(lambda: loss_outside(compiled, INPUTS)) - as_compiled(backend)
    assert 0 <= outside <= 16  # the sum and its gradient


@pytest.mark.parametrize("inner", ["aot_eager", "inductor"])
def test_zero_gradients_count_until_last_read(inner: str) -> None:
    """The zeros for an output without a gradient count until their last read."""

    def loss_and_output(x: Tensor) -> tuple[Tensor, Tensor]:
        output = MODEL(x)
        return output.square().mean(), output

    torch._dynamo.reset()
    backend = fxckpt.Backend(inner=inner)
    compiled = torch.compile(loss_and_output, backend=backend)

    def step() -> Tensor:
        loss, output = compiled(INPUTS)
        loss.backward()
        return output

    assert measured(step) == as_compiled(backend)


@pytest.mark.parametrize("inner", ["aot_eager", "inductor"])
def test_gradient_of_columns_counts_their_gaps(inner: str) -> None:
    """The gradient of some columns of a value is copied to their strides, given or missing."""
    layers = nn.ModuleList([nn.Linear(32, 256), nn.Linear(256, 32)])
    first, last = layers
    x, given = torch.randn(128, 32), [torch.ones(()), torch.ones(128, 16)]

    def loss_and_columns(x: Tensor) -> tuple[Tensor, Tensor]:
        hidden = nn.functional.gelu(first(x))
        columns = hidden[:, :16]  # Their gradient is read after that of the rest.
        return last(hidden).sin().sum(), columns

    torch._dynamo.reset()
    backend = fxckpt.Backend(inner=inner, cost="flops")
    compiled = torch.compile(loss_and_columns, backend=backend)

    def step(count: int) -> object:
        outputs = compiled(x)
        torch.autograd.backward(outputs[:count], given[:count])
        return outputs

    for count in (2, 1):
        step(count)
        layers.zero_grad(set_to_none=True)
        found = fxckpt.measure_peak(partial(step, count))
        layers.zero_grad(set_to_none=True)
        assert 0 <= as_compiled(backend) - found <= 4


def test_held_gradient_counts_to_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """A gradient that autograd holds counts to the end of the backward."""

    def peak(is_freed: bool) -> int:
        answer = "fxckpt.passes.analysis.placement.frees_incoming_gradients"
        monkeypatch.setattr(answer, lambda: is_freed)
        torch._dynamo.reset()
        backend = fxckpt.Backend(inner="aot_eager")
        loss_outside(torch.compile(MODEL, backend=backend), INPUTS)
        return backend.plans[0].peak_bytes

    assert peak(is_freed=False) == peak(is_freed=True) + OUTPUT_BYTES
