"""The guarantees on a GPU: equal gradients, and a peak within the budget by the allocator."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.utils.checkpoint
from torch import Tensor, nn

import fxckpt
from fxckpt.costs import calibration
from fxckpt.costs.measured import Records
from tests.promises.test_random import DRAWS, Residual
from tests.steps import FLOOR, UNCHECKPOINTED, differing, outcome, same_at_every_budget

sys.path.insert(0, str(Path(__file__).parents[2] / "bench"))
from gpu_models import MODELS, Made

pytestmark = pytest.mark.gpu

SEEDS = 4 * 2 * 512
"""Bytes of two scalars of each attention, which a kernel may leave on the host."""


def made_on(device: str, name: str) -> Made:
    """Return a tiny model of the benchmark with fixed weights."""
    torch.manual_seed(0)
    torch._dynamo.reset()
    return MODELS[name](torch.float32, device, is_tiny=True)


@pytest.mark.usefixtures("deterministic")
@pytest.mark.parametrize("name", MODELS)
def test_same_step_and_predicted_peak(device: str, name: str) -> None:
    """The step is the same, its peak the plan's and within the budget."""
    made = made_on(device, name)
    reference = torch.compile(made.model, backend=UNCHECKPOINTED)
    expected = outcome(made.model, reference, made.inputs)
    plan = fxckpt.plan(made.model, *made.inputs)
    between = (plan.floor_bytes + plan.baseline_peak_bytes) // 2
    for budget in (None, between, plan.floor_bytes):
        made = made_on(device, name)
        backend = fxckpt.Backend(budget=budget, inner="aot_eager")
        step = torch.compile(made.model, backend=backend)
        assert differing(expected, outcome(made.model, step, made.inputs)) == []
        made.model.zero_grad(set_to_none=True)
        (plan,) = backend.plans
        peak = fxckpt.measure_peak(lambda: step(*made.inputs).backward())  # noqa: B023
        counted = SEEDS if device == "cuda" else 0
        assert plan.peak_bytes * 0.999 - counted <= peak <= plan.peak_bytes * 1.001
        assert plan.budget_bytes is None or peak <= plan.budget_bytes


@pytest.mark.parametrize(
    "name", ["dropout", "bernoulli", "randn_like", "rrelu", "exponential_", "attention"]
)
def test_recompute_repeats_draw(device: str, name: str) -> None:
    """A recomputed random op repeats its draw."""
    same_at_every_budget(
        lambda: (Residual(DRAWS[name]).to(device), (torch.randn(512, 16, device=device),)),
        (None, 0.8, FLOOR),
    )


class TwoGenerators(nn.Module):
    """A model that draws on the CPU and on the device in turn."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            noise = torch.rand(x.shape).to(x.device)
            x = (layer(x).tanh() * noise).sin() * torch.rand_like(x)
        return x


def test_draws_on_two_devices(device: str) -> None:
    same_at_every_budget(
        lambda: (TwoGenerators().to(device), (torch.randn(512, 64, device=device),)),
        (None, 0.8, FLOOR),
    )


@pytest.mark.parametrize("budget", [None, 0.7])
def test_eager_region_draws_on_two_devices(device: str, budget: float | None) -> None:
    """An eager region repeats draws on two devices."""

    def run(checkpoint: Callable[..., Any]) -> dict[str, Tensor]:
        torch.manual_seed(0)
        model = TwoGenerators().to(device)
        return outcome(
            model,
            lambda x: checkpoint(model, x),
            (torch.randn(512, 64, device=device, requires_grad=True),),
        )

    assert (
        differing(run(lambda f, x: f(x)), run(functools.partial(fxckpt.checkpoint, budget=budget)))
        == []
    )


def test_eager_region_peaks_like_torch(device: str) -> None:
    """An eager region has the peak of torch's checkpoint."""
    block = nn.Sequential(
        nn.Linear(256, 1024), nn.GELU(), nn.Dropout(0.1), nn.Linear(1024, 256)
    ).to(device)
    x = torch.randn(4096, 256, device=device, requires_grad=True)

    def peak(checkpoint: Callable[..., Any]) -> int:
        def run() -> None:
            checkpoint(block, checkpoint(block, x)).sum().backward()

        run()
        return fxckpt.measure_peak(run)

    assert peak(fxckpt.checkpoint) <= 1.02 * peak(
        functools.partial(torch.utils.checkpoint.checkpoint, use_reentrant=False)
    )


@pytest.mark.parametrize("mode", [None, "reduce-overhead"])
def test_inductor_repeats_draws_within_budget(device: str, mode: str | None) -> None:
    """Steps draw different dropout, and each recomputation repeats it; with CUDA graphs too."""
    torch.manual_seed(0)
    model = nn.Sequential(
        *(
            nn.Sequential(nn.Linear(256, 1024), nn.GELU(), nn.Dropout(0.5), nn.Linear(1024, 256))
            for _ in range(4)
        )
    ).to(device)
    x = torch.randn(4096 if device == "cuda" else 256, 256, device=device)

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
            squares = [p.grad.square().sum() for p in model.parameters() if p.grad is not None]
            found.append(torch.stack([loss.detach().clone(), *squares]))
        return found

    expected = losses("inductor")
    backend = fxckpt.Backend(budget=0.6, mode=mode)
    got = losses(backend)
    assert not torch.equal(got[-1], got[-2])
    for a, b in zip(expected, got, strict=True):
        torch.testing.assert_close(b, a, rtol=1e-3, atol=1e-3)
    (plan,) = backend.plans
    assert plan.schedule and plan.compiled_peak_bytes <= plan.budget_bytes


def test_plan_made_elsewhere_is_of_this_graph(device: str) -> None:
    """A plan made for a named GPU, by shapes alone, is of the graph that the GPU compiles."""
    if device != "cuda":
        pytest.skip("only a GPU compiles a GPU's graph")
    with pytest.MonkeyPatch.context() as patch:
        # As on a machine without a GPU.
        patch.setattr(torch.cuda, "is_available", lambda: False)
        made = MODELS["llama"](torch.bfloat16, "meta", is_tiny=True)
        away = fxckpt.plan(made.model, *made.inputs, budget=0.9, device="H100")
    made = MODELS["llama"](torch.bfloat16, device, is_tiny=True)
    backend = fxckpt.Backend(policy=away, inner="aot_eager")
    torch.compile(made.model, backend=backend)(*made.inputs).backward()
    (plan,) = backend.plans
    assert plan.digest == away.digest


def test_calibration_is_kept(device: str, tmp_path: Path) -> None:
    """A calibration gives every figure, and another process finds it."""
    records, place = Records(tmp_path / "timings.sqlite3"), torch.device(device)
    assert calibration.calibrated(place, records) is None
    found = calibration.calibrate(place, records, calibration.SMALL)
    assert all(getattr(found, name) > 0 for name in calibration.FIGURES)
    assert calibration.calibrated(place, Records(records.path)) == found


@pytest.mark.usefixtures("deterministic")
def test_tiled_sums_are_written_in_place(device: str) -> None:
    """Products in bfloat16 are added to a sum in float32, and none is stored beside it."""
    torch.manual_seed(0)
    head = nn.Linear(64, 8192, bias=False, device=device, dtype=torch.bfloat16)
    given = torch.randn(1024, 64, device=device, dtype=torch.bfloat16)
    targets = torch.randint(0, 8192, (1024,), device=device)

    def loss(rows: Tensor, targets: Tensor) -> Tensor:
        return nn.functional.cross_entropy(head(rows).float(), targets)

    loss(given, targets).backward()
    assert head.weight.grad is not None
    expected = head.weight.grad.clone()
    head.weight.grad = None
    torch._dynamo.reset()
    backend = fxckpt.Backend("min", inner="aot_eager", scope="graph", tile=16)
    step = torch.compile(loss, backend=backend)
    step(given, targets).backward()
    torch.testing.assert_close(head.weight.grad, expected, rtol=3e-2, atol=1e-5)
    head.weight.grad = None
    (plan,) = backend.plans
    assert plan.tiling is not None
    peak = fxckpt.measure_peak(lambda: step(given, targets).backward())
    assert plan.peak_bytes * 0.999 <= peak <= plan.peak_bytes * 1.001
    whole = head.weight.numel() * 4 + given.numel() // given.shape[1] * 8192 * 2
    assert peak < whole
