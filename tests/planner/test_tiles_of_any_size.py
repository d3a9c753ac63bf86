"""Tiles of sizes that vary: one compiled graph is right, and within its peak, at all of them."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.nn import functional as F

import fxckpt

VOCABULARY, WIDTH, IGNORED = 512, 16, 5
LARGEST = (6, 40)


class Model(nn.Module):
    """A table, a gated MLP, and a head over a vocabulary with its loss."""

    def __init__(self, shift: bool = False, reduction: str = "mean") -> None:
        super().__init__()
        torch.manual_seed(0)
        self.shift, self.reduction = shift, reduction
        self.table, self.norm = nn.Embedding(VOCABULARY, WIDTH), nn.LayerNorm(WIDTH)
        self.gate, self.up = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(WIDTH, 4 * WIDTH)
        self.down, self.head = nn.Linear(4 * WIDTH, WIDTH), nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: Tensor, target: Tensor) -> Tensor:
        x = self.table(tokens)
        y = self.norm(x)
        logits = self.head(x + self.down(F.silu(self.gate(y)) * self.up(y)))
        if self.shift:
            logits, target = logits[:, :-1], target[:, 1:]
        return F.cross_entropy(
            logits.flatten(0, 1), target.flatten(), reduction=self.reduction, ignore_index=IGNORED
        )


def batch(rows: int, length: int, dims: Sequence[int] = (0, 1)) -> tuple[Tensor, Tensor]:
    """Tokens and targets, of which some are ignored; the dims are marked as dynamic."""
    tokens = torch.randint(VOCABULARY, (rows, length))
    target = tokens.clone()
    target[:, ::3] = IGNORED
    for value in (tokens, target):
        for dim in dims:
            torch._dynamo.mark_dynamic(value, dim)
    return tokens, target


def result(step: Any, model: nn.Module, given: tuple[Tensor, Tensor]) -> list[Tensor]:
    """The loss, and the gradients of the parameters, which are left without."""
    model.zero_grad()
    loss = step(*given)
    loss.backward()
    found = [loss.detach(), *(p.grad for p in model.parameters() if p.grad is not None)]
    model.zero_grad()
    return found


def assert_right(step: Any, model: nn.Module, given: tuple[Tensor, Tensor]) -> None:
    """Compare with the model in float64."""
    exact = copy.deepcopy(model).double()
    pairs = zip(result(step, model, given), result(exact, exact, given), strict=True)
    for found, expected in pairs:
        torch.testing.assert_close(found, expected.float(), rtol=1e-4, atol=1e-6)


def measured(step: Any, model: nn.Module, given: tuple[Tensor, Tensor]) -> int:
    """The peak of a step."""
    model.zero_grad()
    peak = fxckpt.measure_peak(lambda: step(*given).backward())
    model.zero_grad()
    return peak


def compiled(model: nn.Module, **options: Any) -> tuple[Any, fxckpt.Backend, Any]:
    """A compiled model, its backend, and a counter of compiles."""
    given = {"budget": "min", "inner": "aot_eager", "cost": "flops", "tile": 4, **options}
    dynamic = given.pop("dynamic", None)
    backend = fxckpt.Backend(**given)
    counter = CompileCounterWithBackend(backend)
    return torch.compile(model, backend=counter, dynamic=dynamic), backend, counter


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("shift", [False, True])
def test_one_graph_for_batch_and_length(shift: bool, reduction: str) -> None:
    """Sizes that no number of tiles divides, and fewer rows than tiles, are right."""
    model = Model(shift, reduction)
    step, backend, counter = compiled(model)
    for sizes in (LARGEST, (5, 17), (3, 40), (2, 3)):
        given = batch(*sizes)
        assert_right(step, model, given)
        (plan,) = backend.plans
        peak = measured(step, model, given)
        assert peak == plan.peak_bytes if sizes == LARGEST else peak < plan.peak_bytes
    assert plan.tiling is not None and plan.tiling.count == 4 and len(plan.tiling.regions) == 2
    assert counter.frame_count == 1
    torch._dynamo.reset()
    fixed = compiled(model, dynamic=False)
    result(fixed[0], model, tuple(t.clone() for t in batch(*LARGEST, dims=())))  # type: ignore[arg-type]
    assert plan.peak_bytes == fixed[1].plans[0].peak_bytes
