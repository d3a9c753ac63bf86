"""Warnings of a step: what it took that its budget does not allow for."""

from __future__ import annotations

import time
import warnings

from fxckpt import budgets
from fxckpt.errors import BudgetExceeded, CaptureError, FxckptError
from fxckpt.step.record import StepRecord
from fxckpt.torch_private import failed_frames

TOLD = 0.001
"""Share of the budget from which a peak over it is told."""
TOLD_BYTES = 4096
"""Bytes over the budget from which a peak is told; a loss and a few scalars take less."""
LEFT = 0.05
"""Share of the budget from which code that Dynamo left to Python is told of."""


class StepWarnings:
    """Warns once of each kind, or raises if strict."""

    def __init__(self, *, strict: bool) -> None:
        self._is_strict = strict
        self._made_at = time.time()
        self._has_warned: set[str] = set()

    def compare(self, record: StepRecord, limit: int, step: int, settled_at: int | None) -> None:
        """Tell once, or raise if strict, what a step took that its budget does not allow for.

        ``settled_at`` is the number of the first step whose levels were chosen.
        """
        if record.peak_bytes > limit + max(TOLD * limit, TOLD_BYTES):
            has_settled = settled_at is not None and step > settled_at
            message = _exceeded(record, limit, step, has_settled=has_settled)
            self._tell("exceeded", BudgetExceeded(message))
        for broke, held in record.left.items():
            if held <= max(LEFT * limit, TOLD_BYTES):
                continue
            # Code that follows no break was left by Dynamo if it gave up on a function.
            reason, line = broke or next(iter(failed_frames(self._made_at)), ("", ""))
            if reason:
                message = (
                    f"code that Dynamo left to Python holds {budgets.format_bytes(held)} until the "
                    f"backward, {held / limit:.0%} of the budget of "
                    f"{budgets.format_bytes(limit)}, and has no plan: see {line or 'the model'} "
                    f"({reason}). Change it so that it compiles, or wrap it in "
                    "fxckpt.checkpoint()."
                )
                self._tell(f"left {line}", CaptureError(message))

    def _tell(self, kind: str, error: FxckptError) -> None:
        """Raise an error if strict, else warn of it, once for each kind."""
        if self._is_strict:
            raise error
        if kind not in self._has_warned:
            self._has_warned.add(kind)
            warnings.warn(str(error), stacklevel=2)


def _exceeded(record: StepRecord, limit: int, step: int, *, has_settled: bool) -> str:
    """Return the text that says by what part a step was over its budget."""
    message = (
        f"step {step} had a peak of {record.peak_bytes} bytes "
        f"({budgets.format_bytes(record.peak_bytes)}), over the budget of {limit} bytes "
        f"({budgets.format_bytes(limit)}): {record.peak_at}."
    )
    if not has_settled:
        message += " Later steps are planned with what this one showed."
        if record.most_in_flight > 1:
            message += (
                " If several forwards are in flight at once, say so: fxckpt.Backend(..., "
                "in_flight=n)."
            )
        return message
    return message + " backend.report() lists what the step holds."
