"""``fxckpt.report_memory``: the memory of a training step at its peak, by kind and module."""

from __future__ import annotations

import gc
from collections.abc import Callable

import torch
from torch import nn
from torch.optim import Optimizer

from fxckpt.backend import Backend
from fxckpt.errors import InvalidOption
from fxckpt.memory_meter import meter_of
from fxckpt.process_memory.report import (
    BEFORE,
    KERNELS,
    MemoryReport,
    MemoryRow,
    OutOfMemory,
    rows_of,
)
from fxckpt.process_memory.tracker import Failure, MemoryTracker
from fxckpt.step.out_of_memory import is_out_of_memory


def report_memory(
    step: Callable[[], object],
    model: nn.Module,
    *,
    optimizer: Optimizer | None = None,
    backend: Backend | None = None,
) -> MemoryReport:
    """Run a training step and attribute its memory, at the peak or when it runs out.

    All bytes that the device's allocator has in use count, of the whole process: parameters,
    buffers, optimizer state, gradients, activations in compiled graphs and outside of them,
    temporaries, bytes in use before, and those that kernels allocate for themselves. The rows sum
    to the allocator's peak.

    The checkpointing may be anybody's. Call it for a step that ran before, so that nothing is
    compiled in it. Inductor's code allocates past torch's dispatcher: its memory is among the
    kernels' own.

    Parameters
    ----------
    step
        Runs a forward and a backward, and perhaps an optimizer.
    model
        The model, for names of modules, parameters and gradients.
    optimizer
        Its state is told apart. The state that the step itself makes is known without.
    backend
        The backend that compiled the model, for its levels and the modules inside its graphs.

    Returns
    -------
    MemoryReport
        If the step ran out of memory, its ``out_of_memory`` names the block, the level and a
        budget that would have fitted, and the rows are those of that moment.

    Raises
    ------
    InvalidOption
        ``model`` is no module, or ``optimizer`` no optimizer.

    Examples
    --------
    >>> import torch, fxckpt
    >>> model, x = torch.nn.Linear(256, 256), torch.randn(64, 256)
    >>> report = fxckpt.report_memory(lambda: model(x).square().sum().backward(), model)
    >>> report.kinds()["parameters"], sum(report.kinds().values()) == report.peak_bytes
    (263168, True)
    """
    if not isinstance(model, nn.Module):
        raise InvalidOption(
            f"report_memory() names parameters by their model, and was given "
            f"{type(model).__name__}. Example: fxckpt.report_memory(step, model)."
        )
    if optimizer is not None and not isinstance(optimizer, Optimizer):
        raise InvalidOption(
            f"optimizer={optimizer!r} is no optimizer, of which the state is told apart. "
            "Example: fxckpt.report_memory(step, model, optimizer=optimizer)."
        )
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    meter = meter_of(device)
    gc.collect()
    tracker = MemoryTracker(model, device, meter.allocated, _modules_of_nodes(backend))
    if optimizer is not None:
        tracker.adopt_state(optimizer)
    start = meter.allocated()
    before = start - tracker.total_bytes
    failed = None
    with meter.watch() as watch:
        try:
            with tracker.tracking():
                step()
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            failed = tracker.failure
            ran_out = True
        else:
            ran_out = False
        peak = watch.peak()
    fragmented = _fragmented(device)
    if not ran_out:
        rows = _complete(rows_of(tracker.peak), before, peak)
        return MemoryReport(rows, peak, start, fragmented, meter.describes)
    held = peak if failed is None else failed.allocated_bytes
    storages = tracker.peak if failed is None else failed.storages
    rows = _complete(rows_of(storages), before, held)
    told = _out_of_memory(failed, held, max(peak, held) - start, backend)
    return MemoryReport(rows, held, start, fragmented, meter.describes, told)


def _modules_of_nodes(backend: Backend | None) -> dict[str, str]:
    """Return the modules of the nodes of all planned graphs, of the latest plan for each name."""
    snapshots = [plan.snapshot for plan in backend.plans] if backend is not None else []
    return {
        label.name: label.module
        for snapshot in snapshots
        if snapshot is not None
        for label in snapshot.labels
        if label.module
    }


def _complete(rows: tuple[MemoryRow, ...], before: int, allocated: int) -> tuple[MemoryRow, ...]:
    """Return rows with those of bytes that no tensor of the step holds, so that they sum up."""
    kernels = allocated - before - sum(row.bytes for row in rows)
    more = (MemoryRow(BEFORE, "", 0, 0, before), MemoryRow(KERNELS, "", 0, 0, kernels))
    return tuple(sorted((*rows, *(m for m in more if m.bytes)), key=lambda row: -row.bytes))


def _fragmented(device: torch.device) -> int | None:
    if device.type != "cuda":
        return None
    return int(torch.cuda.memory_stats(device).get("inactive_split_bytes.all.current", 0))


def _out_of_memory(
    failed: Failure | None, held: int, budget: int, backend: Backend | None
) -> OutOfMemory:
    if failed is None:
        return OutOfMemory("", "an allocation past torch's ops", "step", "unknown", held, budget)
    phase = "backward" if failed.is_backward else "forward"
    return OutOfMemory(failed.module, failed.op, phase, _level(failed, backend), held, budget)


def _level(failed: Failure, backend: Backend | None) -> str:
    if not failed.is_in_graph:
        return "eager code"
    step = None if backend is None else backend.report().step
    if step is None:
        return "a compiled graph"
    rows = ", ".join(f"graph {r.graph} at level {r.level} of {r.levels}" for r in step.rows)
    return rows or "a compiled graph"
