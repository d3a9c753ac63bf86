"""Sources of ``rewrite``: every route of capture, functions and methods; refusals."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode

import fxckpt
from fxckpt import policies
from tests.rewriting.sources import GPT, ROUTES, gpt, resnet, stack
from tests.steps import differing, loss_of, outcome


@pytest.mark.parametrize(
    ("make", "options"),
    [(gpt, {"budget": 0.75}), (resnet, {"policy": policies.recompute_all})],
    ids=["gpt", "resnet"],
)
@pytest.mark.parametrize("route", ROUTES)
def test_every_route_gives_same_step_and_peak(
    make: Callable[[], Any], options: Any, route: str
) -> None:
    """By every route the step equals eager's and its measured peak is the plan's."""
    torch.manual_seed(0)
    source, inputs = ROUTES[route](*make())
    start = copy.deepcopy(source.state_dict())
    expected = outcome(source, source, copy.deepcopy(inputs))
    source.load_state_dict(start)
    source.zero_grad(set_to_none=True)
    made = fxckpt.rewrite(source, example_inputs=inputs, **options)
    given = copy.deepcopy(inputs)
    assert differing(expected, outcome(source, made, given)) == []
    (plan,) = made.plans
    assert plan.schedule
    assert plan.budget_bytes is None or plan.peak_bytes <= plan.budget_bytes
    for tensor in (*source.parameters(), *given):
        tensor.grad = None
    measured = fxckpt.measure_peak(lambda: loss_of(made(*given)).backward())
    assert abs(measured - plan.peak_bytes) <= 0.01 * plan.peak_bytes


def test_backward_flops_match_plan() -> None:
    """The backward does exactly the plan's recompute FLOPs beyond eager's."""

    def flops(model: nn.Module, x: Tensor) -> int:
        loss = model(x).sum()
        with FlopCounterMode(display=False) as counter:
            loss.backward()
        return int(counter.get_total_flops())

    model, x = (
        nn.Sequential(*(nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(4))),
        torch.randn(64, 16),
    )
    made = fxckpt.rewrite(fx.symbolic_trace(model), policies.recompute_all)
    made(x).sum().backward()
    assert flops(made, x) - flops(model, x) == made.plan.recompute_flops > 0


def test_function_parameters_are_found() -> None:
    """A function is rewritten, and the parameters that it closes over get gradients."""
    w = torch.randn(8, 8, requires_grad=True)

    def f(x: Tensor) -> Tensor:
        return (x @ w).sin().cos().sum()

    x = torch.randn(4, 8)
    made = fxckpt.rewrite(f, policies.recompute_all)
    made(x).backward()
    (expected,) = torch.autograd.grad(f(x), w)
    assert torch.equal(w.grad, expected)
    assert {"mm", "sin"} <= set(made.plan.recomputed)


def test_method_module_is_child() -> None:
    """The module of a bound method is the child ``owner`` of the rewritten module."""

    class Net(nn.Sequential):
        def features(self, x: Tensor) -> Tensor:
            return F.dropout(self[1](self[0](x)), training=self.training)

    net, x = Net(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 2)), torch.randn(4, 8)
    made = fxckpt.rewrite(net.features, policies.save("1"), example_inputs=(x,))
    made(x).sum().backward()
    assert "tanh" in made.plan.saved
    assert len(made.plans) == 1
    assert dict(made.named_parameters())["owner.0.weight"] is net[0].weight
    assert torch.equal(made.eval()(x), net.features(x))


def test_bound_forward_and_builtin_function() -> None:
    """A bound forward stands for its module, and a function in C is rewritten as a function."""
    model = stack()
    assert list(fxckpt.rewrite(model.forward).state_dict()) == list(model.state_dict())
    x = torch.randn(3, requires_grad=True)
    fxckpt.rewrite(torch.sin)(x).sum().backward()
    assert torch.equal(x.grad, x.cos())


def test_inner_compiler_gets_both_halves() -> None:
    """The inner compiler is called for the forward and for the backward half."""
    halves: list[fx.GraphModule] = []

    def inner(gm: fx.GraphModule, example_inputs: Any) -> Callable[..., Any]:
        halves.append(gm)
        return gm.forward

    made = fxckpt.rewrite(
        fx.symbolic_trace(stack()),
        policies.save_matmuls,
        inner=inner,
        example_inputs=(torch.randn(4, 8),),
    )
    made(torch.randn(4, 8)).sum().backward()
    assert len(halves) == 2


def test_rewriting_is_idempotent() -> None:
    """Rewriting a rewritten module, also by its own plan, changes neither plan nor graph."""
    x = torch.randn(4, 8)
    made = fxckpt.rewrite(fx.symbolic_trace(stack()), policies.save_matmuls, example_inputs=(x,))
    assert fxckpt.rewrite(made) is made
    assert fxckpt.rewrite(made, policies.save_matmuls, example_inputs=(x,)).plan == made.plan
    twice = fxckpt.rewrite(
        fxckpt.rewrite(made, made.plan, example_inputs=(x,)), made.plan, example_inputs=(x,)
    )
    assert twice.plan == made.plan
    assert twice.forward_graph.code == made.forward_graph.code


def test_invalid_sources_and_inputs_are_named() -> None:
    """Sources, example inputs and budgets that do not fit raise errors that name the cause."""
    with pytest.raises(fxckpt.CaptureError, match="nothing to plan"):
        fxckpt.rewrite(lambda x: x.argmax(), example_inputs=(torch.ones(3, requires_grad=True),))
    slotted = type("Slotted", (nn.Linear,), {"__slots__": ("scale",)})
    for wrong, says in (
        (3, "int is nothing to rewrite"),
        (GPT, r"an instance: rewrite\(Model\(\)\)"),
        (nn.ModuleList([nn.Linear(2, 2)]), "a ModuleList has no forward"),
        (nn.LazyLinear(2), "no shapes before its first call"),
        (slotted(2, 2), "keeps attributes in __slots__"),
    ):
        with pytest.raises(fxckpt.InvalidOption, match=says):
            fxckpt.rewrite(wrong)  # type: ignore[arg-type]
    with pytest.raises(fxckpt.CaptureError, match="module '0' is an LSTM"):
        fxckpt.rewrite(
            fx.symbolic_trace(nn.Sequential(nn.LSTM(2, 2))), example_inputs=(torch.randn(3, 2),)
        )
    with pytest.raises(
        fxckpt.InvalidOption, match=r"example_inputs do not fit: too many positional arguments"
    ):
        fxckpt.rewrite(fx.symbolic_trace(stack()), example_inputs=(torch.randn(4, 8), 3))
    with pytest.raises(fxckpt.CaptureError, match="the module does not run on these inputs"):
        fxckpt.rewrite(fx.symbolic_trace(stack()), example_inputs=(torch.randn(4, 7),))
    with pytest.raises(
        fxckpt.CaptureError, match="the model does not run on these inputs: RuntimeError"
    ):
        fxckpt.rewrite(stack(), example_inputs=(torch.randn(4, 7),))
    with pytest.raises(fxckpt.CaptureError, match="nothing was planned yet"):
        fxckpt.rewrite(stack()).plan  # noqa: B018
    with pytest.raises(fxckpt.BudgetInfeasible) as info:
        fxckpt.rewrite(fx.symbolic_trace(stack()), example_inputs=(torch.randn(4, 8),), budget=64)
    assert info.value.floor_bytes > 64


def test_graph_break_is_refused() -> None:
    """A module with a graph break raises CaptureError."""

    class Breaks(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.sin() if x.sum() > 0 else x.cos()

    with pytest.raises(fxckpt.CaptureError, match="one graph"):
        fxckpt.rewrite(Breaks())(torch.randn(3, requires_grad=True))
