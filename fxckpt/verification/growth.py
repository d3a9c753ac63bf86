"""Leaks: bytes that stay in use after a step, and the objects that hold them."""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from fxckpt.budgets import format_bytes
from fxckpt.memory_meter import Meter
from fxckpt.verification.observation import StepRun
from fxckpt.verification.side import CheckedStep
from fxckpt.verification.verdict import Finding

LEAST_BYTES = 1024
"""Growth below this is bookkeeping."""
LEAST_SHARE = 0.01
"""Bytes held below this share of the step's peak are bookkeeping."""
CYCLE_SHARE = 0.05
"""Bytes in reference cycles below this share of the step's peak are bookkeeping."""


@dataclass(frozen=True)
class Usage:
    """Bytes of several steps of a side."""

    peak_bytes: int
    """Peak of the last step above its start."""
    held: tuple[int, ...]
    """Bytes in use after each step, above those before the first."""
    in_cycles: int
    """Bytes of the last step that only Python's garbage collector freed."""
    growing: tuple[tuple[str, int], ...]
    """Attributes of modules that hold more after the last step than before it, or else before
    the first, with bytes."""
    tensors: tuple[tuple[str, int], ...]
    """Types of the tensors that Python holds more of after the last step, with their number."""

    @property
    def growth(self) -> int:
        """Least growth from step to step, the first left out: it may fill caches."""
        pairs = zip(self.held[1:], self.held[2:], strict=False)
        return min((after - before for before, after in pairs), default=0)


def measure(side: CheckedStep, run: StepRun, meter: Meter, steps: int) -> Usage:
    """Run some steps of a side and return the bytes they take and leave."""
    drop_failed_backward(side.device())
    _settle(side)
    start, first = meter.allocated(), _attributes(side)
    held: list[int] = []
    peak = in_cycles = 0
    before: tuple[Counter[str], Counter[str]] = (Counter(), Counter())
    for step in range(steps):
        if step == steps - 1:
            before = _attributes(side), _tensors()
        with _collecting_later(), meter.watch() as watch:
            base = meter.allocated()
            _one_step(side, run)
            peak = watch.peak() - base
            side.reset()
            with_cycles = meter.allocated()
        _settle(side)
        held.append(meter.allocated() - start)
        in_cycles = with_cycles - meter.allocated()
    last = _attributes(side)
    return Usage(
        peak_bytes=peak,
        held=tuple(held),
        in_cycles=in_cycles,
        growing=tuple(((last - before[0]) or (last - first)).most_common()),
        tensors=tuple((_tensors() - before[1]).most_common()),
    )


def drop_failed_backward(device: torch.device) -> None:
    """Free what autograd's queue of a device holds of a backward that raised: the next one does."""
    with torch.inference_mode(False):
        torch.zeros((), device=device, requires_grad=True).backward()


def _one_step(side: CheckedStep, run: StepRun) -> None:
    result, _ = run.forward(side)
    run.backward(result)


def _settle(side: CheckedStep) -> None:
    side.reset()
    gc.collect()


@contextmanager
def collecting_new_objects() -> Iterator[None]:
    """Let the garbage collector look at new objects alone: it has to run after each step."""
    gc.collect()
    if gc.get_freeze_count():  # Somebody else's: it cannot be told from ours afterwards.
        yield
        return
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


class _collecting_later:
    """Leave reference cycles as they are, so that the bytes that they hold are seen."""

    def __enter__(self) -> None:
        self.was_enabled = gc.isenabled()
        gc.disable()

    def __exit__(self, *_: object) -> None:
        if self.was_enabled:
            gc.enable()


def _attributes(side: CheckedStep) -> Counter[str]:
    """Return the bytes of tensors in each Python attribute of the modules."""
    found: Counter[str] = Counter()
    for path, module in side.named_modules():
        for key, value in vars(module).items():
            if key not in ("_parameters", "_buffers", "_modules"):
                size = sum(t.untyped_storage().nbytes() for t in _held_in(value))
                if size:
                    found[f"{path}.{key}" if path else key] = size
    return found


def _held_in(value: Any) -> Iterator[Tensor]:
    if isinstance(value, (Tensor, list, tuple, dict)):
        leaves = pytree.tree_leaves(value)
        return (t for t in leaves if isinstance(t, Tensor) and t.layout is torch.strided)
    return iter(())


def _tensors() -> Counter[str]:
    """Return the number of tensors that Python holds, by type."""
    return Counter(
        f"{str(t.dtype).removeprefix('torch.')}{list(t.shape)}"
        for t in gc.get_objects()
        if type(t) is Tensor
    )


def leaks(seen: Usage, reference: Usage) -> list[Finding]:
    """Return the leaks of a side: memory that the reference does not hold after its steps.

    What the reference's steps freed of earlier ones is no room to hold in.
    """
    findings = []
    growth = seen.growth - max(reference.growth, 0)
    bookkeeping = int(LEAST_SHARE * reference.peak_bytes)
    held = seen.held[-1] - max(reference.held[-1], 0)
    cycles = seen.in_cycles - max(reference.in_cycles, 0)
    if growth > LEAST_BYTES:
        findings.append(
            Finding(
                "leak",
                _holder(seen),
                f"memory grows by {format_bytes(growth)} with each step{_kinds(seen)}",
                "Something keeps results of earlier steps: detach what is kept (loss.item()), and "
                "empty buffers of hooks at the end of the step.",
                growth,
            )
        )
    elif held > max(bookkeeping, LEAST_BYTES):
        findings.append(
            Finding(
                "leak",
                _holder(seen),
                f"{format_bytes(held)} stay in use after the step",
                "Something keeps the last step's tensors: free them at the end of the backward.",
                held,
            )
        )
    if cycles > max(CYCLE_SHARE * reference.peak_bytes, LEAST_BYTES):
        findings.append(
            Finding(
                "leak",
                "",
                f"{format_bytes(cycles)} are freed by Python's garbage collector alone, some time "
                "after the step",
                "Tensors are in a reference cycle, often a closure or a hook that refers to its "
                "owner: break it, or refer weakly.",
                cycles,
            )
        )
    return findings


def _holder(seen: Usage) -> str:
    return seen.growing[0][0] if seen.growing else ""


def _kinds(seen: Usage) -> str:
    if not seen.tensors:
        return ", held by no Python object"
    shown = ", ".join(f"{count} {kind}" for kind, count in seen.tensors[:3])
    return f": {shown}"
