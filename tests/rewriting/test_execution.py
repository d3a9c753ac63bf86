"""Calls of rewritten modules: signatures, arguments and results, changes of the source."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

import fxckpt
from fxckpt import policies
from tests.rewriting.sources import either, stack


@either
def test_forward_without_gradients_is_unplanned(of: Callable[[nn.Module], nn.Module]) -> None:
    """Without gradients the original forward runs and no plan is made."""
    made = fxckpt.rewrite(of(stack()), policies.recompute_all)
    with torch.no_grad():
        made(torch.randn(4, 8))
    made.requires_grad_(False)
    made(torch.randn(4, 8))
    assert made.plans == ()
    assert made.state_dict()["0.1.num_batches_tracked"] == 2


@either
def test_signature_is_planned_once(of: Callable[[nn.Module], nn.Module]) -> None:
    """Each signature of calls is planned at its first call only."""
    made = fxckpt.rewrite(of(stack()), policies.save_matmuls, example_inputs=(torch.randn(4, 8),))
    assert len(made.plans) == 1
    for size in (4, 5, 4, 6, 5):
        made(torch.randn(size, 8)).sum().backward()
    assert [row.shape[0] for plan in made.plans for row in plan.rows if row.name == "addmm"] == [
        4,
        5,
        6,
    ]
    assert made.eval()(torch.randn(4, 8)).requires_grad
    assert len(made.plans) == 4


@dataclasses.dataclass
class Result:
    loss: Tensor
    parts: dict[str, Any]


class Odd(nn.Module):
    """A module with every kind of parameter and a nested result."""

    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(8, 8)

    def forward(
        self, x: Tensor, *more: Tensor, scale: float = 2.0, flag: bool = False, **named: Tensor
    ) -> Result:
        y = self.lin(x).sin() * scale
        for t in (*more, *named.values()):
            y = y + t
        return Result((y.cos() if flag else y).sum(), {"y": y, "list": [y.detach(), None, 3]})


def test_arguments_and_results_of_any_form() -> None:
    """Variadic and keyword arguments and nested results equal those of the source."""
    x, a, b = torch.randn(4, 8), torch.randn(4, 8), torch.randn(4, 8)
    model = Odd()
    made = fxckpt.rewrite(model, policies.recompute_all)
    for args, kwargs in (
        ((x,), {}),
        ((x, a), {"scale": 3.0}),
        ((x,), {"flag": True, "b": b}),
        ((x, a, b), {"named": a}),
    ):
        expected, got = model(*args, **kwargs), made(*args, **kwargs)
        assert isinstance(got, Result)
        assert torch.equal(got.loss, expected.loss)
        assert torch.equal(got.parts["y"], expected.parts["y"])
        assert got.parts["list"][1:] == [None, 3]
        grads = [torch.autograd.grad(r.loss, model.parameters()) for r in (expected, got)]
        assert all(torch.equal(*pair) for pair in zip(*grads, strict=True))


def test_graph_returns_dataclass() -> None:
    """A graph that returns a dataclass returns it rewritten too, with one plan per constant."""

    def f(x: Tensor, scale: float = 2.0) -> Result:
        y = x.sin() * scale
        return Result(y.sum(), {"y": y})

    made = fxckpt.rewrite(fx.symbolic_trace(f), policies.recompute_all)
    x = torch.randn(3, requires_grad=True)
    for scale in (2.0, 3.0):
        result = made(x, scale)
        assert isinstance(result, Result)
        result.loss.backward()
        assert torch.equal(x.grad, scale * x.cos())
        x.grad = None
    assert len(made.plans) == 2


def test_aliased_inputs_are_distinguished() -> None:
    """Two inputs that are one tensor are a signature of their own."""

    def f(x: Tensor, y: Tensor) -> Tensor:
        z = (x * 2).sin()
        y.mul_(3)
        return (z + y + x).sum()

    made = fxckpt.rewrite(fx.symbolic_trace(f), policies.recompute_all)
    for alias in (False, True, False):
        for run in (f, made):
            x = torch.ones(3, requires_grad=True)
            base = x * 1
            loss = run(base, base if alias else x.detach().clone())
            loss.backward()
            if run is f:
                expected = (loss, x.grad)
        assert torch.equal(loss, expected[0])
        assert torch.equal(x.grad, expected[1])


def test_shared_module_has_one_path() -> None:
    """A module that occurs twice is selected by its first path."""
    lin = nn.Linear(4, 4)
    model, x = nn.Sequential(lin, nn.Tanh(), lin, nn.Tanh()), torch.randn(2, 4)
    for made in (
        fxckpt.rewrite(model, policies.save("1"), example_inputs=(x,)),
        fxckpt.rewrite(model, policies.save("1")),
    ):
        made(x).sum().backward()
        assert "tanh" in made.plan.saved


def exchange(m: nn.Module) -> None:
    setattr(m, "1", nn.ReLU())


def edit(m: nn.Module) -> None:
    if isinstance(m, fx.GraphModule):
        m.graph.find_nodes(op="call_module", target="1")[0].replace_all_uses_with(
            m.graph.find_nodes(op="call_module", target="0")[0]
        )
        m.recompile()


@pytest.mark.parametrize(
    "change",
    [
        exchange,
        edit,
        lambda m: setattr(m.get_submodule("1"), "p", 0.0),
        lambda m: m.get_submodule("1").eval(),
        lambda m: m.get_submodule("0").register_forward_hook(lambda module, args, out: 3 * out),
        lambda m: m.get_submodule("0").register_forward_pre_hook(
            lambda module, args: (2 * args[0],)
        ),
    ],
    ids=["another submodule", "another graph", "an attribute", "a mode", "a hook", "a pre-hook"],
)
@either
def test_source_changes_are_seen(
    of: Callable[[nn.Module], nn.Module], change: Callable[[nn.Module], object]
) -> None:
    """A change of the source after its first call shows in the next call."""
    source, x = (
        of(nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5), nn.Linear(8, 8))),
        torch.randn(4, 8),
    )
    made = fxckpt.rewrite(source, policies.recompute_all)
    for _ in range(2):
        torch.manual_seed(0)
        expected = source(x)
        torch.manual_seed(0)
        assert torch.equal(made(x), expected)
        change(source)


def test_unread_attributes_do_not_retrace() -> None:
    """Attributes that the graph does not read cause no new trace."""
    source, x = fx.symbolic_trace(nn.Sequential(nn.Linear(8, 8), nn.Tanh())), torch.randn(4, 8)
    source.get_submodule("0").register_forward_hook(
        lambda module, args, out: setattr(module, "seen", out)
    )
    made = fxckpt.rewrite(source)
    made(x)
    seen = source.get_submodule("0").seen
    made.steps = 1
    made(x)
    assert source.get_submodule("0").seen is seen


@either
def test_concurrent_first_calls(of: Callable[[nn.Module], nn.Module]) -> None:
    """Concurrent first calls from several threads agree and make one plan."""
    source, x = of(nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))), torch.randn(4, 8)
    made = fxckpt.rewrite(source, policies.recompute_all)
    with ThreadPoolExecutor(4) as pool:
        results = list(pool.map(made, [x] * 8))
    assert all(torch.equal(result, source(x)) for result in results)
    assert len(made.plans) == 1
