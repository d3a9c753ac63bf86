"""Dynamo graphs kept to be compiled again, after Dynamo's own compile has ended."""

from __future__ import annotations

import contextlib
import copy
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import fx


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
        return cls(
            _copied(module),
            tuple(
                given if fake is None else fake for given, fake in zip(inputs, fakes, strict=True)
            ),
            None if context is None else context.fake_mode,
            None if compiling is None else compiling.compile_id,
        )

    def compile(self, compiler: Callable[[fx.GraphModule, Sequence[Any]], Any]) -> Any:
        """Return what ``compiler`` makes of the graph, outside of any compile of Dynamo's.

        The generators of random numbers, and the modes that are active, are left as they are.
        """
        from torch._dynamo.utils import preserve_rng_state
        from torch._guards import CompileContext, TracingContext, compile_context, tracing
        from torch.utils._python_dispatch import _disable_current_modes

        with contextlib.ExitStack() as stack:
            stack.enter_context(_disable_current_modes())
            stack.enter_context(preserve_rng_state())
            if self.fake_mode is not None:
                stack.enter_context(tracing(TracingContext(self.fake_mode)))
            if self.compile_id is not None:
                stack.enter_context(compile_context(CompileContext(self.compile_id)))
            return compiler(_copied(self.module), list(self.inputs))


def _copied(module: fx.GraphModule) -> fx.GraphModule:
    """Return a copy of a graph that shares its parameters and keeps Dynamo's marks."""
    result = fx.GraphModule(module, copy.deepcopy(module.graph))
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
    from torch.nn.modules import module

    calls = {module.Module._call_impl.__code__, module.Module._wrapped_call_impl.__code__}
    inside = str(Path(torch.__file__).parent / "_dynamo")
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        back = frame.f_back
        if (
            back is not None
            and back.f_code in calls
            and frame.f_code not in calls
            and not frame.f_code.co_filename.startswith(inside)
        ):
            return True
        frame = back
    return False


def backward_node(outputs: Any) -> Any:
    """Return the autograd node of AOTAutograd's compiled function behind its outputs, if any."""
    for output in _tensors(outputs):
        node = output.grad_fn
        for _ in range(4):  # The wrapper may have made views of what the function returned.
            if node is None or type(node).__name__ == "CompiledFunctionBackward":
                break
            node = node.next_functions[0][0] if node.next_functions else None
        if node is not None and type(node).__name__ == "CompiledFunctionBackward":
            return node
    return None


def _tensors(outputs: Any) -> Iterator[torch.Tensor]:
    for output in outputs if isinstance(outputs, (tuple, list)) else (outputs,):
        if isinstance(output, torch.Tensor):
            yield output


def is_compiled_autograd() -> bool:
    """Return whether compiled autograd traces or runs the backward."""
    from torch._dynamo import compiled_autograd

    return bool(
        compiled_autograd.in_compiled_autograd_region
        or getattr(compiled_autograd, "compiled_autograd_enabled", False)
    )


def after_optimizers(callback: Callable[[], None]) -> Any:
    """Call ``callback`` after every step of every optimizer; return the handle that ends it."""
    from torch.optim.optimizer import register_optimizer_step_post_hook

    return register_optimizer_step_post_hook(lambda optimizer, args, kwargs: callback())


def keeps_graph() -> bool:
    """Return whether the running backward keeps the saved values (``retain_graph=True``)."""
    return bool(torch._C._autograd._get_current_graph_task_keep_graph())
