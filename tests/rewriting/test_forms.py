"""Models in the wild: varying shapes, dtypes, subclasses, shared and frozen weights, autograd."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.testing._internal.two_tensor import TwoTensor

import fxckpt
from tests.steps import FLOOR, UNCHECKPOINTED, differing, fresh, outcome, same_at_every_budget

WIDTH = 16


class Blocks(nn.Module):
    """Linear layers with an activation that the backward needs."""

    def __init__(self, layers: int = 3) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x).tanh().sin()
        return x


def weights(*shapes: tuple[int, ...], dtype: torch.dtype = torch.float32) -> tuple[Tensor, ...]:
    return tuple(torch.randn(*shape, dtype=dtype, requires_grad=True) for shape in shapes)


def trained(
    function: Callable[..., Any],
) -> Callable[[], tuple[Callable[..., Any], tuple[Any, ...]]]:
    """Return a maker of a function with an input and two square weights."""
    return lambda: (function, (torch.randn(32, WIDTH), *weights((WIDTH, WIDTH), (WIDTH, WIDTH))))


def two_outputs(x: Tensor, a: Tensor, b: Tensor) -> dict[str, Any]:
    h = (x @ a).tanh().sin()
    return {"first": h, "rest": [(h @ b).cos(), h.detach() + 1, None, 3], "unused": h.sin().sum()}


def views_out(x: Tensor, a: Tensor, b: Tensor) -> tuple[Tensor, ...]:
    h = (x @ a).tanh().sin()
    return h.T, h[:4], (h @ b).cos().view(-1), x[0]


def shared(x: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """Use one weight twice and transposed, as an embedding tied to its head."""
    return ((x @ a).tanh() @ b).sin() @ a.T @ b.T


def unused_weight(x: Tensor, a: Tensor, b: Tensor) -> Tensor:
    return (x @ a).tanh().sin().cos()


def in_place(x: Tensor, a: Tensor, b: Tensor) -> Tensor:
    h = (x @ a).sin()
    h.mul_(2.0)
    h[:, 0] += 1.0
    return F.relu_((h @ b).sin()).add(h.cos()).mul_(2.0)


def integers(x: Tensor, a: Tensor, b: Tensor) -> Tensor:
    h = (x @ a).tanh()
    rank = (h * 8).round().to(torch.int32)
    return (h * (rank % 3 == 0)).sin() * (rank.float() / 8).cos() @ b


def halves(x: Tensor, a: Tensor, b: Tensor) -> Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        h = (x @ a).tanh().sin()
        return ((h @ b).sin() @ a).float()


def sparse_loss(x: Tensor, a: Tensor, b: Tensor) -> Tensor:
    h = (x @ a).sin() @ b
    return F.cross_entropy(h, x.argmax(1)) + F.ctc_loss(
        h.log_softmax(1)[:, None], torch.tensor([[1, 2, 3]]), torch.tensor([32]), torch.tensor([3])
    )


def looped(x: Tensor, a: Tensor, b: Tensor) -> Tensor:
    state = x.new_zeros(WIDTH)
    for row in x.unbind(0)[:6]:
        state = (state @ a + row @ b).tanh()
    return state


FUNCTIONS = (
    two_outputs,
    views_out,
    shared,
    unused_weight,
    in_place,
    integers,
    halves,
    sparse_loss,
    looped,
)


@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda f: f.__name__)
def test_functions(function: Callable[..., Any]) -> None:
    """Functions with unusual outputs, views, mutation and loops equal eager at every budget."""
    adds_up_differently = function in (views_out, halves)
    same_at_every_budget(
        trained(function), reference=UNCHECKPOINTED if adds_up_differently else "eager"
    )


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16, torch.complex64])
def test_dtypes(dtype: torch.dtype) -> None:
    """Every floating and complex dtype gives eager's gradients at every budget."""

    def f(x: Tensor, a: Tensor, b: Tensor) -> Tensor:
        return ((x @ a).tanh().sin() @ b).cos()

    plans = same_at_every_budget(
        lambda: (
            f,
            (torch.randn(32, WIDTH, dtype=dtype), *weights(*[(WIDTH, WIDTH)] * 2, dtype=dtype)),
        )
    )
    assert plans[-1].schedule


def test_aliased_inputs_that_require_grad() -> None:
    """One tensor that requires grad may be two inputs."""

    def f(x: Tensor, y: Tensor, a: Tensor) -> Tensor:
        return ((x @ a).tanh() * y.sin()).cos()

    def make() -> tuple[Callable[..., Tensor], tuple[Tensor, ...]]:
        x = torch.randn(WIDTH, WIDTH, requires_grad=True)
        return f, (x, x, *weights((WIDTH, WIDTH)))

    same_at_every_budget(make)


def frozen_but_the_last() -> tuple[nn.Module, tuple[Tensor]]:
    model = Blocks()
    for layer in list(model.layers)[:-1]:
        layer.requires_grad_(False)
    return model, (torch.randn(32, WIDTH),)


class LowRank(nn.Module):
    """Frozen layers, each with a trained bypass of low rank."""

    def __init__(self) -> None:
        super().__init__()
        self.base = Blocks().requires_grad_(False)
        self.down = nn.ParameterList(torch.randn(WIDTH, 2) for _ in range(3))
        self.up = nn.ParameterList(torch.randn(2, WIDTH) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for layer, down, up in zip(self.base.layers, self.down, self.up, strict=True):
            x = (layer(x) + x @ down @ up).tanh().sin()
        return x


@pytest.mark.parametrize(
    "make",
    [frozen_but_the_last, lambda: (LowRank(), (torch.randn(32, WIDTH),))],
    ids=["frozen", "low rank"],
)
def test_frozen_weights(make: Callable[[], Any]) -> None:
    """Models with frozen weights equal eager at every budget."""
    same_at_every_budget(make)


class Pair(NamedTuple):
    """Named tuples in and out."""

    left: Tensor
    right: Tensor


def test_nested_arguments() -> None:
    """Named tuples, dicts and lists go in and out."""

    def f(pair: Pair, options: dict[str, Any]) -> Pair:
        h = (pair.left @ options["weights"][0]).tanh().sin()
        return Pair(h, (h * pair.right).cos() if options["twice"] else h)

    same_at_every_budget(
        lambda: (
            f,
            (
                Pair(torch.randn(8, WIDTH), torch.randn(8, WIDTH)),
                {"weights": [*weights((WIDTH, WIDTH))], "twice": True},
            ),
        )
    )


@pytest.mark.parametrize("budget", [None, 0.8])
def test_tensor_subclasses(budget: float | None) -> None:
    """Parameters and inputs may be tensor subclasses."""

    def run(backend: object) -> dict[str, Tensor]:
        torch._dynamo.reset()
        torch.manual_seed(0)
        model = Blocks()
        for layer in model.layers:
            layer.weight = nn.Parameter(TwoTensor(layer.weight.detach(), 2 * layer.weight.detach()))
        x = TwoTensor(torch.randn(32, WIDTH), torch.randn(32, WIDTH))
        (torch.compile(model, backend=backend) if backend else model)(x).square().mean().backward()
        return {
            f"{n} {part}": getattr(p.grad, part)
            for n, p in model.named_parameters()
            if "weight" in n
            for part in "ab"
        }

    backend = fxckpt.Backend(budget=budget, inner="aot_eager")
    assert differing(run(None), run(backend)) == []
    assert len(backend.plans) == 1 and (budget is None or backend.plans[0].schedule)


@pytest.mark.parametrize("budget", [None, 0.8])
def test_marked_dimension_makes_one_plan(budget: float | None) -> None:
    """All sizes of a dimension marked dynamic share one plan."""
    model = Blocks()
    backend = fxckpt.Backend(budget=budget, inner="aot_eager", scope="graph")
    compiled = torch.compile(model, backend=backend)
    for rows in (64, 48, 17):
        x = torch.randn(rows, WIDTH)
        torch._dynamo.mark_dynamic(x, 0)
        model.zero_grad()
        expected = outcome(model, model, (x,))
        model.zero_grad()
        assert differing(expected, outcome(model, compiled, (x,))) == [], rows
    assert len(backend.plans) == 1


def test_size_range_is_planned_at_end() -> None:
    """A budget over a range of sizes holds at the largest."""
    model, _ = fresh(lambda: (Blocks(), ()))
    backend = fxckpt.Backend(budget=0.9, inner="aot_eager", scope="graph")
    compiled = torch.compile(lambda x: model(x).square().mean(), backend=backend)

    def peak(rows: int) -> int:
        x = torch.randn(rows, WIDTH)
        torch._dynamo.mark_dynamic(x, 0, min=2, max=512)
        compiled(x).backward()
        model.zero_grad()
        return fxckpt.measure_peak(lambda: compiled(x).backward())

    peaks = [peak(rows) for rows in (64, 500)]
    (plan,) = backend.plans
    assert max(peaks) <= plan.budget_bytes


def test_budget_over_unbounded_sizes_warns() -> None:
    """A budget over unbounded sizes warns that it cannot be promised."""
    model, (x,) = fresh(lambda: (Blocks(), (torch.randn(64, WIDTH),)))
    torch._dynamo.decorators.mark_unbacked(x, 0)
    with pytest.warns(UserWarning, match="cannot be promised"):
        torch.compile(model, backend=fxckpt.Backend(budget=10**6, inner="aot_eager"))(
            x
        ).sum().backward()


def test_sizes_that_depend_on_data() -> None:
    """Data-dependent sizes equal eager at every budget."""

    def f(x: Tensor, a: Tensor, b: Tensor) -> Tensor:
        h = (x @ a).tanh().sin()
        chosen = h[h[:, 0] > 0]
        return (chosen @ b).sin().sum() + h.cos().sum()

    with torch._dynamo.config.patch(
        capture_dynamic_output_shape_ops=True, capture_scalar_outputs=True
    ):
        same_at_every_budget(trained(f), (None, 0.9, FLOOR))


def test_number_read_from_a_tensor() -> None:
    """A number from ``item()`` equals eager's at every budget."""

    def f(x: Tensor, a: Tensor, b: Tensor) -> Tensor:
        h = (x @ a).tanh().sin()
        return (h * h.detach().abs().max().item()).cos() @ b

    with torch._dynamo.config.patch(capture_scalar_outputs=True):
        same_at_every_budget(trained(f), (None, 0.9, FLOOR))


def step(budget: object) -> tuple[nn.Module, Callable[..., Tensor], Tensor]:
    """Return a model, its forward (compiled unless ``budget`` is "eager") and an input."""
    model, (x,) = fresh(lambda: (Blocks(), (torch.randn(32, WIDTH),)))
    if budget == "eager":
        return model, model, x
    return model, torch.compile(model, backend=fxckpt.Backend(budget=budget, inner="aot_eager")), x


@pytest.mark.parametrize("budget", [None, 0.8])
class TestWaysToDifferentiate:
    """Each way to differentiate gives eager's gradients."""

    def same(
        self, budget: object, use: Callable[[nn.Module, Callable[..., Tensor], Tensor], Any]
    ) -> None:
        seen = []
        for b in ("eager", budget):
            model, forward, x = step(b)
            returned = use(model, forward, x)
            gradients = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
            seen.append(gradients | {str(i): t for i, t in enumerate(returned or ())})
        assert seen[0] and differing(*seen) == []

    def test_autograd_grad(self, budget: object) -> None:
        """torch.autograd.grad."""
        self.same(
            budget, lambda m, f, x: torch.autograd.grad(f(x).square().sum(), list(m.parameters()))
        )

    def test_retained_graph(self, budget: object) -> None:
        """Two backwards through a retained graph."""

        def use(model: nn.Module, forward: Callable[..., Tensor], x: Tensor) -> None:
            loss = forward(x).square().sum()
            loss.backward(retain_graph=True)
            loss.backward()

        self.same(budget, use)

    def test_two_forwards_before_two_backwards(self, budget: object) -> None:
        """Two forwards, then their backwards in reverse order."""

        def use(model: nn.Module, forward: Callable[..., Tensor], x: Tensor) -> None:
            first, second = forward(x).square().sum(), forward(x.cos()).sin().sum()
            second.backward()
            first.backward()

        self.same(budget, use)

    def test_accumulation(self, budget: object) -> None:
        """Gradients accumulated over three steps."""

        def use(model: nn.Module, forward: Callable[..., Tensor], x: Tensor) -> None:
            for scale in (1.0, 2.0, 3.0):
                forward(x * scale).square().sum().backward()

        self.same(budget, use)

    def test_part_of_the_outputs(self, budget: object) -> None:
        """A backward from a part of the output."""
        self.same(budget, lambda m, f, x: f(x)[3].sum().backward())


@pytest.mark.parametrize("budget", [None, 0.8])
def test_torch_func_grad_inside(budget: object) -> None:
    """torch.func.grad is traced into the graph, which is then a single forward."""
    weight = torch.randn(WIDTH, WIDTH)

    def gradient(w: Tensor, x: Tensor) -> Tensor:
        return torch.func.grad(lambda w: (x @ w).tanh().sin().square().sum())(w)

    x = torch.randn(8, WIDTH)
    compiled = torch.compile(gradient, backend=fxckpt.Backend(budget=budget, inner="aot_eager"))
    torch.testing.assert_close(compiled(weight, x), gradient(weight, x), rtol=0, atol=0)


def test_second_derivatives_are_refused() -> None:
    """Second derivatives raise torch's own error."""
    model, forward, x = step(0.8)
    (first,) = torch.autograd.grad(
        forward(x).square().sum(), [model.layers[0].weight], create_graph=True
    )
    with pytest.raises(RuntimeError, match="double backward"):
        first.sum().backward()
