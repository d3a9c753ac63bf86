"""Mutation: no read moves behind a write, and no write happens twice."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import fxckpt
from tests.steps import FLOOR, UNCHECKPOINTED, differing, fresh, outcome, same_at_every_budget

WIDTH = 16


class Buffered(nn.Module):
    """Layers around a function that reads and writes the module's buffer."""

    def __init__(self, touch: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.register_buffer("buffer", torch.rand(64, WIDTH))
        self.touch = touch

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = self.touch(layer(x).tanh().sin(), self.buffer)
        return x


@torch.library.custom_op("fxckpt_tests::bump", mutates_args=("buffer",))
def bump(buffer: Tensor) -> None:
    buffer.add_(1.0)


def read_then_write(x: Tensor, buffer: Tensor) -> Tensor:
    y = x * buffer.sin()
    buffer.add_(1.0)
    return y


def write_then_read(x: Tensor, buffer: Tensor) -> Tensor:
    buffer.mul_(2.0)
    return x * buffer.sin()


def read_through_a_view(x: Tensor, buffer: Tensor) -> Tensor:
    half = buffer[:32]
    y = x * torch.cat([half.sin(), half.cos()])
    buffer.mul_(2.0)
    return y


def write_through_a_view(x: Tensor, buffer: Tensor) -> Tensor:
    y = x * buffer.T.contiguous().T
    buffer[0].zero_()
    return y


def read_write_read_write(x: Tensor, buffer: Tensor) -> Tensor:
    y = x * buffer.sin()
    buffer[:4].add_(1.0)
    y = y * buffer.sin()
    buffer.mul_(0.5)
    return y * buffer.cos()


def write_by_a_custom_op(x: Tensor, buffer: Tensor) -> Tensor:
    y = x * buffer.sin()
    bump(buffer)
    return y


TOUCHES = (
    read_then_write,
    write_then_read,
    read_through_a_view,
    write_through_a_view,
    read_write_read_write,
    write_by_a_custom_op,
)


@pytest.mark.parametrize("touch", TOUCHES, ids=lambda f: f.__name__)
def test_a_buffer_written_in_the_graph(touch: Callable[[Tensor, Tensor], Tensor]) -> None:
    same_at_every_budget(lambda: (Buffered(touch), (torch.randn(64, WIDTH),)))


def product_then_write(x: Tensor, buffer: Tensor) -> Tensor:
    y = x * buffer
    buffer.add_(1.0)
    return y


@pytest.mark.parametrize("budget", [None, 0.8])
def test_what_eager_refuses_gives_no_numbers_compiled(budget: float | None) -> None:
    for compile_it in (False, True):
        model, (x,) = fresh(lambda: (Buffered(product_then_write), (torch.randn(64, WIDTH),)))
        backend = fxckpt.Backend(budget=budget, inner="aot_eager")
        with pytest.raises(Exception, match="modified by an inplace operation"):
            (torch.compile(model, backend=backend) if compile_it else model)(x).sum().backward()


def input_written(x: Tensor, weight: Tensor) -> Tensor:
    y = (x.cos() * weight).sin()
    x.mul_(2.0)
    return (y @ weight.T).tanh() * x.sin()


def test_an_input_written_in_the_graph() -> None:
    same_at_every_budget(
        lambda: (input_written, (torch.rand(64, 64), torch.rand(64, 64, requires_grad=True)))
    )


def cached(x: Tensor, weight: Tensor, cache: Tensor) -> Tensor:
    h = (x @ weight).tanh()
    kept = cache.sigmoid()
    cache[:8] = h[:8]
    return (h * kept).exp() * cache.sum()


def overwritten(x: Tensor, weight: Tensor, cache: Tensor) -> Tensor:
    kept = cache.exp()
    h = (x @ weight).tanh() * kept.sigmoid()
    cache.copy_(h)
    return h.exp() * kept


@pytest.mark.parametrize("function", [cached, overwritten], ids=lambda f: f.__name__)
def test_an_input_written_with_what_needs_a_gradient(function: Callable[..., Tensor]) -> None:
    """AOTAutograd writes it after the forward graph, so that no op of the graph shows it."""

    def make() -> tuple[Callable[..., Tensor], tuple[Tensor, ...]]:
        weight = torch.randn(WIDTH, WIDTH, requires_grad=True)
        return function, (torch.randn(64, WIDTH), weight, torch.rand(64, WIDTH))

    same_at_every_budget(make, (None, 0.8, FLOOR), reference=UNCHECKPOINTED)


class Normed(nn.Module):
    """Convolutions with batch norm, whose statistics a step moves once."""

    def __init__(self) -> None:
        super().__init__()

        def block() -> nn.Module:
            layers = nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(inplace=True)
            return nn.Sequential(*layers)

        self.blocks = nn.Sequential(*(block() for _ in range(3)))

    def forward(self, x: Tensor) -> Tensor:
        return self.blocks(x)


def test_batch_norm_counts_a_step_once() -> None:
    plans = same_at_every_budget(lambda: (Normed(), (torch.randn(8, 4, 8, 8),)), (None, 0.9, FLOOR))
    assert any("batch_norm" in row.op for row in plans[-1].rows)
    model, (x,) = fresh(lambda: (Normed(), (torch.randn(8, 4, 8, 8),)))
    compiled = torch.compile(
        model, backend=fxckpt.Backend(budget=plans[-1].floor_bytes, inner="aot_eager")
    )
    for _ in range(3):
        compiled(x).sum().backward()
    assert int(model.blocks[0][1].num_batches_tracked) == 3


class Scaled(nn.Module):
    """Reads its input, a parameter and a buffer in the backward."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.register_buffer("scale", torch.rand(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x.sin() * self.scale).tanh()
        return x


@pytest.mark.parametrize("budget", [None, 0.7])
@pytest.mark.parametrize("what", ["input", "parameter", "buffer"])
def test_writes_before_the_backward_raise_or_change_nothing(
    what: str, budget: float | None
) -> None:
    """An input that a backward reads is checked; one that it does not read may be written."""
    make = lambda: (Scaled(), (torch.randn(64, WIDTH),))  # noqa: E731
    model, inputs = fresh(make)
    expected = outcome(model, model, inputs)
    model, (x,) = fresh(make)
    y = torch.compile(model, backend=fxckpt.Backend(budget=budget, inner="aot_eager"))(x)
    with torch.no_grad():
        {"input": x, "parameter": model.layers[1].weight, "buffer": model.scale}[what].add_(1.0)
    try:
        y.square().mean().backward()
    except RuntimeError as error:
        assert "modified by an inplace operation" in str(error)
        return
    assert what == "input" and budget is None
    gradients = {f"gradient of {n}": p.grad for n, p in model.named_parameters()}
    assert (
        differing(gradients, {n: t for n, t in expected.items() if n.startswith("gradient")}) == []
    )
