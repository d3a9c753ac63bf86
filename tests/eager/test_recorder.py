"""Recorder: Python and random draws run once, and what no replay can compute is kept."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import fxckpt
from tests.eager.regions import Checkpoint, Region, dropouts, ops_of_the_backward, plain, step
from tests.steps import differing


def test_a_random_number_of_python_is_drawn_once() -> None:
    import random

    random.seed(0)
    x = torch.randn(4, requires_grad=True)
    fxckpt.checkpoint(lambda x: x * random.random(), x).sum().backward()
    random.seed(0)
    assert x.grad is not None and torch.equal(x.grad, torch.full((4,), random.random()))


def test_python_runs_once_and_statistics_are_updated_once() -> None:
    calls = []
    net = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.ReLU(inplace=True), nn.Linear(4, 4))
    net.register_forward_hook(lambda *_: calls.append(1))
    fxckpt.checkpoint(net, torch.randn(8, 4)).sum().backward()
    assert calls == [1]
    assert net[1].num_batches_tracked == 1


def test_no_state_is_stored_where_nothing_is_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    monkeypatch.setattr("fxckpt.eager.recorder.RngSnapshot", lambda *_: asked.append(1))
    x = torch.randn(1, 1, 4, 4, requires_grad=True)
    fxckpt.checkpoint(
        lambda x: F.scaled_dot_product_attention(x, x, x, dropout_p=0.0).sin(), x
    ).sum().backward()
    assert not asked


def test_without_states_what_was_drawn_is_kept() -> None:
    without = functools.partial(fxckpt.checkpoint, preserve_rng_state=False)
    assert differing(step(dropouts, plain), step(dropouts, without)) == []
    x, w = torch.randn(4, 4, requires_grad=True), torch.randn(4, 4)
    assert not {"bernoulli_", "native_dropout"} & set(ops_of_the_backward(without(dropouts, x, w)))


def filled_behind(tensor: Tensor, values: Tensor) -> Tensor:
    """Write ``values`` into ``tensor`` as a raw kernel would."""
    values = values.detach().contiguous()
    ctypes.memmove(tensor.data_ptr(), values.data_ptr(), values.numel() * values.element_size())
    return tensor


def opaque_empty(x: Tensor, w: Tensor) -> Tensor:
    return (filled_behind(torch.empty(6, 6), (x @ w).sin()) * (x @ w).sin()).exp()


def opaque_zeros(x: Tensor, w: Tensor) -> Tensor:
    filled = filled_behind(torch.zeros(6, 6), (x @ w).sin())
    return (filled[:, :3] * (x @ w).sin()[:, :3]).exp()


def opaque_then_written(x: Tensor, w: Tensor) -> Tensor:
    return (filled_behind(torch.empty(6, 6), (x @ w).sin()).mul_(2).add_(1) * (x @ w).sin()).exp()


@pytest.mark.parametrize("region", [opaque_empty, opaque_zeros, opaque_then_written])
def test_what_a_raw_kernel_filled_is_kept(region: Region) -> None:
    assert differing(step(region, plain), step(region, fxckpt.checkpoint)) == []


@pytest.fixture
def unknown_op() -> Iterator[tuple[Callable[[Tensor], Tensor], list[int]]]:
    ran: list[int] = []
    with torch.library._scoped_library("fxckpt_test", "FRAGMENT"):

        @torch.library.custom_op("fxckpt_test::cube", mutates_args=())
        def cube(x: Tensor) -> Tensor:
            ran.append(1)
            return x * x * x

        cube.register_autograd(
            lambda ctx, grad: 3 * ctx.saved_tensors[0] ** 2 * grad,
            setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs),
        )
        yield cube, ran


def test_an_unknown_op_runs_once(
    unknown_op: tuple[Callable[[Tensor], Tensor], list[int]],
) -> None:
    """A custom op that the tape knows nothing about runs in the forward and is not replayed."""
    cube, ran = unknown_op
    region = lambda x, w: cube((x @ w).sin()).exp()  # noqa: E731
    expected = step(region, plain)
    ran.clear()
    assert differing(expected, step(region, fxckpt.checkpoint)) == []
    assert ran == [1]


def test_a_traced_region_draws_like_a_plain_call() -> None:
    """A region traced by make_fx draws the same random numbers as a plain call."""
    from torch.fx.experimental.proxy_tensor import make_fx

    def gradients(checkpoint: Checkpoint) -> Callable[[Tensor, Tensor], Any]:
        return lambda x, w: torch.autograd.grad(checkpoint(dropouts, x, w).sum(), (x, w))

    given = torch.randn(6, 6, requires_grad=True), torch.randn(6, 6, requires_grad=True)
    torch.manual_seed(1)
    expected = gradients(plain)(*given)
    for mode in ("real", "symbolic"):
        graph = make_fx(gradients(fxckpt.checkpoint), tracing_mode=mode)(*given)
        torch.manual_seed(1)
        assert all(map(torch.equal, expected, graph(*given)))


def test_a_traced_region_takes_no_budget() -> None:
    """A budget, which needs a call that runs, is refused while make_fx traces."""
    from torch.fx.experimental.proxy_tensor import make_fx

    def step(x: Tensor) -> Tensor:
        return fxckpt.checkpoint(lambda t: t.sin().exp(), x, budget="1MiB")

    x = torch.randn(4, 4, requires_grad=True)
    with pytest.raises(fxckpt.CaptureError, match=r"budget=.1MiB.* make_fx traces"):
        make_fx(step)(x)
    step(x).sum().backward()
