"""Calls of graphs of which each has the whole budget: what they hold together is told of once."""

from __future__ import annotations

import threading
import warnings
import weakref
from collections.abc import Callable
from typing import Any

from fxckpt.budgets import format_bytes
from fxckpt.plans.types import Plan
from fxckpt.torch_private import backward_node, has_saved_values

FEW = 64
"""Calls that are remembered at least; a step that saves little is looked at every so often."""


class SharedBudget:
    """Bytes that calls in flight save for their backwards, beside a budget that each graph has.

    They are those of the plans, a part of what the step takes: a step that is told of is over its
    budget, one that is not may be. Graphs of sizes that vary are left out, since their plans are
    for the largest.
    """

    def __init__(self, budget_bytes: int) -> None:
        self.budget_bytes = budget_bytes
        self._flights: list[tuple[weakref.ref[Any], int]] = []
        """Backward of each call, and the bytes saved for it."""
        self._held = 0
        """Sum of these bytes, of which some may be free by now."""
        self._most = FEW
        """Number of calls from which on it is looked at which of them are in flight."""
        self._has_warned = False
        self._lock = threading.Lock()

    def watched(self, run: Callable[..., Any], plan: Plan) -> Callable[..., Any]:
        """Return a compiled graph whose calls are counted."""

        def call(*args: Any) -> Any:
            outputs = run(*args)
            if not self._has_warned and (node := backward_node(outputs)) is not None:
                self._count(node, plan.saved_bytes)
            return outputs

        return call

    def _count(self, node: Any, saved_bytes: int) -> None:
        with self._lock:
            self._flights.append((weakref.ref(node), saved_bytes))
            self._held += saved_bytes
            if self._held <= self.budget_bytes and len(self._flights) < self._most:
                return
            # Only now is it looked at which backwards were run, or dropped.
            self._flights = [
                (ref, nbytes)
                for ref, nbytes in self._flights
                if (alive := ref()) is not None and has_saved_values(alive)
            ]
            self._held = sum(nbytes for _, nbytes in self._flights)
            self._most = max(FEW, 2 * len(self._flights))
            if self._held <= self.budget_bytes:
                return
            count, self._has_warned = len(self._flights), True
            self._flights.clear()
        warnings.warn(
            f"{count} calls of compiled graphs hold {format_bytes(self._held)} for "
            f"their backwards, over the budget of {format_bytes(self.budget_bytes)}, which is that "
            "of each graph by itself. For one budget of the whole step give scope='step': "
            "fxckpt.Backend(budget, scope='step'), or options={'budget': ..., 'scope': 'step'}; "
            "for blocks, fxckpt.compile_blocks(layers, budget=...).",
            stacklevel=3,
        )
