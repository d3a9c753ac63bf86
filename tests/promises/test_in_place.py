"""Results in place of operands that die: measured bytes, and nothing that anyone holds changes."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import fxckpt
from tests.models.zoo import gpt2

VOCABULARY, WIDTH, TOKENS = 4096, 32, 64


class TiedHead(nn.Module):
    """An embedding whose weight is the head's too, and a loss over large logits."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)

    def forward(self, tokens: Tensor) -> Tensor:
        logits = self.embedding(tokens).tanh() @ self.embedding.weight.t()
        return F.cross_entropy(logits, tokens)


def compiled(model: nn.Module, **options: object) -> tuple[Callable[..., Tensor], fxckpt.Backend]:
    backend = fxckpt.Backend(inner="aot_eager", scope="graph", **options)  # type: ignore[arg-type]
    return torch.compile(model, backend=backend), backend


def test_measured_peak_is_the_plan_s() -> None:
    """Two tensors of the size of the logits are live at once where a step apart needs three."""
    model, tokens = TiedHead(), torch.randint(VOCABULARY, (TOKENS,))
    forward, backend = compiled(model, budget="min")

    def step() -> None:
        forward(tokens).backward()

    step()
    (plan,) = backend.plans
    model.zero_grad(set_to_none=True)
    assert fxckpt.measure_peak(step) == plan.peak_bytes
    logits = TOKENS * VOCABULARY * 4
    assert plan.peak_bytes < 2.9 * logits + 2 * VOCABULARY * WIDTH * 4


def test_gpt2_is_measured_as_planned() -> None:
    """A small GPT-2 with dropout and a tied head takes the bytes of its plan at the floor."""
    model, inputs = gpt2()
    forward, backend = compiled(model, budget="min")

    def step() -> None:
        forward(*inputs).backward()

    step()
    (plan,) = backend.plans
    model.zero_grad(set_to_none=True)
    assert fxckpt.measure_peak(step) == plan.peak_bytes


@pytest.mark.parametrize("budget", [None, "min"])
def test_backward_of_a_retained_graph_repeats(budget: str | None) -> None:
    """Every backward over one graph gives the same gradients: no saved value was written."""
    model, tokens = TiedHead(), torch.randint(VOCABULARY, (TOKENS,))
    loss = compiled(model, budget=budget)[0](tokens)
    gradients = []
    for _ in range(3):
        (gradient,) = torch.autograd.grad(loss, list(model.parameters()), retain_graph=True)
        gradients.append(gradient)
    expected = torch.autograd.grad(model(tokens), list(model.parameters()))[0]
    assert all(torch.equal(gradient, expected) for gradient in gradients)


def test_given_gradients_and_outputs_stay() -> None:
    """A gradient that the user gives and an output that they hold keep their values."""

    def f(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        hidden = (x * y).sin()
        return hidden.exp() * y, hidden

    x, y = (torch.randn(64, requires_grad=True) for _ in range(2))
    forward, _ = compiled(f, budget="min")  # type: ignore[arg-type]
    outputs = forward(x, y)
    given = [torch.randn(64) for _ in outputs]
    held = [t.detach().clone() for t in (*outputs, *given)]
    torch.autograd.backward(outputs, given)
    assert all(map(torch.equal, (*outputs, *given), held))


def test_outputs_may_be_written_to() -> None:
    """The user may write to an output: it is no view of a value of the graph."""

    def f(x: Tensor) -> Tensor:
        return x.exp().view(-1).cos().view(-1)

    x = torch.randn(8, 8, requires_grad=True)
    output = compiled(f, budget="min")[0](x)  # type: ignore[arg-type]
    output.mul_(2).sum().backward()
    expected = x.detach().clone().requires_grad_()
    f(expected).mul(2).sum().backward()
    assert x.grad is not None and expected.grad is not None
    assert torch.equal(x.grad, expected.grad)


def test_other_compilers_get_graphs_without_writes() -> None:
    """A compiler of the user, who may rely on it, is given ops that write nothing."""
    seen: list[str] = []

    def inner(gm: torch.fx.GraphModule, inputs: object) -> Callable[..., object]:
        seen.extend(str(n.target) for n in gm.graph.nodes if n.op == "call_function")
        return gm.forward

    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh())
    backend = fxckpt.Backend(inner=inner, budget="min", scope="graph")
    torch.compile(model, backend=backend)(torch.randn(4, 8)).sum().backward()
    assert seen and not any("out" in name or "grad_input" in name for name in seen)
