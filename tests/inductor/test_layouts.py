"""Layouts around convolutions and as_strided in planned backwards."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import (
    CheckpointPolicy,
)

import fxckpt
from fxckpt.inductor.memory import lower_backward
from fxckpt.inductor.planner import InductorPlanner
from fxckpt.passes.graphs import Joint
from fxckpt.planner.pipeline import EMIT_INDUCTOR
from fxckpt.planner.planner import Planner
from fxckpt.torch_private.inductor.lowering import Lowerings
from tests.inductor.models import (
    Grouped,
    skips,
)
from tests.joints import inductor_joint
from tests.steps import peak_of


class Depthwise(nn.Module):
    """Depthwise convolutions of small images.

    Channels last, their backward takes 16 MiB of workspace; as traced, half of one.
    """

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            *(nn.Sequential(nn.Conv2d(64, 64, 1), nn.SiLU()) for _ in range(3))
        )
        self.head = nn.Sequential(
            nn.Conv2d(64, 672, 1), nn.Conv2d(672, 672, 5, padding=2, groups=672), nn.SiLU()
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.stem(x)[:, :, ::21, ::21]).square().mean()


def test_default_choice_is_lowered_in_its_own_layouts() -> None:
    """A budget just above its measured peak is met by the default choice."""

    def make() -> tuple[nn.Module, Tensor]:
        torch.manual_seed(0)
        return Depthwise(), torch.randn(4, 64, 63, 63)

    default = peak_of("inductor", make)
    backend = fxckpt.Backend(budget=default + (1 << 10), cost="flops")
    assert peak_of(backend, make) <= default
    assert not backend.plans[0].keeps_order


def test_unbounded_dynamic_images_take_no_more_than_inductor() -> None:
    """Images of a dynamic batch size keep the layouts of the default choice."""

    def made() -> tuple[nn.Module, Tensor]:
        images = torch.randn(8, 3, 64, 64)
        torch._dynamo.mark_dynamic(images, 0)
        return Grouped(48), images

    assert peak_of(fxckpt.Backend(cost="flops"), made) <= peak_of("inductor", made)


def test_recomputed_convolution_copies_no_other_images(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Without the pass, images of other convolutions are copied to channels last."""
    model, x = skips()

    def allocated(planner: Planner) -> tuple[int, fxckpt.Plan]:
        joint, count = inductor_joint(model, x)
        forward, backward, plan = InductorPlanner(planner).partition(Joint(joint, count))
        lower = Lowerings(None).lower
        lowered = lower_backward(
            forward,
            backward,
            lower,
            num_fwd_outputs=count,
            lowered_forward=lower(forward, None, {}),
        )
        return sum(nbytes for _, nbytes, _, _ in lowered.allocated), plan

    # Pools of torch 2.11 take more, which a plan for 0.85 spares without a convolution.
    budget = 0.8 if torch.__version__ < "2.12" else 0.85
    laid_out, plan = allocated(Planner(budget=budget, cost="flops"))
    assert "convolution" in plan.recomputed
    without = tuple(step for step in EMIT_INDUCTOR if step.name != "to_channels_last")
    monkeypatch.setattr("fxckpt.inductor.planner.EMIT_INDUCTOR", without)
    copied, _ = allocated(Planner(known=(plan,), cost="flops"))
    image_bytes = 4 * 16 * 32 * 32 * 4
    assert laid_out + image_bytes <= copied


def test_gradients_in_channels_last_equal_inductor() -> None:
    """Gradients equal those of Inductor, and that of the input is contiguous."""

    def gradients(backend: Any) -> list[Tensor]:
        torch._dynamo.reset()
        model, x = skips()
        torch.compile(model, backend=backend)(x.requires_grad_()).backward()
        assert x.grad is not None
        assert x.grad.is_contiguous()
        return [x.grad, *(p.grad for p in model.parameters() if p.grad is not None)]

    for ours, default in zip(
        gradients(fxckpt.Backend(budget=0.85, cost="flops")), gradients("inductor"), strict=True
    ):
        torch.testing.assert_close(ours, default)


class Memory(nn.Module):
    """An image that is read as it lies in memory."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 8, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        image = F.gelu(self.first(x))
        rows = torch.as_strided(image, (len(x), 2048), (2048, 1))
        return self.second(image).flatten(1) * torch.tanh(rows * torch.linspace(0, 1, 2048))


@pytest.mark.skipif(
    torch.__version__ < "2.12",
    reason="Inductor of torch 2.11 fuses the zeros that a scatter writes into with what reads them",
)
def test_recomputed_as_strided_reads_the_traced_layout() -> None:
    """Gradients through a recomputed as_strided equal those of eager."""

    def gradients(backend: Any) -> list[Tensor]:
        torch._dynamo.reset()
        torch.manual_seed(0)
        model, x = Memory(), torch.randn(4, 3, 16, 16)
        step = model if backend is None else torch.compile(model, backend=backend)
        step(x).square().mean().backward()
        return [p.grad for p in model.parameters() if p.grad is not None]

    for ours, eager in zip(
        gradients(fxckpt.Backend(policy=lambda *_, **__: CheckpointPolicy.MUST_RECOMPUTE)),
        gradients(None),
        strict=True,
    ):
        torch.testing.assert_close(ours, eager)


def test_symbol_that_lowering_finds_to_be_a_number() -> None:
    """The size of an image is a symbol until its convolution's backward is lowered."""
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.Flatten(),
        nn.Dropout(0.0),
        nn.Linear(512, 10),
    )

    def step(x: Tensor) -> Tensor:
        return nn.functional.cross_entropy(net(x), torch.arange(4))

    x = torch.randn(4, 3, 8, 8)
    expected = torch.autograd.grad(step(x), list(net.parameters()))
    torch._dynamo.reset()
    compiled = torch.compile(step, backend=fxckpt.Backend(), dynamic=True)
    found = torch.autograd.grad(compiled(x), list(net.parameters()))
    torch.testing.assert_close(found, expected)
