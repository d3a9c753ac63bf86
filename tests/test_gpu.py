"""The guarantees on a GPU: equal gradients, and a peak within the budget by the allocator."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.utils.checkpoint
from torch import Tensor, nn

import fxckpt
from tests.models.zoo import ENTRIES, Entry
from tests.steps import FLOOR, differing, outcome, same_at_every_budget
from tests.test_models import Trial, compiled, same
from tests.test_random import DRAWS, Residual

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.mark.parametrize(
    "entry", [e for e in ENTRIES if e.name in ("gpt2", "llama", "unet")], ids=lambda e: e.name
)
def test_same_step_and_peak_within_budget(entry: Entry) -> None:
    """The step is the same, and its peak is within the budget."""
    torch.use_deterministic_algorithms(True)
    trial = Trial(entry)
    trial.model.cuda()
    trial.inputs = tuple(t.cuda() for t in trial.inputs)
    expected = trial.step(torch.compile(trial.model, backend="aot_eager_default_partitioner"))
    for budget in (None, 0.9, 0.7):
        forward, backend = compiled(trial.model, budget)
        got = trial.step(forward)
        (plan,) = backend.plans
        assert same(expected, got) == [], f"budget {budget}"
        if plan.budget_bytes is not None:
            assert trial.peak(forward) <= plan.budget_bytes


@pytest.mark.parametrize(
    "name", ["dropout", "bernoulli", "randn_like", "rrelu", "exponential_", "attention"]
)
def test_recompute_repeats_draw(name: str) -> None:
    """A recomputed random op repeats its draw."""
    same_at_every_budget(
        lambda: (Residual(DRAWS[name]).cuda(), (torch.randn(512, 16, device="cuda"),)),
        (None, 0.8, FLOOR),
    )


class TwoGenerators(nn.Module):
    """A model that draws on the CPU and on the GPU in turn."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            noise = torch.rand(x.shape).to(x.device)
            x = (layer(x).tanh() * noise).sin() * torch.rand_like(x)
        return x


def test_draws_on_two_devices() -> None:
    same_at_every_budget(
        lambda: (TwoGenerators().cuda(), (torch.randn(512, 64, device="cuda"),)), (None, 0.8, FLOOR)
    )


@pytest.mark.parametrize("budget", [None, 0.7])
def test_eager_region_draws_on_two_devices(budget: float | None) -> None:
    """An eager region repeats draws on two devices."""

    def run(checkpoint: Callable[..., Any]) -> dict[str, Tensor]:
        torch.manual_seed(0)
        model = TwoGenerators().cuda()
        return outcome(
            model,
            lambda x: checkpoint(model, x),
            (torch.randn(512, 64, device="cuda", requires_grad=True),),
        )

    assert (
        differing(run(lambda f, x: f(x)), run(functools.partial(fxckpt.checkpoint, budget=budget)))
        == []
    )


def test_eager_region_peaks_like_torch() -> None:
    """An eager region has the peak of torch's checkpoint."""
    block = nn.Sequential(
        nn.Linear(256, 1024), nn.GELU(), nn.Dropout(0.1), nn.Linear(1024, 256)
    ).cuda()
    x = torch.randn(4096, 256, device="cuda", requires_grad=True)

    def peak(checkpoint: Callable[..., Any]) -> int:
        def run() -> None:
            checkpoint(block, checkpoint(block, x)).sum().backward()

        run()
        return fxckpt.measure_peak(run)

    assert peak(fxckpt.checkpoint) <= 1.02 * peak(
        functools.partial(torch.utils.checkpoint.checkpoint, use_reentrant=False)
    )


@pytest.mark.parametrize("mode", [None, "reduce-overhead"])
def test_inductor_repeats_draws_within_budget(mode: str | None) -> None:
    """Steps draw different dropout, and each recomputation repeats it; with CUDA graphs too."""
    model = nn.Sequential(
        *(
            nn.Sequential(nn.Linear(256, 1024), nn.GELU(), nn.Dropout(0.5), nn.Linear(1024, 256))
            for _ in range(6)
        )
    ).cuda()
    x = torch.randn(4096, 256, device="cuda")

    def losses(backend: Any) -> list[Tensor]:
        torch._dynamo.reset()
        torch.manual_seed(0)
        step = torch.compile(model, backend=backend)
        found = []
        for _ in range(4):
            model.zero_grad(set_to_none=True)
            torch.compiler.cudagraph_mark_step_begin()
            loss = step(x).square().mean()
            loss.backward()
            found.append(
                torch.stack(
                    [
                        loss.detach().clone(),
                        *(p.grad.square().sum() for p in model.parameters() if p.grad is not None),
                    ]
                )
            )
        return found

    expected = losses("inductor")
    backend = fxckpt.Backend(budget=0.6, mode=mode)
    got = losses(backend)
    assert not torch.equal(got[-1], got[-2])
    for a, b in zip(expected, got, strict=True):
        torch.testing.assert_close(b, a, rtol=1e-3, atol=1e-3)
    (plan,) = backend.plans
    assert plan.schedule and plan.compiled_peak_bytes <= plan.budget_bytes
