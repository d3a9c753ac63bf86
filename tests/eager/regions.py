"""Regions to checkpoint, and the ways to run and count them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

Region = Callable[[Tensor, Tensor], Tensor]


Checkpoint = Callable[..., Any]


def plain(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return function(*args, **kwargs)


def step(region: Region, checkpoint: Checkpoint, *, twice: bool = False) -> dict[str, Tensor]:
    """Return a region's gradients (of their norm if ``twice``) and the generator's last state."""
    torch.manual_seed(0)
    x, w = torch.randn(6, 6, requires_grad=True), torch.randn(6, 6, requires_grad=True)
    out = checkpoint(region, x, w)
    grads = torch.autograd.grad(out.square().sum(), (x, w), create_graph=twice)
    if twice:
        norm: Any = sum(g.square().sum() for g in grads)
        grads += torch.autograd.grad(norm, (x, w))
    return {"output": out.detach(), "generator": torch.get_rng_state()} | {
        f"gradient {i}": g.detach() for i, g in enumerate(grads)
    }


# fmt: off
def products(x: Tensor, w: Tensor) -> Tensor:
    return (x @ w).sin().exp()


def writes_activation(x: Tensor, w: Tensor) -> Tensor:
    return F.relu(x @ w, inplace=True).mul(x).sin()


def writes_views(x: Tensor, w: Tensor) -> Tensor:
    y = x @ w
    y.mul_(2)
    y[1:].sin_()
    return y.add_(1).exp() * x


def writes_rows(x: Tensor, w: Tensor) -> Tensor:
    y = x.clone()
    y[0] = w[0] * 2
    y[:, 1].mul_(w[:, 1])
    return (y.sin() @ w).cos()


def fills_zeros(x: Tensor, w: Tensor) -> Tensor:
    y = x.new_zeros(12, 6)
    y[:6] = x.sin()
    y[6:] = w.cos()
    return (y.exp() @ w).cos()


def fills_empty(x: Tensor, w: Tensor) -> Tensor:
    y = torch.empty(12, 6)
    y[:6] = x.sin()
    y[6:] = w.cos()
    return (y.exp() @ w).cos()


def mixture_of_experts(x: Tensor, w: Tensor) -> Tensor:
    out = torch.zeros_like(x)
    scores = (x @ w).softmax(-1)
    _, chosen = scores.topk(2, -1)
    for expert in range(6):
        rows = (chosen == expert).any(-1).nonzero().squeeze(-1)
        out.index_add_(0, rows, (x[rows] * w[expert]).sin() * scores[rows, expert : expert + 1])
    return out.exp()


def dropouts(x: Tensor, w: Tensor) -> Tensor:
    return (F.dropout(x @ w, 0.5).sin() * F.dropout(x, 0.3)).exp()


def own_generator(x: Tensor, w: Tensor) -> Tensor:
    generator = torch.Generator().manual_seed(3)
    noise = torch.empty(6, 6).normal_(generator=generator)
    return ((x + torch.rand(6, 6, generator=generator)) @ w).sin().mul(noise).exp()


def complex_views(x: Tensor, w: Tensor) -> Tensor:
    z = torch.view_as_complex(x.reshape(6, 3, 2)).conj().sin()
    return (z * torch.fft.fft(w)[:, :3]).abs().sin()


def negative_views(x: Tensor, w: Tensor) -> Tensor:
    return torch.complex(x, w).exp().conj().imag.sin() * x


def attention(x: Tensor, w: Tensor) -> Tensor:
    q, k, v = (t.view(1, 2, 6, 3) for t in (x @ w, x.sin(), w.cos()))
    return F.scaled_dot_product_attention(q.exp(), k, v).sin()


def gradient_inside(x: Tensor, w: Tensor) -> Tensor:
    y = (x @ w).sin().exp().sum()
    (grad,) = torch.autograd.grad(y, x, create_graph=True)
    return grad.square() + y


def nothing_differentiable_between(x: Tensor, w: Tensor) -> Tensor:
    with torch.no_grad():
        scale = (x @ w).sin()
    return scale * x.exp() @ w


def mixed_precision(x: Tensor, w: Tensor) -> Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = (x @ w).sin() @ w
    return y.float().exp()


def sparse_product(x: Tensor, w: Tensor) -> Tensor:
    return torch.sparse.mm(x.relu().to_sparse(), w.sin()).exp()


def list_of_tensors(x: Tensor, w: Tensor) -> Tensor:
    parts = (t.sin() for t in (x @ w).exp().chunk(3, 1))
    return torch.cat([*parts, *torch._foreach_mul([x, w], 2.0)], 1).exp()


def noise_that_an_op_fills(x: Tensor, w: Tensor) -> Tensor:
    return F.rrelu(x @ w, training=True).sin()


def results_of_nothing(x: Tensor, w: Tensor) -> Tensor:
    parts = [x.clone(), w.clone()]
    torch._foreach_mul_(parts, 2.0)
    return (parts[0] @ parts[1]).sin().exp()


def given_by_out(x: Tensor, w: Tensor) -> Tensor:
    with torch.no_grad():
        scale = torch.sin(w, out=torch.empty_like(w))
    return (x * scale).exp() * w


def writes_rows_of_weights(x: Tensor, w: Tensor) -> Tensor:
    table = nn.Embedding.from_pretrained(w.detach().clone(), max_norm=1.0)
    return (table(torch.tensor([0, 3, 3])) @ x).sin() @ w


def rebound_data(x: Tensor, w: Tensor) -> Tensor:
    y = torch.ones(6, 6)
    y.data = w.detach().sin()
    return (x * y).exp() * w


def saves_input_and_result(x: Tensor, w: Tensor) -> Tensor:
    return (x.exp() * w).sigmoid().tanh() + w.exp()


# fmt: on


class ProductOfSines(torch.autograd.Function):
    """Asks for its saved tensors twice, as some do."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        y = x @ w
        ctx.save_for_backward(x, w, y)
        return y.sin()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        _, w, y = ctx.saved_tensors
        x, _, _ = ctx.saved_tensors
        inner = grad * y.cos()
        return inner @ w.t(), x.t() @ inner


def own_function(x: Tensor, w: Tensor) -> Tensor:
    return ProductOfSines.apply(x.exp(), w.sin()).cos()  # type: ignore[no-any-return]


REGIONS: list[Region] = [
    products,
    writes_activation,
    writes_views,
    writes_rows,
    fills_zeros,
    fills_empty,
    mixture_of_experts,
    dropouts,
    own_generator,
    complex_views,
    negative_views,
    attention,
    gradient_inside,
    nothing_differentiable_between,
    mixed_precision,
    sparse_product,
    list_of_tensors,
    noise_that_an_op_fills,
    results_of_nothing,
    given_by_out,
    writes_rows_of_weights,
    rebound_data,
    saves_input_and_result,
    own_function,
]


TWICE = [products, writes_views, dropouts, complex_views, saves_input_and_result, mixed_precision]


class Counting(TorchDispatchMode):
    """Counts the ops that run."""

    def __init__(self) -> None:
        super().__init__()
        self.ran: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.ran[func._opname] += 1
        return func(*args, **(kwargs or {}))


def ops_of_the_backward(out: Tensor) -> Counter[str]:
    with Counting() as counting:
        out.sum().backward()
    return counting.ran
