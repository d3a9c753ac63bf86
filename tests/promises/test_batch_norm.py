"""Batch norm in training: recomputed with the same bits, its statistics updated once."""

from __future__ import annotations

import functools

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import fxckpt
from tests.steps import FLOOR, UNCHECKPOINTED, peak_of, same_at_every_budget


class Residual(nn.Module):
    """Blocks of a convolution and a batch norm, each in a region of torch's with ``regions``."""

    def __init__(self, *, regions: bool = False, shared: bool = False) -> None:
        super().__init__()
        norm = nn.BatchNorm2d(8)
        self.blocks = nn.ModuleList(
            nn.Sequential(
                nn.Conv2d(8, 8, 3, padding=1),
                norm if shared else nn.BatchNorm2d(8),
                nn.Dropout(0.1),
            )
            for _ in range(8)
        )
        self.regions = regions

    def block(self, block: nn.Module, x: Tensor) -> Tensor:
        return x + F.relu(block(x))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            run = functools.partial(self.block, block)
            x = checkpoint(run, x, use_reentrant=False) if self.regions else run(x)
        return x.square().mean()


def made(**options: bool) -> tuple[nn.Module, tuple[Tensor]]:
    return Residual(**options).train(), (torch.randn(4, 8, 16, 16),)


@pytest.mark.parametrize("shared", [False, True])
def test_batch_norm_keeps_bits_and_statistics(shared: bool) -> None:
    """A norm that is shared reads the statistics that its last call wrote."""
    plans = same_at_every_budget(lambda: made(shared=shared), (0.7, 0.5, FLOOR))
    assert shared or any("batch_norm" in name for plan in plans for name in plan.recomputed)


@pytest.mark.parametrize("budget", [0.6, "min"])
def test_batch_norm_keeps_the_planned_peak(budget: float | str) -> None:
    backend = fxckpt.Backend(budget, inner="aot_eager", scope="graph")
    measured = peak_of(backend, lambda: (made()[0], made()[1][0]))
    plan = max(backend.plans, key=lambda plan: plan.peak_bytes)
    # A recompute does not write the statistics, which the plan counts.
    assert 0 <= plan.peak_bytes - measured <= 2 * 8 * 4


def test_regions_recompute_their_batch_norms() -> None:
    """As torch does: what leaves a region is the updated statistics, not the norm's result."""
    (plan,) = same_at_every_budget(lambda: made(regions=True), (None,), reference=UNCHECKPOINTED)
    assert sum("batch_norm" in name for name in plan.recomputed) == 8
    torchs = peak_of("aot_eager", lambda: (made(regions=True)[0], made()[1][0]))
    ours = peak_of(
        fxckpt.Backend(inner="aot_eager", scope="graph"),
        lambda: (made(regions=True)[0], made()[1][0]),
    )
    assert ours <= torchs


def test_least_peak_is_below_nested_regions() -> None:
    """Torch's checkpoint per block, op by op, is no lower than the least that is found."""
    torchs = peak_of("aot_eager", lambda: (made(regions=True)[0], made()[1][0]))
    backend = fxckpt.Backend("min", inner="aot_eager", scope="graph")
    assert peak_of(backend, lambda: (made()[0], made()[1][0])) < torchs


def test_eager_region_recomputes_batch_norm() -> None:
    model, (x,) = made()
    state = {name: value.clone() for name, value in model.state_dict().items()}

    def step(budget: float | None) -> dict[str, Tensor]:
        model.load_state_dict(state)
        model.zero_grad()
        torch.manual_seed(1)
        run = (
            model if budget is None else functools.partial(fxckpt.checkpoint, model, budget=budget)
        )
        run(x).backward()
        gradients = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
        return gradients | {n: b.clone() for n, b in model.named_buffers()}

    expected, got = step(None), step(0.4)
    assert all(torch.equal(expected[name], got[name]) for name in expected)
