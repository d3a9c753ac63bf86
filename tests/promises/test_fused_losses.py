"""Losses fused with their head: ops that compute gradients with the loss, chunk by chunk."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.flop_counter import flop_registry, register_flop_formula

import fxckpt

ROWS, WIDTH, VOCABULARY, CHUNK = 1024, 32, 1024, 32
PRODUCTS = 3 * 2 * ROWS * WIDTH * VOCABULARY
"""FLOPs of the products of a head with its logits and their gradient."""
WORKSPACE = 8 * CHUNK * VOCABULARY * 4 + 4 * VOCABULARY * WIDTH * 4 + ROWS * WIDTH * 4
"""Bytes of the logits of a chunk, their gradient, targets as int64, and sums of gradients."""
fused = getattr(F, "linear_cross_entropy", None)

Loss = Callable[[Tensor, Tensor, Tensor], Tensor]


def in_chunks(x: Tensor, weight: Tensor, target: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the mean loss of a head, and the gradients of its operands."""
    loss, weight_gradient, rows = x.new_zeros(()), torch.zeros_like(weight), []
    for part, labels in zip(x.split(CHUNK), target.split(CHUNK), strict=True):
        scores = torch.log_softmax(part @ weight.t(), 1)
        loss = loss - scores.gather(1, labels[:, None]).sum() / len(x)
        gradient = (scores.exp() - F.one_hot(labels, len(weight))) / len(x)
        rows.append(gradient @ weight)
        weight_gradient = weight_gradient + gradient.t() @ part
    return loss, torch.cat(rows), weight_gradient


class FusedFunction(torch.autograd.Function):
    """The loss as Liger's kernels have it: its forward saves gradients."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, target: Tensor) -> Tensor:
        loss, *gradients = in_chunks(x, weight, target)
        ctx.save_for_backward(*gradients)
        return loss

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None]:
        rows, weight = ctx.saved_tensors
        return rows * gradient, weight * gradient, None


@torch.library.custom_op("fused_losses::head", mutates_args=())
def head(x: Tensor, weight: Tensor, target: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the loss and its gradients, from one op."""
    return in_chunks(x, weight, target)


@head.register_fake
def _(x: Tensor, weight: Tensor, target: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return x.new_empty(()), torch.empty_like(x), torch.empty_like(weight)


def _keep(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.save_for_backward(*output[1:])


def _scale(ctx: Any, gradient: Tensor, *others: Any) -> tuple[Tensor, Tensor, None]:
    rows, weight = ctx.saved_tensors
    return rows * gradient, weight * gradient, None


head.register_autograd(_scale, setup_context=_keep)


def of_torch(x: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    """Return the loss of torch's own fused op."""
    assert fused is not None
    options = nn.LinearCrossEntropyOptions(allow_retain_graph=True)
    return fused(x, weight, target, options=options)  # type: ignore[no-any-return]


class Model(nn.Module):
    """Two residual MLPs and a head with a fused loss."""

    def __init__(self, loss: Loss) -> None:
        super().__init__()
        self.ups = nn.ModuleList(nn.Linear(WIDTH, 4 * WIDTH) for _ in range(2))
        self.downs = nn.ModuleList(nn.Linear(4 * WIDTH, WIDTH) for _ in range(2))
        self.weight = nn.Parameter(torch.randn(VOCABULARY, WIDTH) / 8)
        self.loss = loss

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        for up, down in zip(self.ups, self.downs, strict=True):
            x = x + down(F.gelu(up(x)))
        return self.loss(x, self.weight, target)


def made(loss: Loss) -> tuple[Model, Tensor, Tensor]:
    """Return a model with a fused loss, and its inputs."""
    torch.manual_seed(0)
    return Model(loss), torch.randn(ROWS, WIDTH), torch.randint(VOCABULARY, (ROWS,))


needs_fused = pytest.mark.skipif(fused is None, reason="this torch has none")
LOSSES = [
    pytest.param(of_torch, id="torch", marks=needs_fused),
    pytest.param(lambda *given: head(*given)[0], id="op"),
    pytest.param(FusedFunction.apply, id="function"),
]


@pytest.mark.parametrize("tile", [None, "auto"])
@pytest.mark.parametrize("budget", [0.5, 1.05])
@pytest.mark.parametrize("loss", LOSSES)
def test_fused_losses_keep_budget_and_gradients(loss: Loss, budget: float, tile: Any) -> None:
    """At half the peak and near the floor, gradients are those of eager mode."""
    fxckpt.register_op(head, workspace=WORKSPACE)
    model, x, target = made(loss)
    model(x, target).backward()
    expected = [p.grad for p in model.parameters()]
    model.zero_grad()
    given: Any = budget
    if budget > 1:
        floor = fxckpt.plan(model, x, target, budget="min", cost="flops").peak_bytes
        given = int(budget * floor)
    backend = fxckpt.Backend(budget=given, inner="aot_eager", cost="flops", tile=tile)
    step = torch.compile(model, backend=backend, fullgraph=True)
    step(x, target).backward()
    model.zero_grad()
    peak = fxckpt.measure_peak(lambda: step(x, target).backward())
    (plan,) = backend.plans
    assert plan.budget_bytes is not None and peak <= 1.01 * plan.budget_bytes
    for parameter, gradient in zip(model.parameters(), expected, strict=True):
        torch.testing.assert_close(parameter.grad, gradient, rtol=1e-4, atol=1e-7)


@needs_fused
def test_fused_loss_of_torch_is_priced() -> None:
    """Its three products count, and its logits are between them."""
    model, x, target = made(of_torch)
    whole, _, _ = made(lambda x, weight, target: F.cross_entropy(x @ weight.t(), target))
    plans = [fxckpt.plan(each, x, target, cost="flops") for each in (model, whole)]
    assert plans[0].step_flops == plans[1].step_flops >= PRODUCTS


def test_fused_op_is_priced_by_its_formula() -> None:
    """FLOPs are those given to torch's counter or to register_op; there are none otherwise."""
    model, x, target = made(lambda *given: head(*given)[0])

    def flops() -> int:
        torch._dynamo.reset()
        return fxckpt.plan(model, x, target, cost="flops").step_flops

    def formula(x: Any, weight: Any, target: Any, *others: Any, **options: Any) -> int:
        return PRODUCTS

    packet = torch.ops.fused_losses.head
    plain = flops()
    try:
        register_flop_formula(packet)(formula)
        assert flops() - plain == PRODUCTS
        fxckpt.register_op(head, flops=lambda x, weight, target: 6 * x.numel() * len(weight))
        del flop_registry[packet]
        assert flops() - plain == PRODUCTS
    finally:
        fxckpt.register_op(head)
        flop_registry.pop(packet, None)
