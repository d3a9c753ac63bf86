"""Rehearsal of a step on fake tensors: its graphs, the order of their calls, and the bytes between.

Graphs are black boxes, whose bytes a plan tells; what code outside of them allocates is counted.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx
from torch.autograd.function import once_differentiable
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from fxckpt.errors import CaptureError
from fxckpt.passes.graphs import Joint
from fxckpt.passes.meta import MODEL
from fxckpt.passes.transforms.place import place
from fxckpt.planner.capture import name_of
from fxckpt.planner.planned_device import PlannedDevice
from fxckpt.solver.step_choice import Moment
from fxckpt.torch_private import (
    calling_line,
    compiled_parts,
    differentiable_outputs,
    first_line,
    inline_regions,
    is_traced_in_backward,
    run_on_fakes,
    trace_joint,
)


@dataclass(frozen=True)
class RehearsedGraph:
    """A graph of a step."""

    source: str
    """Line of the user's code that called it first, or with which it begins."""
    joint: Joint


@dataclass(frozen=True)
class RehearsedStep:
    """Graphs of a step, and their calls in order."""

    graphs: tuple[RehearsedGraph, ...]
    calls: tuple[int, ...]
    """Graph of each call, from 0."""
    moments: tuple[Moment, ...]


def rehearse(
    model_or_fn: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    target: PlannedDevice,
) -> RehearsedStep:
    """Return the graphs, calls and moments of ``model_or_fn(*args, **kwargs)``; nothing is run.

    Raises :class:`CaptureError` if the step needs the values of tensors outside of its graphs, or
    no graph has a backward.
    """
    step = _Rehearsal(target, name_of(model_or_fn), is_of_parts=is_of_parts(model_or_fn))
    run_on_fakes(model_or_fn, args, kwargs, step.compile, step.bytes, target.trace_on)
    if not step.graphs:
        raise CaptureError(
            "nothing to plan: Dynamo made no graph with a backward. Give parameters or inputs that "
            "require grad, and see TORCH_LOGS=graph_breaks for what is left to Python."
        )
    step.close_gap()
    return RehearsedStep(tuple(step.graphs), tuple(step.calls), tuple(step.moments))


def is_of_parts(model_or_fn: Callable[..., Any]) -> bool:
    """Return whether a model has parts that are compiled by themselves."""
    module = getattr(model_or_fn, "__self__", model_or_fn)
    return isinstance(module, torch.nn.Module) and bool(set(compiled_parts(module)) - {""})


class LiveBytes(TorchDispatchMode):
    """Bytes of the tensors that ops have made while it was active, and that are live."""

    def __init__(self) -> None:
        super().__init__()
        self.live = self.most = 0
        """Bytes that are live, and the most since :meth:`restart`."""
        self._seen: dict[int, weakref.ref[Any]] = {}
        self._is_paused = False

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Let Dynamo run compiled code under this mode."""
        return True

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Count nothing that is made inside."""
        before, self._is_paused = self._is_paused, True
        try:
            yield
        finally:
            self._is_paused = before

    def restart(self) -> None:
        """Forget the peak so far."""
        self.most = self.live

    def take(self, values: Any, given: Any = ()) -> None:
        """Count what is among some values, and was not given to their op."""
        known = {storage._cdata for storage in _storages_in(given)}
        for storage in _storages_in(values):
            if storage._cdata not in self._seen and storage._cdata not in known:
                self._count(storage)
        self.most = max(self.most, self.live)

    def _count(self, storage: Any) -> None:
        key, nbytes = storage._cdata, storage.nbytes()

        def forget(_: Any) -> None:
            self.live -= nbytes
            self._seen.pop(key, None)

        self._seen[key] = weakref.ref(storage, forget)
        self.live += nbytes

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if not self._is_paused:
            self.take(result, (args, kwargs))
        return result


def _storages_in(values: Any) -> Iterable[Any]:
    """Yield the storages of the tensors among some values."""
    for leaf in pytree.tree_leaves(values):
        if isinstance(leaf, Tensor) and leaf.layout is torch.strided:
            yield leaf.untyped_storage()


class _Rehearsal:
    """Records a step while it runs."""

    def __init__(self, target: PlannedDevice, name: str, *, is_of_parts: bool) -> None:
        self.graphs: list[RehearsedGraph] = []
        self.calls: list[int] = []
        self.moments: list[Moment] = []
        self.bytes = LiveBytes()
        self._target, self._name, self._is_of_parts = target, name, is_of_parts
        self._flying: dict[int, None] = {}
        """Calls between their forward and their backward."""

    def compile(self, gm: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        """Take a graph that Dynamo made, and return what runs it as a black box."""
        joints: list[Joint] = []

        def receive(joint: fx.GraphModule, num_fwd_outputs: int) -> None:
            joints.append(Joint(joint, num_fwd_outputs))

        is_away, at = self._target.is_away, self._target.place
        with self.bytes.paused():
            gm = inline_regions(gm)
            with self._target.tracing(gm):
                trace_joint(gm, inputs, receive)
        if not joints:
            return gm.forward  # It has no backward.
        (joint,) = joints
        if is_away and at is not None:
            place(joint.module.graph, at)
        joint.module.meta[MODEL] = self._name
        # Who calls the whole is who plans it.
        source = calling_line() if self._is_of_parts else first_line(gm.graph)
        self.graphs.append(RehearsedGraph(source, joint))
        box = _Box(gm, differentiable_outputs(gm), _read_again(joint))
        return partial(self._call, len(self.graphs) - 1, box)

    def _call(self, graph: int, box: _Box, *inputs: Any) -> Any:
        self.close_gap()
        number = len(self.calls)
        self.calls.append(graph)
        self.moments.append(Moment(self.bytes.live, tuple(self._flying), number))
        if torch.is_grad_enabled():
            self._flying[number] = None
            outputs = _BlackBox.apply(self, number, box, *inputs)
        else:
            with self.bytes.paused():
                outputs = box.gm(*inputs)
        self.bytes.take(outputs, inputs)
        self.bytes.restart()
        return outputs

    @contextmanager
    def backward(self, number: int) -> Iterator[None]:
        """Record the backward of a call, which makes gradients inside."""
        self.close_gap()
        self._flying.pop(number)
        self.moments.append(Moment(self.bytes.live, tuple(self._flying), number, True))
        with self.bytes.paused():
            yield
        self.bytes.restart()

    def close_gap(self) -> None:
        """Record the code between two calls."""
        self.moments.append(Moment(self.bytes.most, tuple(self._flying)))
        self.bytes.restart()


@dataclass(frozen=True)
class _Box:
    """A graph that is run for the sizes of its outputs alone."""

    gm: fx.GraphModule
    needs: Sequence[bool]
    """Whether each output needs a gradient."""
    is_read_again: Sequence[bool]
    """Whether the backward reads an output."""


def _read_again(joint: Joint) -> list[bool]:
    """Return whether the backward reads each output of the forward."""
    (output,) = joint.module.graph.find_nodes(op="output")
    return [
        isinstance(value, fx.Node) and any(map(is_traced_in_backward, value.users))
        for value in output.args[0][: joint.num_fwd_outputs]
    ]


class _BlackBox(torch.autograd.Function):
    """A graph that keeps its inputs, and whose backward makes gradients of the right sizes."""

    @staticmethod
    def forward(
        ctx: Any,
        step: _Rehearsal,
        number: int,
        box: _Box,
        *inputs: Any,
    ) -> Any:
        """Run the graph for the sizes of its outputs."""
        with step.bytes.paused():
            outputs = tuple(box.gm(*inputs))
        # What is kept beside them a level tells.
        kept = [out for out, again in zip(outputs, box.is_read_again, strict=False) if again]
        ctx.save_for_backward(*(x for x in (*inputs, *kept) if isinstance(x, Tensor)))
        ctx.step, ctx.number = step, number
        ctx.like = [
            (x.size(), x.stride(), x.dtype, x.device)
            if isinstance(x, Tensor) and x.requires_grad
            else None
            for x in inputs
        ]
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(
            *(
                out
                for out, does_need in zip(outputs, box.needs, strict=True)
                if isinstance(out, Tensor) and not does_need
            )
        )
        return outputs

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, *gradients: Any) -> Any:
        """Return gradients without values."""
        step: _Rehearsal = ctx.step
        with step.backward(ctx.number):
            made = [
                None
                if like is None
                else torch.empty_strided(*like[:2], dtype=like[2], device=like[3])
                for like in ctx.like
            ]
        step.bytes.take(made)
        step.bytes.restart()
        return (None, None, None, *made)
