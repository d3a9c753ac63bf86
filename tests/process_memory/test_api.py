"""The report of a step's memory: kinds, modules, sums, and where memory ran out."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import fxckpt
from fxckpt.memory_meter import allocation_limit
from fxckpt.process_memory.report import MemoryReport


class Block(nn.Module):
    """An MLP with a residual."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.act, self.down = nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.act(self.up(x)))


class Model(nn.Module):
    """Four blocks, and their loss."""

    def __init__(self, *, checkpoints: bool = False) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(4))
        self.checkpoints = checkpoints

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False) if self.checkpoints else layer(x)
        return x.square().mean()


def inputs() -> Tensor:
    return torch.randn(1024, 64)


def bytes_of(model: nn.Module) -> int:
    return sum(p.nbytes for p in model.parameters())


def assert_sums_up(report: MemoryReport, step: Callable[[], object]) -> None:
    """Assert that the rows hold what an independent count of the peak does, within 1 %."""
    assert sum(report.kinds().values()) == report.peak_bytes
    assert report.attributed_bytes >= 0.99 * report.peak_bytes
    measured = fxckpt.measure_peak(step)
    assert abs(report.peak_bytes - report.start_bytes - measured) <= 0.01 * measured


@pytest.mark.parametrize("checkpoints", (False, True))
def test_kinds_sum_to_the_peak(checkpoints: bool) -> None:
    """Parameters and optimizer state are to the byte, and layers that are alike one row."""
    model, x = Model(checkpoints=checkpoints), inputs()
    optimizer = torch.optim.AdamW(model.parameters())

    def step() -> None:
        model(x).backward()
        optimizer.step()
        optimizer.zero_grad()

    step()
    report = fxckpt.report_memory(step, model, optimizer=optimizer)
    kinds = report.kinds()
    assert kinds["parameters"] == bytes_of(model)
    counts = 4 * len(list(model.parameters()))
    assert kinds["optimizer state"] == 2 * bytes_of(model) + counts
    rows = {(row.kind, row.module): row for row in report.rows}
    if not checkpoints:
        up = rows["activations outside graphs", "layers.*.up"]
        assert (up.layers, up.tensors, up.bytes) == (4, 4, 4 * 1024 * 256 * 4)
    assert_sums_up(report, step)


def test_gradients_and_state_are_told_apart() -> None:
    """At a peak in the optimizer's first step there are gradients, and state that it makes."""
    model = nn.Linear(512, 512)
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
    x = torch.randn(2, 512)

    def step() -> None:
        model(x).sum().backward()
        optimizer.step()

    kinds = fxckpt.report_memory(step, model).kinds()
    assert kinds["gradients"] == bytes_of(model)
    assert bytes_of(model) < kinds["optimizer state"] <= 2 * bytes_of(model) + 8


def test_compiled_graphs_are_told_by_module() -> None:
    """Activations inside of a compiled graph have their modules from the backend's plan."""
    model, x = Model(), inputs()
    backend = fxckpt.Backend(budget=0.8, inner="aot_eager")
    compiled = torch.compile(model, backend=backend)

    def step() -> None:
        compiled(x).backward()
        model.zero_grad()

    step()
    step()
    report = fxckpt.report_memory(step, model, backend=backend)
    in_graphs = {r.module for r in report.rows if r.kind == "activations in graphs"}
    assert "layers.*.up" in in_graphs
    own = report.peak_bytes - report.kinds().get("held before the step", 0)
    assert report.kinds()["activations in graphs"] > own / 2
    assert_sums_up(report, step)


def test_out_of_memory_names_a_budget_that_fits() -> None:
    """The block and op that failed are named; a step within the budget fits the same memory."""
    model, x = Model(), inputs()

    def step() -> None:
        model(x).backward()

    step()
    model.zero_grad()
    limit = int(0.8 * fxckpt.measure_peak(step))
    model.zero_grad()
    with allocation_limit(limit):
        report = fxckpt.report_memory(step, model)
    failed = report.out_of_memory
    assert failed is not None
    assert (failed.block, failed.phase, failed.level) == ("layers.3.act", "forward", "eager code")
    assert failed.op == "aten.gelu" and "layers.3.act" in str(report)
    assert sum(report.kinds().values()) == report.peak_bytes == failed.held_bytes
    assert failed.fitting_budget <= limit
    backend = fxckpt.Backend(budget=failed.fitting_budget, inner="aot_eager")
    compiled = torch.compile(model, backend=backend)
    compiled(x).backward()
    model.zero_grad()
    with allocation_limit(limit):
        compiled(x).backward()


def test_out_of_memory_names_the_level() -> None:
    """In a compiled graph the error names the graph and its level."""
    model, x = Model(), inputs()
    backend = fxckpt.Backend(budget="1GiB", inner="aot_eager")
    compiled = torch.compile(model, backend=backend)

    def step() -> None:
        compiled(x).backward()
        model.zero_grad()

    step()
    step()
    with allocation_limit(1 << 20):
        report = fxckpt.report_memory(step, model, backend=backend)
    failed = report.out_of_memory
    assert failed is not None and failed.block.startswith("layers.0.")
    assert failed.level.startswith("graph 1 at level 1 of")


def test_other_errors_are_raised() -> None:
    """What the step raises is the user's, and a model must be one."""

    def fails() -> None:
        raise KeyError("x")

    with pytest.raises(KeyError):
        fxckpt.report_memory(fails, nn.Linear(2, 2))
    with pytest.raises(fxckpt.InvalidOption, match="was given function"):
        fxckpt.report_memory(fails, fails)  # type: ignore[arg-type]
