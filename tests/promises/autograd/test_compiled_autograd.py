"""Compiled autograd around planned graphs: hooks, and graph breaks in the backward."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo import compiled_autograd

import fxckpt


def halve_accumulated(net: nn.Module) -> None:
    """Change each gradient in place once it is accumulated."""

    def hook(p: Tensor) -> None:
        assert p.grad is not None
        p.grad.mul_(0.5)

    for p in net.parameters():
        p.register_post_accumulate_grad_hook(hook)


def double_gradients(net: nn.Module) -> None:
    """Hook every parameter."""
    for p in net.parameters():
        p.register_hook(lambda g: g * 2)


def scale_before_accumulating(net: nn.Module) -> None:
    """Hook the AccumulateGrad node of every parameter, which lives as long as it is held."""
    net.nodes = []
    for p in net.parameters():
        node = p.view_as(p).grad_fn.next_functions[0][0]
        assert node is not None
        node.register_prehook(lambda g: (g[0] * 0.5,))
        net.nodes.append(node)


def break_backward(net: nn.Module) -> None:
    """Break the graph of the backward at every parameter."""

    def hook(g: Tensor) -> Tensor:
        torch._dynamo.graph_break()
        return g * 3

    for p in net.parameters():
        p.register_hook(hook)


class Double(nn.Module):
    """An op chain of which a result may be written into its operand."""

    def forward(self, x: Tensor) -> Tensor:
        """Return the chain's result."""
        return x.sin().exp() + x


class Wide(nn.Module):
    """A block with a wide middle, whose ops Inductor would recompute early."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(32), nn.Linear(32, 128), nn.Linear(128, 32)

    def forward(self, x: Tensor) -> Tensor:
        """Return the block's result."""
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    """Compile anew."""
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.parametrize(
    ("inner", "hooks"),
    [
        ("aot_eager", halve_accumulated),
        ("aot_eager", double_gradients),
        ("aot_eager", scale_before_accumulating),
        ("inductor", halve_accumulated),
        ("inductor", break_backward),
    ],
)
def test_hooks_of_parameters_run(inner: str, hooks: Callable[[nn.Module], None]) -> None:
    """The graph of compiled autograd passes through; the forward's is planned as without it."""
    torch.manual_seed(0)
    net = nn.Sequential(*(nn.Sequential(nn.Linear(32, 32), nn.GELU()) for _ in range(3)))
    x, twin = torch.randn(128, 32), copy.deepcopy(net)
    plain = fxckpt.Backend(inner=inner, budget=0.8, scope="graph")
    torch.compile(copy.deepcopy(net), backend=plain)(x).square().mean().backward()
    for each in (net, twin):
        hooks(each)
    twin(x).square().mean().backward()
    torch._dynamo.reset()
    backend = fxckpt.Backend(inner=inner, budget=0.8, scope="graph")
    compiled = torch.compile(net, backend=backend)
    passed: list[Any] = []

    def compile_backward(gm: torch.fx.GraphModule) -> Any:
        passed.append(gm)
        return torch.compile(gm, backend=backend)

    loss = compiled(x).square().mean()
    with compiled_autograd._enable(compile_backward):
        loss.backward()
    assert len(passed) == 1
    torch.testing.assert_close(
        [p.grad for p in net.parameters()], [p.grad for p in twin.parameters()]
    )
    assert [plan.digest for plan in backend.plans] == [plan.digest for plan in plain.plans]


def peak_of_second_step(
    net: nn.Module, loss: Callable[[], torch.Tensor], backend: fxckpt.Backend
) -> int:
    """Return the measured peak of a step whose backward compiled autograd compiles."""

    def step() -> None:
        net.zero_grad()
        with compiled_autograd._enable(lambda gm: torch.compile(gm, backend=backend)):
            loss().backward()

    step()
    net.zero_grad()
    return fxckpt.measure_peak(step)


@pytest.mark.parametrize("hooks", [lambda net: None, double_gradients, halve_accumulated])
def test_peak_is_that_of_the_plan(hooks: Callable[[nn.Module], None]) -> None:
    """Results that the backward writes in place are written so in the graph that it becomes."""
    torch.manual_seed(0)
    net = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.Tanh(), Double()) for _ in range(6)))
    hooks(net)
    x = torch.randn(1024, 64)
    backend = fxckpt.Backend(inner="aot_eager", budget=0.6, scope="graph")
    compiled = torch.compile(lambda x: net(x).square().sum(), backend=backend)
    peak = peak_of_second_step(net, lambda: compiled(x), backend)
    (plan,) = backend.plans
    assert peak == plan.peak_bytes


def test_copies_of_gradients_come_last() -> None:
    """Gradients in another layout than their parameters' are copied as late as autograd does."""
    torch.manual_seed(0)
    net = nn.Sequential(*(Wide() for _ in range(2)))
    x = torch.randn(32, 32)
    backend = fxckpt.Backend(inner="aot_eager", budget="min", scope="graph")
    compiled = torch.compile(lambda x: net(x).square().sum(), backend=backend)
    peak = peak_of_second_step(net, lambda: compiled(x), backend)
    (plan,) = backend.plans
    assert peak == plan.peak_bytes


def test_inductor_keeps_order_and_frees_early() -> None:
    """At the least budget the graph of compiled autograd has the plan's peak under Inductor."""
    torch.manual_seed(0)
    net = nn.Sequential(*(Wide() for _ in range(2)))
    x = torch.randn(512, 32)
    backend = fxckpt.Backend(budget="min", scope="graph")
    compiled = torch.compile(lambda x: net(x).square().sum(), backend=backend)
    peak = peak_of_second_step(net, lambda: compiled(x), backend)
    (plan,) = backend.plans
    assert plan.recomputed
    assert peak == plan.compiled_peak_bytes


@pytest.mark.parametrize("scope", ["step", "graph"])
def test_inductor_overwrites_saved_values_unless_kept(scope: str) -> None:
    """The whole backward writes to saved values as the plan's does, and to copies of kept ones."""
    torch.manual_seed(0)
    net = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(4)))
    x = torch.randn(1024, 64)
    net(x).square().sum().backward()
    expected = [p.grad.clone() for p in net.parameters() if p.grad is not None]
    backend = fxckpt.Backend(budget=0.9, scope=scope, cost="flops")
    compiled = torch.compile(lambda x: net(x).square().sum(), backend=backend)
    peak = peak_of_second_step(net, lambda: compiled(x), backend)
    (plan,) = backend.plans
    assert peak == plan.compiled_peak_bytes

    net.zero_grad()
    with compiled_autograd._enable(lambda gm: torch.compile(gm, backend=backend)):
        loss = compiled(x)
        for is_last in (False, False, True):
            loss.backward(retain_graph=not is_last)
    torch.testing.assert_close(
        [p.grad for p in net.parameters()], [3 * g for g in expected], rtol=1e-5, atol=1e-3
    )


def test_values_that_hooks_packed_are_not_overwritten() -> None:
    """A hook may keep the saved values that a backward without hooks overwrites."""
    torch.manual_seed(0)
    net = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(4)))
    x = torch.randn(1024, 64)
    backend = fxckpt.Backend(budget=0.9, scope="graph")
    compiled = torch.compile(lambda x: net(x).square().sum(), backend=backend)
    kept: list[tuple[Tensor, Tensor]] = []

    def keep(value: Tensor) -> Tensor:
        kept.append((value, value.clone()))
        return value

    with compiled_autograd._enable(lambda gm: torch.compile(gm, backend=backend)):
        compiled(x).backward()
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda value: value):
            loss = compiled(x)
        loss.backward()
    assert kept
    assert all(torch.equal(value, before) for value, before in kept)
