"""Surroundings of ``fxckpt.checkpoint``: closures, hooks, autocast, transforms, threads."""

from __future__ import annotations

import functools
import sys
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fxckpt
from tests.eager.regions import Region, plain, products, step
from tests.steps import differing


def test_parameters_in_a_closure_get_gradients() -> None:
    """A region's closure parameters get gradients even if none of its inputs requires one."""
    layer = nn.Linear(4, 4)
    fxckpt.checkpoint(lambda x: layer(x).sin(), torch.randn(2, 4)).sum().backward()
    assert layer.weight.grad is not None


def test_structures_go_in_and_out() -> None:
    from dataclasses import dataclass
    from typing import NamedTuple

    @dataclass
    class Given:
        x: Tensor
        scale: float

    class Made(NamedTuple):
        y: Tensor
        label: str

    x = torch.randn(4, requires_grad=True)

    def region(given: Given, *, more: dict[str, list[Tensor]]) -> dict[str, Made]:
        return {"made": Made((given.x * more["ws"][0]).sin() * given.scale, "sine")}

    made = fxckpt.checkpoint(region, Given(x, 2.0), more={"ws": [torch.ones(4)]})["made"]
    made.y.sum().backward()
    assert made.label == "sine" and x.grad is not None and torch.equal(x.grad, 2 * x.detach().cos())


def test_hooks_around_a_region_get_what_it_holds() -> None:
    packed: list[tuple[int, ...]] = []

    def pack(tensor: Tensor) -> Tensor:
        packed.append(tuple(tensor.shape))
        return tensor

    def around(region: Region, x: Tensor, w: Tensor) -> Any:
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
            return fxckpt.checkpoint(region, x, w)

    assert differing(step(products, plain), step(products, around)) == []
    assert packed == [(6, 6), (6, 6)], "the two inputs, once each"


@pytest.mark.parametrize("inside", [False, True])
def test_save_on_cpu_inside_and_outside(inside: bool) -> None:
    def offloaded(region: Region, x: Tensor, w: Tensor) -> Any:
        with torch.autograd.graph.save_on_cpu():
            return region(x, w)

    def around(region: Region, x: Tensor, w: Tensor) -> Any:
        if inside:
            return fxckpt.checkpoint(offloaded, region, x, w)
        return offloaded(functools.partial(fxckpt.checkpoint, region), x, w)

    assert differing(step(products, plain), step(products, around)) == []


def test_autocast_around_forward_or_backward_changes_nothing() -> None:
    x, w = torch.randn(4, 4, requires_grad=True), torch.randn(4, 4)
    grads = []
    for checkpoint in (plain, fxckpt.checkpoint):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            out = checkpoint(lambda x: ((x @ w).sin() @ w).exp(), x).sum()
        grads += torch.autograd.grad(out, x, retain_graph=True)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            grads += torch.autograd.grad(checkpoint(products, x, w).float().sum(), x)
    assert torch.equal(grads[0], grads[2]) and torch.equal(grads[1], grads[3])


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_without_gradients_there_is_no_tape(
    mode: Callable[[], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.modules["fxckpt.eager.api"], "Recorder", None)
    with mode():
        assert fxckpt.checkpoint(torch.sin, torch.zeros(2)).sum() == 0


def test_under_a_transform_a_region_warns() -> None:
    """Under a torch.func transform a region is a plain call, and a warning says so."""
    x = torch.randn(4)
    with pytest.warns(UserWarning, match="torch.func"):
        grad = torch.func.grad(lambda x: fxckpt.checkpoint(torch.sin, x).sum())(x)
    assert torch.equal(grad, x.cos())


def test_a_region_inside_an_autograd_function() -> None:
    class Outer(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            ctx.save_for_backward(x)
            return fxckpt.checkpoint(torch.sin, x)  # type: ignore[no-any-return]

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            with torch.enable_grad():
                x = ctx.saved_tensors[0].detach().requires_grad_()
                out = fxckpt.checkpoint(lambda x: x.sin().exp().log(), x)
            return torch.autograd.grad(out, x, grad)[0]

    x = torch.randn(4, requires_grad=True)
    Outer.apply(x).sum().backward()
    assert x.grad is not None and torch.allclose(x.grad, x.detach().cos())


def test_regions_in_threads() -> None:
    expected = step(products, plain)
    found: list[dict[str, Tensor]] = []
    w = torch.randn(6, 6, requires_grad=True)
    torch.manual_seed(0)
    x, w = torch.randn(6, 6, requires_grad=True), torch.randn(6, 6, requires_grad=True)

    def work() -> None:
        out = fxckpt.checkpoint(products, x, w)
        grads = torch.autograd.grad(out.square().sum(), (x, w))
        found.append({"output": out.detach()} | {f"gradient {i}": g for i, g in enumerate(grads)})

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    del expected["generator"]
    assert len(found) == 8 and all(differing(expected, seen) == [] for seen in found)
