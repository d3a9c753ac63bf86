"""Warnings of a budget for which nothing was planned by the time an optimizer steps."""

from __future__ import annotations

import time
import warnings
import weakref
from collections.abc import Sequence
from typing import Any, Protocol

import torch

from fxckpt.errors import CaptureError
from fxckpt.partitioner import Partitioner
from fxckpt.reports.compile_report import Break
from fxckpt.torch_private import (
    after_optimizers,
    calling_line,
    compiled_frame,
    failed_frames,
    frames_over_limit,
)

IDLE_STEPS = 3
"""Steps of optimizers after which a backend that compiles nothing tells of it."""

_by_name: weakref.WeakSet[MissingPlan] = weakref.WeakSet()
"""Those of ``backend="fxckpt"``; where a budget is for each graph, each graph has its own."""


class Planning(Protocol):
    """A backend."""

    @property
    def partitioner(self) -> Partitioner:
        """Plans its graphs."""


class MissingPlan:
    """Tells once of a backend that has a budget and no plan."""

    def __init__(self, backend: Planning, breaks: Sequence[Break], *, is_strict: bool) -> None:
        # Weakly: the backend has this object, and lives no longer than its user holds it.
        self._backend = weakref.ref(backend)
        self._breaks, self._is_strict = breaks, is_strict
        self._forward_only: list[str] = []
        """Lines that called graphs which train and have no backward."""
        self._has_told, self._was_called = False, False
        self.is_waiting = False
        """Whether nothing is to be compiled yet, whatever steps."""
        self._steps_without = 0
        """Steps of optimizers since it was made, while nothing was compiled with it."""
        self._made_at = time.time()
        self._lines: dict[int, str] = {}
        """Line that called each function of which it compiled a graph, by the function's number."""

    def watch_optimizers(self) -> None:
        """Tell when an optimizer steps, from now on."""
        after_optimizers(self._tell)

    def tell_with_equals(self) -> None:
        """Tell once for all backends of equal options, each of which may compile one graph."""
        _by_name.add(self)

    def note_call(self) -> None:
        """Note that a graph is compiled."""
        self._was_called = True
        if (frame := compiled_frame()) is not None:
            self._lines[frame] = calling_line()

    def note_forward_only(self, example_inputs: Sequence[Any]) -> None:
        """Keep the line of a graph that trains and has no backward."""
        if torch.is_grad_enabled() and any(
            isinstance(x, torch.Tensor) and x.requires_grad for x in example_inputs
        ):
            self._forward_only.append(calling_line())

    def __repr__(self) -> str:
        return repr(self._backend())

    @property
    def _has_plan(self) -> bool:
        backend = self._backend()
        return backend is not None and bool(
            backend.partitioner.plans or backend.partitioner.fallbacks
        )

    def _tell(self, optimizer: torch.optim.Optimizer) -> None:
        """Warn once where nothing was planned when an optimizer stepped; if strict, raise.

        A backend that nothing was compiled with tells after a few steps, and never raises: they may
        be those of another model.
        """
        if self.is_waiting:
            return
        equals = [m for m in _by_name if repr(m) == repr(self)] if self in _by_name else [self]
        self._tell_of_limit(equals)
        if self._has_told or any(m._has_plan for m in equals):
            return
        left = [] if self._was_called else failed_frames(self._made_at)
        is_idle = not self._forward_only and not left
        if is_idle:
            self._steps_without += not any(m._was_called for m in equals)
            if self._steps_without < IDLE_STEPS:
                return
        for each in equals:
            each._has_told = True
        if is_idle:
            warnings.warn(
                "a budget was asked for, and there is no plan: torch compiled nothing with "
                f"{self!r} in the first {IDLE_STEPS} optimizer steps since it was made. Of a "
                "container of torch's own, such as nn.Sequential, model.compile() compiles "
                "nothing: use torch.compile(model, backend=...).",
                stacklevel=2,
            )
            return
        self._raise_or_warn(self._message(left))

    def _tell_of_limit(self, equals: Sequence[MissingPlan]) -> None:
        """Tell once of each function that Dynamo compiles no more, as it has too many compiles."""
        for frame in frames_over_limit(self._made_at):
            lines = [line for m in equals if (line := m._lines.pop(frame, None)) is not None]
            if lines:
                self._raise_or_warn(
                    "a budget was asked for, and some steps have no plan: Dynamo has compiled what "
                    f"{lines[0]} calls as often as torch._dynamo.config.recompile_limit allows, "
                    "and runs it in Python for inputs that fit none of these. Mark the sizes that "
                    "vary, torch._dynamo.mark_dynamic(x, 0), or raise the limit. "
                    "TORCH_LOGS=recompiles lists what differed."
                )

    def _raise_or_warn(self, message: str) -> None:
        if self._is_strict:
            raise CaptureError(message)
        warnings.warn(message, stacklevel=3)

    def _message(self, left: Sequence[tuple[str, str]]) -> str:
        """Return the message for a model that was run in Python, or compiled without a backward.

        ``left`` are the frames that Dynamo left to Python, each a reason and a line.
        """
        lines = ", ".join(dict.fromkeys(filter(None, self._forward_only)))
        found = (
            "Dynamo made no graph of"
            if left
            else f"no compiled graph ({lines}) has an output that needs a gradient, so that none "
            "has a backward"
        )
        found += "".join(f" {line} ({reason})" for reason, line in left[-1:])
        found += "".join(f". The graph broke at {b.source}: {b.reason}" for b in self._breaks)
        return (
            f"a budget was asked for, and there is no plan: {found}. What is saved for the "
            "backward is held by code that runs in Python. Change that code so that it compiles, "
            "or wrap it in fxckpt.checkpoint(). TORCH_LOGS=graph_breaks lists all breaks."
        )
