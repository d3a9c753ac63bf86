"""Random ops: recomputation repeats the draw, and leaves the generator's final state unchanged."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import CheckpointPolicy

import fxckpt
from tests.steps import FLOOR, differing, fresh, outcome, same_at_every_budget

WIDTH = 16


class Residual(nn.Module):
    """Layers around a random function."""

    def __init__(self, draw: Callable[[Tensor], Tensor], layers: int = 2) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(layers))
        self.draw = draw

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + self.draw(layer(x).tanh().sin())
        return x


def made_in_place(fill: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    return lambda x: (x * fill(torch.empty_like(x))).tanh()


def attention(x: Tensor) -> Tensor:
    heads = x.view(1, 2, -1, WIDTH // 2)
    return F.scaled_dot_product_attention(heads, heads, heads, dropout_p=0.2).reshape(x.shape)


def channels(drop: Callable[..., Tensor]) -> Callable[[Tensor], Tensor]:
    return lambda x: drop(x.T[None, :, :, None], 0.3, training=True)[0, :, :, 0].T


DRAWS: dict[str, Callable[[Tensor], Tensor]] = {
    "dropout": lambda x: F.dropout(x, 0.3),
    "dropout twice": lambda x: F.dropout(F.dropout(x, 0.2).sin() * torch.rand_like(x), 0.2),
    "dropout in place": lambda x: F.dropout(x.sin(), 0.3, inplace=True),
    "alpha_dropout": lambda x: F.alpha_dropout(x, 0.3, training=True),
    "feature_alpha_dropout": channels(F.feature_alpha_dropout),
    "dropout2d": channels(F.dropout2d),
    "bernoulli": lambda x: x * torch.bernoulli(x.detach().sigmoid()),
    "rand": lambda x: x * torch.rand(x.shape),
    "randn_like": lambda x: x * torch.randn_like(x),
    "randint": lambda x: x * torch.randint(0, 5, x.shape),
    "randint_like": lambda x: x * torch.randint_like(x, 5),
    "randperm": lambda x: x[:, torch.randperm(WIDTH)],
    "normal": lambda x: x * torch.normal(x.detach(), 1.0),
    "multinomial": lambda x: x * torch.multinomial(x.detach().softmax(1), WIDTH, replacement=True),
    "poisson": lambda x: x * torch.poisson(x.detach().abs()),
    "binomial": lambda x: x * torch.binomial(torch.full_like(x, 5.0), x.detach().sigmoid()),
    "rrelu": lambda x: F.rrelu(x, training=True),
    "gumbel_softmax": lambda x: F.gumbel_softmax(x, hard=True),
    "attention": attention,
    "bernoulli_": made_in_place(lambda t: t.bernoulli_(0.5)),
    "cauchy_": made_in_place(lambda t: t.cauchy_()),
    "exponential_": made_in_place(lambda t: t.exponential_()),
    "geometric_": made_in_place(lambda t: t.geometric_(0.3)),
    "log_normal_": made_in_place(lambda t: t.log_normal_()),
    "normal_": made_in_place(lambda t: t.normal_()),
    "random_": made_in_place(lambda t: t.random_(5)),
    "uniform_": made_in_place(lambda t: t.uniform_()),
}


def drawing(name: str) -> Callable[[], tuple[nn.Module, tuple[Tensor, ...]]]:
    return lambda: (Residual(DRAWS[name]), (torch.randn(512, WIDTH),))


@pytest.mark.sweep
@pytest.mark.parametrize("name", DRAWS)
def test_recompute_repeats_draw_at_any_budget(name: str) -> None:
    """A recomputed random op repeats its draw at every budget."""
    same_at_every_budget(drawing(name), (None, 0.9, 0.5, 0.1, FLOOR))


MAY_NOT_RUN_AGAIN = ("random_", "randperm")
"""Functions whose recomputation yields no value that the backward needs."""
AT_THE_FLOOR = ("dropout twice", "attention", "bernoulli_", "multinomial")
"""Functions tried within budgets too, one of each kind; the sweep tries all."""


@pytest.mark.parametrize("name", DRAWS)
def test_recompute_repeats_draw(name: str) -> None:
    """A recomputed random op repeats its draw."""
    if name in AT_THE_FLOOR:
        same_at_every_budget(drawing(name), (0.8, FLOOR))
    (plan,) = same_at_every_budget(drawing(name), (None,), policy=recompute_all)
    drawn = {row.op for row in plan.rows if row.name in plan.recomputed and is_random(row.op)}
    assert drawn or name in MAY_NOT_RUN_AGAIN, "no draw was repeated: this test shows nothing"


def recompute_all(ctx: object, op: object, *args: object, **kwargs: object) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_RECOMPUTE


def is_random(op: str) -> bool:
    """``op`` as a plan's row has it: "bernoulli.p"."""
    name, _, overload = op.partition(".")
    if not hasattr(torch.ops.aten, name):
        return False  # an item of a tuple
    overload = overload or "default"
    return (
        torch.Tag.nondeterministic_seeded in getattr(getattr(torch.ops.aten, name), overload).tags
    )


class SelfAttention(nn.Module):
    """The attention module of torch, with dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.MultiheadAttention(WIDTH, 2, dropout=0.2, batch_first=True) for _ in range(2)
        )

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x, x, x, need_weights=False)[0]
        return x


def test_attention_modules_with_dropout() -> None:
    same_at_every_budget(lambda: (SelfAttention(), (torch.randn(2, 32, WIDTH),)))


class OwnGenerators(nn.Module):
    """A model that draws from two generators of its own, and from the default one in between."""

    def forward(self, x: Tensor, first: torch.Generator, second: torch.Generator) -> Tensor:
        x = (x * torch.rand(x.shape, generator=first)).sin()
        x = F.dropout(x, 0.3).sin()
        return (x * torch.rand(x.shape, generator=second)).sin()


def test_generators_of_user() -> None:
    """Ops of the user's generators, which Dynamo leaves out, run as they are."""
    ends = []
    for budget in ("eager", None, 1.0):
        torch._dynamo.reset()
        model, first, second = (
            OwnGenerators(),
            torch.Generator().manual_seed(3),
            torch.Generator().manual_seed(4),
        )
        forward = (
            model
            if budget == "eager"
            else torch.compile(model, backend=fxckpt.Backend(budget=budget, inner="aot_eager"))
        )
        x = torch.linspace(0.0, 1.0, 64).requires_grad_()
        seen = outcome(model, forward, (x, first, second))
        ends.append(seen | {"first": first.get_state(), "second": second.get_state()})
    assert differing(ends[0], ends[1]) == differing(ends[0], ends[2]) == []


@pytest.fixture(params=[True, False], ids=["eager's stream", "inductor's stream"])
def inductor_stream(request: pytest.FixtureRequest) -> Iterator[bool]:
    with torch._inductor.config.patch(fallback_random=request.param):
        yield request.param


@pytest.mark.parametrize(
    "name",
    ["dropout", *(pytest.param(n, marks=pytest.mark.sweep) for n in DRAWS if n != "dropout")],
)
def test_recompute_repeats_draw_under_inductor(inductor_stream: bool, name: str) -> None:
    """A recomputed random op repeats its draw under Inductor."""
    model, inputs = fresh(drawing(name))
    expected = outcome(model, torch.compile(model), inputs)
    floor = 0
    for budget in (None, "floor"):
        model, inputs = fresh(drawing(name))
        # What `outcome` copies between forward and backward is not the model's.
        backend = fxckpt.Backend(budget=floor or None, scope="graph")
        got = outcome(model, torch.compile(model, backend=backend), inputs)
        floor = backend.plans[0].floor_bytes
        for key, value in expected.items():
            torch.testing.assert_close(got[key], value, msg=f"{key} at budget {budget}")
