"""Dynamo graphs kept to be compiled again, after Dynamo's own compile has ended."""

from __future__ import annotations

import contextlib
import copy
import sys
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx._lazy_graph_module import _make_graph_module, _use_lazy_graph_module

from fxckpt.torch_private.capture.dynamo import tracing_lock


@dataclass(frozen=True)
class KeptGraph:
    """A graph that Dynamo captured, with all that a compile of it needs."""

    module: fx.GraphModule
    inputs: tuple[Any, ...]
    """Fake example inputs."""
    fake_mode: Any
    compile_id: Any

    @classmethod
    def of(cls, module: fx.GraphModule, inputs: Sequence[Any]) -> KeptGraph:
        """Return a copy of a graph whose compile by Dynamo is in progress."""
        from torch._guards import CompileContext, TracingContext

        context, compiling = TracingContext.try_get(), CompileContext.try_get()
        placeholders = module.graph.find_nodes(op="placeholder")
        # Real inputs would be kept alive, and be made fake again with other sizes.
        fakes = [node.meta.get("example_value") for node in placeholders]
        mode = None if context is None else context.fake_mode
        for fake in fakes:
            # With dynamic=True Dynamo passes floats as tensors of one element, and AOTAutograd
            # makes tensors of another mode anew, without the symbols of such numbers.
            if isinstance(fake, FakeTensor) and fake.item_memo is not None:
                mode = fake.fake_mode
        return cls(
            # Most kept graphs are never run, so that their code is not written.
            _copied(module, is_lazy=True),
            tuple(
                given if fake is None else fake for given, fake in zip(inputs, fakes, strict=True)
            ),
            mode,
            None if compiling is None else compiling.compile_id,
        )

    def compile(self, compiler: Callable[[fx.GraphModule, Sequence[Any]], Any]) -> Any:
        """Return what ``compiler`` makes of the graph, outside of any compile of Dynamo's.

        The generators of random numbers, and the modes that are active, are left as they are. It
        waits for the compiles of other threads, since torch traces one graph at a time.
        """
        from torch._dynamo.utils import preserve_rng_state
        from torch._guards import CompileContext, TracingContext, compile_context, tracing
        from torch.utils._python_dispatch import _disable_current_modes

        with tracing_lock(), contextlib.ExitStack() as stack:
            stack.enter_context(_disable_current_modes())
            stack.enter_context(preserve_rng_state())
            if self.fake_mode is not None:
                stack.enter_context(tracing(TracingContext(self.fake_mode)))
            if self.compile_id is not None:
                stack.enter_context(compile_context(CompileContext(self.compile_id)))
            return compiler(_copied(self.module), list(self.inputs))


def _copied(module: fx.GraphModule, is_lazy: bool = False) -> fx.GraphModule:
    """Return a copy of a graph that shares its parameters and keeps Dynamo's marks.

    The code of a lazy one is written when it is first called.
    """
    with _use_lazy_graph_module(is_lazy):
        result: fx.GraphModule = _make_graph_module(module, copy.deepcopy(module.graph))
    result.meta.update(module.meta)
    for old, new in zip(module.graph.nodes, result.graph.nodes, strict=True):
        # AOTAutograd reads it to find arguments that are one tensor.
        if (source := getattr(old, "_dynamo_source", None)) is not None:
            new._dynamo_source = source
    return result


def is_in_a_forward() -> bool:
    """Return whether the frame that Dynamo compiles was called from some module's forward.

    Then it is one part of a model, and others are likely to run in the same step.
    """
    # A call of a module with hooks has one more function of torch's in between.
    calling, inside = torch.nn.modules.module.__file__, str(Path(torch.__file__).parent / "_dynamo")
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        back, file = frame.f_back, frame.f_code.co_filename
        if (
            back is not None
            and back.f_code.co_filename == calling
            and file != calling
            and not file.startswith(inside)
        ):
            return True
        frame = back
    return False


def outermost_module() -> torch.nn.Module | None:
    """Return the module whose call in Python the running code is in; None if Dynamo compiles it.

    It is the outermost of those called one in another.
    """
    from torch.nn.modules import module

    call = module.Module._wrapped_call_impl.__code__
    found: torch.nn.Module | None = None
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code is call:
            found = frame.f_locals["self"]
        frame = frame.f_back
    return None if found is None or found._compiled_call_impl is not None else found


class _Entering:
    """Hook of a module that calls a method while its object lives; copies of it do nothing."""

    def __init__(self, method: Callable[[], None] | None = None) -> None:
        self.method = None if method is None else weakref.WeakMethod(method)

    def __call__(self, module: torch.nn.Module, args: Any) -> None:
        method = None if self.method is None else self.method()
        if method is not None and not torch.compiler.is_compiling():
            method()

    def __reduce__(self) -> tuple[Any, ...]:
        return (_Entering, ())


def before_forward(module: torch.nn.Module, method: Callable[[], None]) -> Callable[[], None]:
    """Call a method before all else of each forward of a module, while its object lives.

    Return what ends it.
    """
    handle = module.register_forward_pre_hook(_Entering(method), prepend=True)
    weakref.finalize(method.__self__, handle.remove)  # type: ignore[attr-defined]
    return handle.remove


def after_optimizers(method: Callable[[torch.optim.Optimizer], None]) -> None:
    """Call a method after every step of every optimizer, with it, while the method's object lives.

    A step that Dynamo compiles does without: the method would break its graph.
    """
    from torch.optim.optimizer import register_optimizer_step_post_hook

    _hook_optimizers(register_optimizer_step_post_hook, method)


def before_optimizers(method: Callable[[torch.optim.Optimizer], None]) -> None:
    """Call a method before every step of every optimizer, as :func:`after_optimizers` does after.

    An optimizer that is given a closure runs forwards and backwards within its step.
    """
    from torch.optim.optimizer import register_optimizer_step_pre_hook

    _hook_optimizers(register_optimizer_step_pre_hook, method)


def _hook_optimizers(
    register: Callable[[Any], Any], method: Callable[[torch.optim.Optimizer], None]
) -> None:
    held = weakref.WeakMethod(method)

    def call(optimizer: Any, args: Any, kwargs: Any) -> None:
        if torch.compiler.is_compiling():
            return
        if (alive := held()) is not None:
            alive(optimizer)

    handle = register(call)
    weakref.finalize(method.__self__, handle.remove)  # type: ignore[attr-defined]
