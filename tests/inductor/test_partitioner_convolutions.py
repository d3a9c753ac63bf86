"""Convolution networks that Inductor compiles with a Partitioner in its configuration."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch._inductor.config as inductor_config
from torch import Tensor, nn
from torch._inductor.utils import fresh_cache

import fxckpt
from tests.inductor.models import Skips
from tests.models import zoo
from tests.steps import fresh, outcome

NETS: dict[str, Callable[[], tuple[nn.Module, Any]]] = {
    "resnet": lambda: (
        zoo.ResNet(width=8, blocks=1),
        (torch.randn(8, 3, 16, 16), torch.randint(0, 10, (8,))),
    ),
    "unet": lambda: (Skips(), (torch.randn(4, 8, 16, 16),)),
}


def step(make: Callable[[], tuple[nn.Module, Any]], backend: Any) -> dict[str, Tensor]:
    """Return the loss, the gradients and the buffers of one step, compiled anew."""
    model, inputs = fresh(make)
    return outcome(model, torch.compile(model, backend=backend), inputs)


@pytest.mark.parametrize("name", [pytest.param("resnet", marks=pytest.mark.sweep), "unet"])
def test_convolutions_by_partitioner_as_by_backend(name: str) -> None:
    """Gradients are stock Inductor's, and the compiled peak is that of the backend's plan."""
    expected = step(NETS[name], "inductor")
    backend = fxckpt.Backend(budget=0.9, scope="graph")
    partitioner = fxckpt.Partitioner(budget=0.9)
    step(NETS[name], backend)
    # A graph that torch's caches hold is not planned again.
    with inductor_config.patch(custom_partitioner_fn=partitioner), fresh_cache():
        found = step(NETS[name], "inductor")
    torch.testing.assert_close(found, expected)
    (plan,), (planned,) = partitioner.plans, backend.plans
    assert plan.compiled_peak_bytes == planned.compiled_peak_bytes
    assert plan.compiled_peak_bytes is not None and plan.budget_bytes is not None
    assert plan.compiled_peak_bytes <= plan.budget_bytes < plan.baseline_peak_bytes
