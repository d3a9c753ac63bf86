"""Bytes allocated before a step begins, without the gradients of earlier backwards."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils.weak import WeakIdKeyDictionary

from fxckpt.step.graph import StepGraph
from fxckpt.step.measure import StepMeter
from fxckpt.torch_private import before_forward, parts_of


class StepBegin:
    """Knows what was allocated before a step, and what is the step's though it was there.

    Gradients that an earlier backward accumulated are the step's. Once an optimizer was seen, it is
    its steps that part them, and in between there is nothing to find out. Within the step of an
    optimizer that runs a closure again and again, its state may grow from one run to the next.
    """

    def __init__(self) -> None:
        self.entered: int | None = None
        """Bytes allocated when the outermost module was called."""
        self._passed: tuple[int, int] | None = None
        """The same with the gradients of then, if its forward runs the graphs without gradients,
        as its backward may run them again with them."""
        self.has_optimizer = False
        """Whether an optimizer was seen to step."""
        self.is_in_optimizer = False
        """Whether an optimizer has begun its step, within which a closure may run steps of ours."""
        self._roots: weakref.WeakKeyDictionary[torch.nn.Module, dict[str, Callable[[], None]]] = (
            weakref.WeakKeyDictionary()
        )
        """Outermost modules, whose forwards are the begins of steps; with what ends each watch."""
        self._leaves = WeakIdKeyDictionary()
        """Parameters of graphs whose gradients are accumulated."""
        self._first: weakref.WeakSet[StepGraph] = weakref.WeakSet()
        """Graphs that steps began with."""
        self._left = 0
        """Bytes of the latest step that were still allocated at its end."""

    @property
    def _are_parted(self) -> bool:
        """Whether the steps of optimizers part those of ours."""
        return self.has_optimizer and not self.is_in_optimizer

    def note_leaves(self, args: Sequence[Any]) -> None:
        """Note the parameters among the arguments of a call."""
        if not self.has_optimizer:
            self._leaves.update((arg, None) for arg in args if is_parameter(arg))

    def note_root(self, root: torch.nn.Module, enter: Callable[[], None]) -> None:
        """Note an outermost module; ``enter`` is called before its forwards."""
        watches = self._roots.setdefault(root, {})
        if enter.__name__ not in watches:
            watches[enter.__name__] = before_forward(root, enter)

    def forget_roots(self) -> None:
        """Leave the outermost modules as they were."""
        for watches in self._roots.values():
            for end in watches.values():
                end()
        self._roots.clear()

    @property
    def has_passed(self) -> bool:
        """Whether it is known where a step that may begin in a backward would have begun."""
        return self._passed is not None

    def note_passed(self, allocated: int) -> None:
        """Note the bytes allocated before a step that may begin in a backward."""
        self._passed = allocated, self._gradient_bytes()

    def collect_before(self, graph: StepGraph) -> None:
        """Collect garbage before the first step that begins with a graph.

        If it were freed amid the step, it would hide what the step allocates.
        """
        if graph not in self._first:
            self._first.add(graph)
            gc.collect()

    def note_end(self, meter: StepMeter) -> None:
        """Note what a step that ended has left."""
        if not self._are_parted:
            self._left = max(0, meter.allocated() - meter.start)

    def find(self, meter: StepMeter, *, is_in_backward: bool = False) -> bool:
        """Set the bytes allocated before a step; return whether some of it ran before its graphs.

        One that begins within a backward has begun where the forward of that did.

        Only some of the gradients are those of parameters: wrappers that shard these keep sums of
        their own, and a loop may hold the outputs of the micro-batch before. So while there are
        gradients, all that the step before has left, and that may be there still, is this step's.
        """
        before, self.entered = self.entered, None
        passed, self._passed = self._passed, None
        held = None
        if is_in_backward and before is None and passed is not None:
            before, held = passed
        if meter.base is not None and self._are_parted:
            return before is not None
        allocated = meter.allocated()
        if before is not None:
            allocated = min(allocated, before)
        if held is None:
            held = self._gradient_bytes()
        base = allocated - held
        if meter.base is not None and held:
            base = min(base, max(meter.base, allocated - self._left))
        meter.base = base
        return before is not None

    def _gradient_bytes(self) -> int:
        """Return the bytes of the gradients of all parameters that are known."""
        parameters = {id(p): p for root in self._roots for p in root.parameters()}
        parameters |= {id(p): p for p in self._leaves}
        gradients = (p.grad for p in parameters.values())
        return sum(
            part.nbytes for g in gradients if g is not None for part in (*parts_of(g),) or (g,)
        )


def is_parameter(arg: Any) -> bool:
    """Return whether an argument of a call is a leaf that gets a gradient."""
    return isinstance(arg, torch.Tensor) and arg.is_leaf and arg.requires_grad
