"""The largest step that fits a memory: against every size, and against a step that is run."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fxckpt
from fxckpt.memory_meter import counting_meter

WIDTH = 32
MEMORY = 450_000


class Net(nn.Module):
    """Three blocks and a loss; 25,056 parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(
            *(
                nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))
                for _ in range(3)
            )
        )

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.blocks(x).square().mean()
        return found


def make_step(batch: int) -> tuple[nn.Module, Tensor]:
    """Return a model of three blocks on the meta device, and a batch."""
    with torch.device("meta"):
        return Net(), torch.empty(batch, WIDTH)


def fit(memory: int | str | None = MEMORY, **options: Any) -> fxckpt.Fit:
    return fxckpt.fit(make_step, **{"memory": memory, "reserve": 0.0, "device": "cpu", **options})


def test_largest_is_that_of_all_sizes() -> None:
    """The size found fits, and the next one does not: sizes up to it are planned."""
    found = fit()
    held = found.best.resident
    for size in {*range(1, found.size, 9), found.size - 1, found.size, found.size + 1}:
        model, x = make_step(size)
        left = MEMORY - held.parameter_bytes - held.optimizer_bytes - x.nbytes
        least = fxckpt.plan(model, x, budget="min", device="cpu").peak_bytes
        assert (least <= left) == (size <= found.size)
    assert found.size > 4 and found.best.total_bytes <= MEMORY
    assert found.plan.budget_bytes == MEMORY - held.total_bytes


def test_step_that_is_run_takes_as_much() -> None:
    """Model, optimizer state, inputs and a step of the size found take what was said."""
    meter = counting_meter()
    if meter is None:
        pytest.skip("needs a C++ compiler")
    found = fit(MEMORY)
    budget = MEMORY - found.best.resident.total_bytes

    def step() -> None:
        model(x).backward()

    warm, given = Net(), torch.randn(found.size, WIDTH)
    torch.compile(warm, backend=fxckpt.Backend(budget=budget, inner="aot_eager"))(given).backward()
    del warm, given
    before = meter.allocated()
    plain, x = Net(), torch.randn(found.size, WIDTH)
    optimizer = torch.optim.AdamW(plain.parameters())
    model = torch.compile(plain, backend=fxckpt.Backend(budget=budget, inner="aot_eager"))
    step()
    optimizer.step()
    optimizer.zero_grad()
    with meter.watch() as watch:
        step()
        peak = watch.peak() - before
    # The counts of steps, a number for each parameter, are on the CPU on any device.
    counts = 4 * len(list(plain.parameters()))
    assert found.best.total_bytes <= peak - counts <= 1.01 * found.best.total_bytes


def test_resident_parts_are_counted() -> None:
    """Parameters, their state and accumulated gradients are counted, tied ones once."""

    def tied(batch: int) -> tuple[nn.Module, dict[str, Tensor]]:
        with torch.device("meta"):
            first, frozen = nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False)
            second = nn.Linear(8, 8, bias=False)
            second.weight = first.weight
            frozen.weight.requires_grad_(False)
            model = nn.Sequential(first, frozen, nn.BatchNorm1d(8, affine=False), second)
            return model, {"input": torch.empty(batch, 8)}

    found = fxckpt.fit(tied, memory=100_000, device="cpu", start=2, accumulates=True, reserve=0.5)
    assert found.usable_bytes == 50_000
    held = found.best.resident
    assert (held.parameter_bytes, held.optimizer_bytes, held.gradient_bytes) == (512, 512, 256)
    assert held.buffer_bytes == 32 + 32 + 8
    assert held.input_bytes == found.size * 32
    sgd = fxckpt.fit(tied, memory=100_000, device="cpu", start=2, optimizer=None)
    assert sgd.best.resident.optimizer_bytes == sgd.best.resident.gradient_bytes == 0


def test_sizes_are_multiples() -> None:
    """Every size tried is a multiple, and the search begins at the first above the start."""
    found = fit(over="rows", multiple=4, start=5)
    assert found.trials[0].size == 8 and all(t.size % 4 == 0 for t in found.trials)
    assert min(t.size for t in found.trials if not t.fits) == found.size + 4


def test_least_time_of_one_is_told() -> None:
    """Of the sizes that fit, the fastest for one is named; the largest recomputes."""
    found = fit()
    assert found.best.plan is not None and found.best.plan.recompute_seconds > 0
    assert found.fastest.seconds_of_one == min(t.seconds_of_one for t in found.trials if t.fits)
    assert f"largest batch: {found.size}, with budget=" in str(found)
    assert [row["fits"] for row in found.table()].count(False) >= 1


def test_memory_of_a_named_device() -> None:
    """Without bytes, the memory is that of the device; its blocks are counted whole."""
    found = fxckpt.fit(
        lambda batch: make_step(batch), device="H100", over="batch", start=1 << 22, multiple=1 << 22
    )
    assert found.memory_bytes == 80 * 10**9
    assert found.best.resident.parameter_bytes % 512 == 0
    assert fit("auto", device="H100", start=1 << 22, multiple=1 << 22).memory_bytes == 80 * 10**9


def test_memory_beyond_the_device_warns_once() -> None:
    """More memory than the named device has is told, once for all sizes that are tried."""
    with pytest.warns(UserWarning, match="memory='30GiB' is 30.0 GiB.* one A10G, 24 GB") as told:
        fit("30GiB", device="A10G", start=1 << 22, multiple=1 << 22)
    assert len(told) == 1


def test_least_size_that_does_not_fit() -> None:
    """The error names each part, and what can be used."""
    with pytest.raises(fxckpt.BudgetInfeasible, match=r"parameters .*optimizer state .*gradients"):
        fit(100_000)
    with pytest.raises(fxckpt.BudgetInfeasible) as caught:
        fit(MEMORY, start=512)
    assert caught.value.budget_bytes == MEMORY < caught.value.floor_bytes


@pytest.mark.parametrize(
    "options, told",
    [
        ({"make_step": 3}, "make_step=3 is not a function"),
        ({"make_step": lambda n: n}, "returned int 1, not a model"),
        ({"over": ""}, "not the name of a size"),
        ({"start": 0}, "start=0 is not a whole number"),
        ({"multiple": True}, "multiple=True is not a whole number"),
        ({"reserve": 1.0}, "reserve=1.0 is not a share"),
        ({"memory": None}, "none was named"),
        ({"memory": 0.5}, "memory=0.5 is no memory"),
        ({"memory": "lots"}, "does not parse"),
        ({"optimizer": lambda parameters: 3}, "made int, not an optimizer"),
        ({"device": "H1000"}, "H1000"),
    ],
)
def test_bad_arguments_are_told(options: dict[str, Any], told: str) -> None:
    """An argument that makes no sense is named, with what to give."""
    make = options.pop("make_step", make_step)
    with pytest.raises(ValueError, match=told):
        fxckpt.fit(make, **{"memory": "1MiB", **options})


def test_an_optimizer_may_be_named() -> None:
    """A class of torch's is found by its name, and another name is refused."""
    assert fit(optimizer="SGD").trials == fit(optimizer=torch.optim.SGD).trials
    with pytest.raises(fxckpt.InvalidOption, match=r"optimizer='sgd': torch.optim has no such"):
        fit(optimizer="sgd")


def test_an_error_of_the_step_tells_the_size() -> None:
    """It is the user's own, with a note."""

    def failing(batch: int) -> tuple[nn.Module, Tensor]:
        raise ValueError("no such batch")

    with pytest.raises(ValueError, match="no such batch") as raised:
        fxckpt.fit(failing, memory=MEMORY, device="cpu")
    assert raised.value.__notes__ == ["fxckpt.fit() asked for a step of size 1."]
