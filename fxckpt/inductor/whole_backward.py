"""Whole backward: the graph that compiled autograd makes of planned backwards and what is between.

Compiled autograd copies the ops of each backward into it, not what their compiles were told: the
order of the plan, early frees, and the saved values that may be overwritten.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import fx

from fxckpt.passes.whole_backward.mark_order import mark_whole_backward
from fxckpt.plans.types import Plan
from fxckpt.torch_private import (
    copying_kept,
    donated_inputs,
    is_cut_short,
    is_in_compiled_backward,
)
from fxckpt.torch_private.inductor.lowering import Lowerings, free_early


@dataclass(frozen=True)
class WholeBackward:
    """What Inductor is told of a whole backward; its text tells compiles of one graph apart."""

    keeps_order: bool
    frees_early: bool
    donated: tuple[int, ...]
    """Positions of inputs that are saved values, which may be overwritten."""

    @classmethod
    def of(
        cls, plans: Sequence[Plan], gm: fx.GraphModule, example_inputs: Sequence[Any]
    ) -> WholeBackward | None:
        """Return that of a graph about to be compiled; None outside of compiled autograd.

        What is compiled after a graph break may read any saved value.
        """
        if not plans or not is_in_compiled_backward():
            return None
        return cls(
            any(plan.keeps_order for plan in plans),
            any(plan.frees_early for plan in plans),
            () if is_cut_short(gm) else donated_inputs(example_inputs),
        )

    def compile(
        self, lowerings: Lowerings, whole: fx.GraphModule, inputs: Sequence[Any], **given: Any
    ) -> Any:
        """Compile the graph as AOTAutograd hands it over, with its inputs in their order."""
        if self.keeps_order:
            mark_whole_backward(whole.graph)
            if self.frees_early:
                free_early(whole.graph)
        if not self.donated:
            return lowerings.compile(whole, inputs, **given)
        return lowerings.compile_donated(whole, inputs, self.donated, **given)

    def guarded(self, run: Callable[..., Any]) -> Callable[..., Any]:
        """Return the compiled graph, which leaves saved values alone where the graph is kept."""
        return copying_kept(run, self.donated) if self.donated else run
