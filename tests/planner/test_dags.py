"""Random models train as without checkpointing, at every budget.

They have layers, dropout, views, in-place ops, shared layers and mutated buffers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F

import fxckpt
from tests.steps import FLOOR, UNCHECKPOINTED, same_at_every_budget

WIDTH = 8
ROWS = 48
FEW = max(settings.default.max_examples // 3, 1)
"""Number of examples, each of which is compiled four times."""


@dataclass(frozen=True)
class ModelOp:
    """One op of a model, by name, and the indices of the values that it reads."""

    op: str
    reads: tuple[int, ...]
    layer: int


def transposed(x: Tensor) -> Tensor:
    """Reorder the rows by views and a copy."""
    return x.view(2, ROWS // 2, WIDTH).transpose(0, 1).reshape(ROWS, WIDTH)


def doubled_in_place(x: Tensor) -> Tensor:
    """Mutate a view, then its base."""
    y = x.sin()
    y[:, 0].mul_(2.0)
    return y.add_(1.0)


def attention(x: Tensor, y: Tensor) -> Tensor:
    """Attend from ``x`` to ``y`` with two heads and dropout."""
    heads = x.view(1, ROWS, 2, WIDTH // 2).transpose(1, 2)
    others = y.view(1, ROWS, 2, WIDTH // 2).transpose(1, 2)
    return (
        F.scaled_dot_product_attention(heads, others, others, dropout_p=0.1)
        .transpose(1, 2)
        .reshape(ROWS, WIDTH)
    )


ONE: dict[str, Callable[[Tensor], Tensor]] = {
    "sin": torch.sin,
    "gelu": F.gelu,
    "relu in place": lambda x: F.relu_(x + 0.1),
    "softmax": lambda x: x.softmax(-1),
    "dropout": lambda x: F.dropout(x, 0.3),
    "noise": lambda x: x * torch.rand_like(x),
    "view": transposed,
    "slice": lambda x: torch.cat([x[:, 4:], x[:, :4]], 1),
    "in place": doubled_in_place,
    "norm": lambda x: F.layer_norm(x, (WIDTH,)),
    "route": lambda x: x.gather(0, x.argsort(0)) + x,
    "cast": lambda x: x.to(torch.bfloat16).exp().float().tanh(),
}
TWO: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "add": torch.add,
    "mul": torch.mul,
    "attention": attention,
    "where": lambda x, y: torch.where(x > y, x.cos(), y),
}
LAYERS = ("linear", "linear again", "buffer", "batch norm")


class Dag(nn.Module):
    """Compute ``steps`` in order, and add up the values that none of them reads."""

    def __init__(self, steps: tuple[ModelOp, ...]) -> None:
        super().__init__()
        self.steps = steps
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.norms = nn.ModuleList(nn.BatchNorm1d(WIDTH) for _ in range(3))
        self.register_buffer("seen", torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        values = [self.layers[0](x)]
        for step in self.steps:
            values.append(self.compute(step, [values[i] for i in step.reads]))
        read = {i for step in self.steps for i in step.reads}
        return sum((v for i, v in enumerate(values) if i not in read), torch.zeros(()))

    def compute(self, step: ModelOp, inputs: list[Tensor]) -> Tensor:
        """Return the value of one step."""
        if step.op in TWO:
            return TWO[step.op](inputs[0], inputs[-1])
        x = inputs[0]
        if step.op in ONE:
            return ONE[step.op](x)
        if step.op == "batch norm":
            return self.norms[step.layer](x)
        if step.op == "buffer":
            y = x + self.seen.cos()
            self.seen += x.detach().mean(0)
            return y
        return self.layers[step.layer](x)


@st.composite
def dags(draw: st.DrawFn) -> tuple[ModelOp, ...]:
    """Draw the ops of a model, each of which reads near values."""
    count = draw(st.integers(3, 12))
    ops = st.sampled_from([*ONE, *TWO, *LAYERS])
    near = lambda i: st.integers(max(0, i - 4), i)  # noqa: E731
    return tuple(
        ModelOp(draw(ops), (draw(near(i)), draw(near(i))), draw(st.integers(0, 2)))
        for i in range(count)
    )


@settings(max_examples=FEW)
@given(steps=dags())
def test_trains_the_same_at_every_budget(steps: tuple[ModelOp, ...]) -> None:
    """The step of a random model is that of the uncheckpointed model, within every budget."""
    plans = same_at_every_budget(
        lambda: (Dag(steps), (torch.randn(ROWS, WIDTH),)),
        (None, 0.8, FLOOR),
        reference=UNCHECKPOINTED,
        verify="exact",
    )
    for plan in plans:
        assert plan.budget_bytes is None or plan.peak_bytes <= plan.budget_bytes


@settings(max_examples=FEW)
@given(steps=dags())
def test_measured_peak_is_at_most_planned(steps: tuple[ModelOp, ...]) -> None:
    """The peak measured at the floor is within the planned one."""
    torch._dynamo.reset()
    model, x = Dag(steps), torch.randn(ROWS, WIDTH)

    def loss(x: Tensor) -> Tensor:
        return model(x).square().mean()

    backend = fxckpt.Backend(budget=fxckpt.plan(loss, x).floor_bytes, inner="aot_eager")
    compiled = torch.compile(loss, backend=backend)
    compiled(x).backward()
    model.zero_grad(set_to_none=True)
    measured = fxckpt.measure_peak(lambda: compiled(x).backward())
    assert measured <= backend.plans[0].peak_bytes <= backend.plans[0].baseline_peak_bytes
