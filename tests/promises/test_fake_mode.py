"""A model under the user's own ``FakeTensorMode``, whose tensors have no memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

import fxckpt


def make() -> tuple[nn.Module, Tensor]:
    """Return layers with dropout, and their input."""
    blocks = (nn.Sequential(nn.Linear(16, 16), nn.GELU(), nn.Dropout(0.1)) for _ in range(4))
    return nn.Sequential(*blocks), torch.randn(64, 16)


def by_backend(net: nn.Module, x: Tensor) -> fxckpt.Plan:
    """Run a step of the compiled model."""
    backend = fxckpt.Backend(budget=0.8, inner="aot_eager", scope="graph")
    torch.compile(net, backend=backend)(x).sum().backward()
    return backend.plans[0]


def by_rewrite(net: nn.Module, x: Tensor) -> fxckpt.Plan:
    """Run a step of the rewritten model."""
    module: Any = fxckpt.rewrite(net, example_inputs=(x,), budget=0.8)
    module(x).sum().backward()
    plan: fxckpt.Plan = module.plan
    return plan


def by_region(net: nn.Module, x: Tensor) -> fxckpt.Plan:
    """Run a step of the model as one planned region."""
    with fxckpt.record_regions() as regions:
        fxckpt.checkpoint(net, x, budget=0.8).sum().backward()
    plan = regions[0].plan
    assert plan is not None
    return plan


@pytest.mark.parametrize("entry", [by_backend, by_rewrite, by_region])
def test_step_under_a_fake_mode(entry: Callable[[nn.Module, Tensor], fxckpt.Plan]) -> None:
    """The plan is that of real tensors, and the gradients are fake."""
    expected = entry(*make())
    torch._dynamo.reset()
    with FakeTensorMode():
        net, x = make()
        found = entry(net, x)
    assert (found.saved, found.peak_bytes) == (expected.saved, expected.peak_bytes)
    assert all(isinstance(p.grad, FakeTensor) for p in net.parameters())


def test_plan_under_a_fake_mode() -> None:
    """Planning needs no memory, and gives the plan of real tensors."""
    expected = fxckpt.plan(*make(), budget=0.8)
    with FakeTensorMode():
        found = fxckpt.plan(*make(), budget=0.8)
    assert found.saved == expected.saved and found.peak_bytes == expected.peak_bytes
